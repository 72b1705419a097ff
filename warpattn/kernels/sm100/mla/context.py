"""What the roles of latent attention on Blackwell share: operands, memory, barriers, rows and their keys, as one value.

Barriers outside of the ring:

      q    queries are in shared memory          4 attend warps   -> MMA
      s    S is complete                         commit           -> attend
      p    P is written, O rescaled, S read      4 attend warps   -> MMA
      o    O += P·V is complete                  commit           -> attend
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    mbarrier,
    tensor_memory_descriptor,
)
from triton.language.core import base_value

from ...nvidia.clipped_rows import stacked
from ...nvidia.kv_ring import KVPipeline, SharedKVPipeline
from ...nvidia.strided import Strided
from ...pieces.modifiers import Modifiers
from ...pieces.scheduler_split import TileRun
from ..layouts import box_layout, element_type, key_box
from ..recompute import KeyColumns, addressed, runs_of
from ..sync import make_signal
from ..token_scales import CONVERTING, TokenScales, values_end


@gluon.aggregate
class LatentRows:
    """This CTA's 64 rows; row r of a key head is token r // group of query head  head * group + r % group."""

    b: gl.tensor
    first: gl.tensor
    group: gl.tensor
    kv_head: gl.tensor


@gluon.aggregate
class Lengths:
    seq_q: gl.tensor
    seq_k: gl.tensor


@gluon.aggregate
class LatentMemory:
    q: gl.shared_memory_descriptor  # [2, 64, 256]
    q_rope: gl.shared_memory_descriptor  # [64, 64]
    p: gl.shared_memory_descriptor  # [64, BN]
    rope: gl.shared_memory_descriptor  # [stages, 1, BN, 1, 64]
    bytes: base_value  # [staged, 1, BN, 1, 64] of rotary parts of 8 bits, else ()
    s: tensor_memory_descriptor  # [64, BN] fp32
    o: tensor_memory_descriptor  # [64, 512] fp32

    @gluon.jit
    def copy_queries(self, ctx):
        """Starts copies of the rows' queries to shared memory."""
        config: gl.constexpr = ctx.config
        for part in gl.static_range(2):
            copy_columns(ctx, ctx.q.latent, self.q.index(part), 0, part * config.half, config.half)
        copy_columns(ctx, ctx.q.rope, self.q_rope, 0, ctx.q.rope_column, config.rope)

    @gluon.jit
    def key_columns(self, ctx, x):
        """Latents, which are values, and rotary columns, beside them in a key or, with 8 bits, in a tensor of their
        own; `x`: `KeyAddresses`."""
        config: gl.constexpr = ctx.config
        cols: gl.constexpr = config.rope
        column: gl.constexpr = config.dim_v if config.eight_bit is None else 0
        scaled: gl.constexpr = "v" if config.narrow_rope else None
        runs = gl.to_tensor(runs_of(config.dim_v))
        latents = KeyColumns(ctx.q.latent, addressed(x.v), 0, 0, runs, config.dim_v, "v")
        runs = gl.to_tensor(runs_of(cols))
        return latents, KeyColumns(ctx.q.rope, addressed(x.k), ctx.q.rope_column, column, runs, cols, scaled)


@gluon.aggregate
class LatentBarriers:
    """The barriers above, each [1]."""

    q: gl.shared_memory_descriptor
    s: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor


@gluon.aggregate
class LatentContext:
    """The argument of every role."""

    q: base_value  # `LatentQueries` of `Strided`, or one `Strided`
    out: Strided  # output, or parts of it in fp32
    lse: Strided
    out_batch: gl.tensor  # batch entry of the output; each part is a batch
    sinks: gl.tensor
    k: base_value  # rotary parts, one of the classes of sm100/global_rows.py
    v: base_value  # latents
    keys: KVPipeline  # [2 * stages, 1, BN, 1, 256]
    staged: base_value  # SharedKVPipeline of tiles of 8 bits, in the same blocks; () where there are none
    token_scales: base_value  # `OfTokens` of a tile's, see sm100/token_scales.py
    memory: base_value  # LatentMemory or WideMemory
    bars: LatentBarriers
    rows: LatentRows
    lengths: Lengths
    run: TileRun
    mods: Modifiers
    scale: gl.tensor
    scales: base_value  # `Scales` of 8-bit keys and values
    config: gl.constexpr
    traits: gl.constexpr

    @gluon.jit
    def scales_of(self, operand: gl.constexpr):
        """The scales of the tokens of "k" or "v", which have some; latents are values."""
        smem = self.token_scales.k if operand == "k" else self.token_scales.v
        rows = self.scales.k if operand == "k" else self.scales.v
        end = self.lengths.seq_k if operand == "k" else values_end(self.v, self.traits)
        b, head = self.rows.b, self.rows.kv_head
        return TokenScales(smem, operand, rows, self.k, end, b, head, self.run, self.config, self.traits)


@gluon.jit
def make_staged(config: gl.constexpr, parts: gl.constexpr):
    """The ring of tiles of 8 bits in so many blocks, initialised; () without them."""
    if config.eight_bit is None:
        return ()
    else:
        smem = key_blocks(parts * config.staged, config.stored, config)
        bars = mbarrier.allocate_mbarrier(batch=2 * config.staged)
        ring = SharedKVPipeline(smem, bars, config.staged, parts, 1, CONVERTING)
        ring.init()
        return ring


@gluon.jit
def make_ring(config: gl.constexpr):
    """Slots of two blocks of latents each, with their barriers; the rotary part of a slot is in `LatentMemory.rope`."""
    smem = key_blocks(2 * config.stages, config.element, config)
    ring = KVPipeline(smem, mbarrier.allocate_mbarrier(batch=2 * config.stages), config.stages, 2, 1)
    ring.init()
    return ring


@gluon.jit
def key_blocks(count: gl.constexpr, element: gl.constexpr, config: gl.constexpr):
    """Shared memory of `count` blocks of latents."""
    dtype: gl.constexpr = element_type(element)
    box: gl.constexpr = key_box(config, config.half)
    return gl.allocate_shared_memory(dtype, stacked(count, box), box_layout(box, dtype))


@gluon.jit
def make_memory(config: gl.constexpr):
    """Shared memory beside the ring, and tensor memory."""
    dtype: gl.constexpr = element_type(config.element)
    rope_box: gl.constexpr = key_box(config, config.rope)
    wide: gl.constexpr = [config.BM, config.half]
    narrow: gl.constexpr = [config.BM, config.rope]
    p_shape: gl.constexpr = [config.BM, config.BN]
    return LatentMemory(
        gl.allocate_shared_memory(dtype, stacked(2, wide), box_layout(wide, dtype)),
        gl.allocate_shared_memory(dtype, narrow, box_layout(narrow, dtype)),
        gl.allocate_shared_memory(dtype, p_shape, box_layout(p_shape, dtype)),
        gl.allocate_shared_memory(dtype, stacked(config.stages, rope_box), box_layout(rope_box, dtype)),
        rotary_bytes(config),
        allocate_tensor_memory(gl.float32, p_shape, TensorMemoryLayout([config.BM, config.BN], 1)),
        allocate_tensor_memory(gl.float32, [config.BM, config.dim_v], TensorMemoryLayout([config.BM, config.half], 1)),
    )


@gluon.jit
def rotary_bytes(config: gl.constexpr):
    """Rotary parts of 8 bits on their way to be converted; () where they have 16."""
    if config.narrow_rope:
        box: gl.constexpr = key_box(config, config.rope)
        dtype: gl.constexpr = element_type(config.stored)
        return gl.allocate_shared_memory(dtype, stacked(config.staged, box), box_layout(box, dtype))
    else:
        return ()


@gluon.jit
def make_barriers(config: gl.constexpr):
    """Every barrier outside the ring, initialised."""
    topology: gl.constexpr = config.topology
    return LatentBarriers(
        make_signal(topology, "q"), make_signal(topology, "s"), make_signal(topology, "p"), make_signal(topology, "o")
    )


@gluon.aggregate
class RowPositions:
    """Batch, token and query head of rows, any shape; `exists`: whether there is such a row."""

    b: gl.tensor
    token: gl.tensor
    h: gl.tensor
    exists: gl.tensor


@gluon.jit
def row_positions(ctx, row):
    """Positions of rows `row` of the tile; those past the last get the last token's."""
    rows = ctx.rows
    number = rows.first + row
    token = number // rows.group
    head = rows.kv_head * rows.group + number - token * rows.group
    return RowPositions(rows.b, gl.minimum(token, ctx.lengths.seq_q - 1), head, token < ctx.lengths.seq_q)


@gluon.jit
def copy_columns(ctx, q, tile, first: gl.constexpr, column: gl.constexpr, cols: gl.constexpr):
    """Queries `q` of the rows from `first` on, columns from `column` on, into a tile [rows, cols]; what is past the
    last row or column is 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // cols, cols // 8], [4, 1], [1, 0])
    col = column + gl.arange(0, cols, gl.SliceLayout(0, layout))[None, :]
    rows = row_positions(ctx, first + gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))[:, None])
    exists = rows.exists & (col < ctx.config.dim_qk)
    async_copy.async_load(tile, q.at(rows.b, rows.token, rows.h) + col, mask=exists)
