"""`DecodeContext`, the argument of both roles of Hopper's decode kernel: tensors, rings, and this CTA's range.

A row of a tile is one query: row r of a key head is token r // group of query head  head * group + r % group.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...nvidia.pipelines import StagedPipeline, empty_arrivals, make_pipeline
from ...pieces.combine import Partials
from ...pieces.modifiers import Modifiers
from ...pieces.scales import OfTokens
from ...pieces.stream_k import Cursor, Queue, StreamK
from ..layouts import element_type, tile_layout


@gluon.aggregate
class Matrix:
    """A (batch, tokens, heads, dim) tensor in memory: strides of the first three in runs of 8 elements."""

    pointer: gl.tensor
    batch: gl.tensor
    token: gl.tensor
    head: gl.tensor

    @gluon.jit
    def rows(self, b, token, head):
        """Pointers to the first element of each (token, head)."""
        at = gl.to_tensor(b).to(gl.int64) * self.batch + token.to(gl.int64) * self.token
        return self.pointer + (at + head.to(gl.int64) * self.head) * 8


@gluon.jit
def matrix(rows):
    """The `Matrix` of a `StridedRows`."""
    return Matrix(rows.pointer, rows.outer, rows.row, rows.head)


@gluon.jit
def scales_of(rows, config: gl.constexpr):
    """The scales of 8-bit queries (`ScaledQueries`); () for 16-bit ones."""
    if config.eight_bit is not None and config.eight_bit.queries:
        return rows.scale
    else:
        return ()


@gluon.aggregate
class KeyCache:
    """K and V, each a `MappedRows`, or a `StridedRows` if ordinary copies gather the rows; key lengths, block table and
    query offsets."""

    k: gl.tuple
    v: gl.tuple
    lengths: gl.tensor  # int32* (batch,)
    table: gl.tensor  # int32* (batch, row of `table_stride`)
    table_stride: gl.tensor
    cu_q: gl.tensor  # int32* (batch + 1,)
    speculative: gl.constexpr  # lengths and table are read while the preceding kernel may write them, see prefetch.py

    @gluon.jit
    def speculative_view(self):
        """A view for speculative reads: volatile, so that stale lines do not stay in L1 past the wait."""
        return KeyCache(self.k, self.v, self.lengths, self.table, self.table_stride, self.cu_q, True)


@gluon.jit
def key_cache(k, v, index):
    """The `KeyCache` of `k`, `v` and a `KeyIndex`."""
    return KeyCache(k, v, index.lengths, index.table, index.table_stride, index.cu_q, False)


@gluon.aggregate
class Results:
    """Where results are stored."""

    out: Matrix
    lse: gl.tensor  # float* (batch, heads_q, tokens), (heads_q, tokens) if ragged
    sinks: gl.tensor  # float* (heads_q,)
    partials: Partials
    tickets: gl.tensor  # int32* (row tiles, heads): finished parts of a head; 0 between launches
    heads: gl.tensor  # int32* (row tiles, heads, 2): number of parts of a head, and the place of the first


@gluon.jit
def make_results(out, lse, sinks, workspace, config: gl.constexpr):
    """The `Results` of a launch's arguments."""
    partials = Partials(workspace.o, workspace.denominators, workspace.rows, config.padded_v)
    return Results(matrix(out), lse, sinks, partials, workspace.tickets, workspace.heads)


@gluon.aggregate
class DecodeRings:
    """Shared memory of decode."""

    k: StagedPipeline  # [stages, 1, N, 1, D]
    v: StagedPipeline  # [stages, 1, N, 1, Dv]
    q: gl.shared_memory_descriptor  # [rows, D], written and read by the consumer warpgroup
    scales: gl.base_value  # `OfTokens`, each [stages, blocks of columns * N] fp32, by K slot; () without such scales


@gluon.aggregate
class DecodeContext:
    q: gl.base_value  # Matrix, or `LatentQueries`
    q_scale: gl.tuple  # ScaleRows of 8-bit queries, else ()
    keys: KeyCache
    results: Results
    rings: gl.base_value  # DecodeRings or MlaRings
    work: gl.tuple  # DecodeShape
    mods: Modifiers
    queue: Queue
    stream_k: StreamK
    start: Cursor  # of this CTA's range
    end: gl.tensor  # unit after this CTA's range
    scale: gl.tensor
    config: gl.constexpr
    has_sinks: gl.constexpr
    has_lse: gl.constexpr


@gluon.aggregate
class Lens:
    """Lengths of one sequence, under the names that `Modifiers` reads."""

    seq_q: gl.tensor
    seq_k: gl.tensor


@gluon.aggregate
class Rows:
    """Rows of a tile: sequence; query head, token, and the token's row in the sequence's tensors, each [M, 1]."""

    b: gl.tensor
    h: gl.tensor
    token: gl.tensor
    query: gl.tensor


@gluon.jit
def rows_of(ctx, item, row):
    """The `Rows` of row numbers `row`, any shape; those past the last query get the last token."""
    work = ctx.work
    number = item.row_tile.row + row
    token = number // work.group
    head = item.part.head * work.group + number - token * work.group
    token = gl.minimum(token, item.row_tile.tokens - 1)
    return Rows(item.row_tile.b, head, token, item.row_tile.q_start + token)


@gluon.jit
def in_tile(ctx, item, row):
    """Whether row numbers `row` of the item's tile are queries."""
    return item.row_tile.row + row < item.row_tile.tokens * ctx.work.group


@gluon.jit
def query_elements(ctx, item, layout: gl.constexpr):
    """(pointers to the item's queries [rows, D] in `layout`, mask of those that exist, their `Rows`)."""
    config: gl.constexpr = ctx.config
    row = gl.arange(0, config.rows, gl.SliceLayout(1, layout))
    col = gl.arange(0, config.padded_qk, gl.SliceLayout(0, layout))[None, :]
    rows = rows_of(ctx, item, row)
    there = in_tile(ctx, item, row)[:, None] & (col < config.dim_qk)
    return ctx.q.rows(rows.b, rows.query, rows.h)[:, None] + col, there, rows


@gluon.jit
def make_decode_rings(config: gl.constexpr):
    """Allocates shared memory, initialises barriers."""
    dtype: gl.constexpr = element_type(config.stored)
    operand: gl.constexpr = element_type(config.operand)
    k_layout: gl.constexpr = tile_layout(config.block_n, config.padded_qk, dtype)
    v_layout: gl.constexpr = tile_layout(config.block_n, config.padded_v, dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([config.rows, config.padded_qk], operand)
    k = gl.allocate_shared_memory(dtype, [config.stages, 1, config.block_n, 1, config.padded_qk], k_layout)
    v = gl.allocate_shared_memory(dtype, [config.stages, 1, config.block_n, 1, config.padded_v], v_layout)
    q = gl.allocate_shared_memory(operand, [config.rows, config.padded_qk], q_layout)
    k_ring = make_pipeline(k, empty_arrivals(config.topology, "K"), config.stages)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scales = ()
    if config.scale_bytes > 0:
        k_shape: gl.constexpr = [config.stages, config.scale_blocks("k") * config.block_n]
        v_shape: gl.constexpr = [config.stages, config.scale_blocks("v") * config.block_n]
        scales = OfTokens(
            gl.allocate_shared_memory(gl.float32, k_shape, plain), gl.allocate_shared_memory(gl.float32, v_shape, plain)
        )
    return DecodeRings(k_ring, make_pipeline(v, empty_arrivals(config.topology, "V"), config.stages), q, scales)
