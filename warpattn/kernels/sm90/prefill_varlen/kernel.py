"""Hopper prefill of ragged batches and paged caches: the roles of the dense kernel, on tiles that carry their lengths.

order_kernel           lengths ──▶ list of query blocks, longest first        (nvidia/order_kernel.py)
prefill_varlen_kernel  the roles of prefill/ (load, attend, epilogue), with
    VarlenScheduler    tiles from that list,                                  (pieces/scheduler_varlen.py)
    SplitVarlenScheduler  or their split-KV parts                             (parts.py)
    ClippedColumns     rows of one sequence, clipped at its end,              (nvidia/clipped_rows.py)
    PagedKeys          or keys loaded page by page                            (paged_keys.py)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_wait

from ...nvidia.clipped_rows import ClippedColumns
from ...pieces.modifiers import modifiers
from ...pieces.scales import softmax_scale
from ...pieces.scheduler_varlen import BLOCKS, COUNTER, RECORD, VARLEN_TILE_FIELDS, VarlenScheduler
from ..arguments import TRANSPOSED_KEYS
from ..prefill.context import Context, make_rings, next_key_slot
from ..prefill.eight_bit.rings import ValueColumns
from ..prefill.kernel import start_roles
from .paged_keys import CopiedKeys, PagedKeys, Table
from .parts import SPLIT_VARLEN_FIELDS, SplitVarlenScheduler

TILE = gl.constexpr(TRANSPOSED_KEYS)


@gluon.aggregate
class RaggedKeys:
    """Loads K or V of sequences that are packed end to end."""

    rows: ClippedColumns

    @gluon.jit
    def load(self, ctx, ring, state, tile, key_tile, nbytes: gl.constexpr):
        """Loads a key tile of the key head of `tile` into a slot."""
        full, first, head = next_key_slot(ctx, ring, state, tile, key_tile, nbytes)
        self.rows.load(tile.k_start, tile.seq_k, first, head, full, ring.tile(state))

    @gluon.jit
    def place(self, ctx, tile, key):
        """(0, row) of `key` of a tile's sequence, which locates its scale."""
        return 0, ctx.work.tile_at(tile.number, ctx.config.tokens).k_start + key


@gluon.aggregate
class RaggedValues(ValueColumns):
    """Loads V as transposed by transpose_values.py: (1, 1, dim, heads, places)."""

    @gluon.jit
    def corner(self, ctx, tile, key_tile):
        first = (tile.k_start // TILE + tile.b) * TILE + key_tile * ctx.config.block_n
        return 0, 0, 0, tile.h // ctx.work.group, first


@gluon.aggregate
class VarlenTensors:
    """Operands in memory, see `prefill.context.Tensors`."""

    q: ClippedColumns
    k: RaggedKeys | PagedKeys | CopiedKeys
    v: RaggedKeys | RaggedValues | PagedKeys | CopiedKeys
    o: ClippedColumns
    lse: gl.tensor
    sinks: gl.tensor
    counter: gl.tensor

    @gluon.jit
    def load_queries(self, tile, row, full, smem):
        """Loads queries from `row` on into shared memory."""
        self.q.load(tile.q_start, tile.seq_q, row, tile.h, full, smem)

    @gluon.jit
    def store_output(self, tile, row, column, smem):
        """Stores `smem` to a tile's output from (`row`, `column`) on."""
        self.o.store(tile.output(), tile.seq_q, row, tile.h, column, smem)

    @gluon.jit
    def load_output(self, tile, row, full, smem):
        """Loads the first columns of a tile's output, rows from `row` on, back into shared memory."""
        self.o.load(tile.output(), tile.seq_q, row, tile.h, full, smem)


@gluon.jit
def prefill_varlen_kernel(
    q_maps, o_maps, k_source, v_source, list_ptr, table_ptr, lse_ptr, sinks_ptr, scale, shape, mask_args, score_args,
    config: gl.constexpr, functions: gl.constexpr, has_sinks: gl.constexpr, has_lse: gl.constexpr,
):  # fmt: skip
    """Attention forward of a ragged batch or a paged cache.

    `k_source` and `v_source` are each a `ClippedMap`, or a `StridedRows` if `config.box` is 0; `shape` is a
    `VarlenShape`; `list_ptr` points to the list of order_kernel. Grid: any number of CTAs up to the number of tiles.
    """
    fields: gl.constexpr = SPLIT_VARLEN_FIELDS if config.tiles.split else VARLEN_TILE_FIELDS
    rings = make_rings(config.tiles, fields, clipped=True)
    fence_async_shared()  # TMA sees the new barriers
    gdc_wait()
    work = work_of(shape, list_ptr, config)
    k, v = key_sources(k_source, v_source, Table(table_ptr, shape.table_stride, shape.pages, config.page_size), config)
    q = ClippedColumns(q_maps, shape.q_step, shape.q_unit, 0)
    o = ClippedColumns(o_maps, shape.o_step, shape.o_unit, config.tiles.first_value)
    tensors = VarlenTensors(q, k, v, o, lse_ptr, sinks_ptr, list_ptr + COUNTER)
    mods = modifiers(functions, mask_args, score_args)
    scores = softmax_scale(scale, config.tiles)
    early: gl.constexpr = not config.same_bits and (has_lse or config.tiles.products)
    ctx = Context(tensors, rings, work, mods, scores, scale, config.tiles, has_sinks, has_lse, early)
    if gl.program_id(0) < work.total():  # the host does not know the number of tiles when it makes the grid
        start_roles(ctx)


@gluon.jit
def work_of(shape, list_ptr, config: gl.constexpr):
    """The scheduler of a `VarlenShape`."""
    blocks = gl.load(list_ptr + BLOCKS)
    if config.tiles.split:
        return SplitVarlenScheduler(
            shape.heads_q, shape.group, shape.section, shape.lse_batch, shape.lse_head, blocks, list_ptr + RECORD,
            config.tiles.packed, shape.starts, shape.row_unit, shape.splits,
        )  # fmt: skip
    else:
        return VarlenScheduler(
            shape.heads_q, shape.group, shape.section, shape.lse_batch, shape.lse_head, blocks, list_ptr + RECORD,
            config.tiles.packed,
        )  # fmt: skip


@gluon.jit
def key_sources(k, v, table, config: gl.constexpr):
    """What loads K and V: packed end to end, or in pages."""
    first: gl.constexpr = config.tiles.first_value
    if config.tiles.products:
        return RaggedKeys(ClippedColumns(k.map, k.step, k.unit, 0)), RaggedValues(v.map)
    elif config.page_size > 0 and config.box == 0:
        k_keys = CopiedKeys(k.pointer, k.outer, k.row, k.head, table, 0, config.tiles.dim_qk)
        return k_keys, CopiedKeys(v.pointer, v.outer, v.row, v.head, table, first, first + config.tiles.dim_v)
    else:
        k_rows, v_rows = ClippedColumns(k.map, k.step, k.unit, 0), ClippedColumns(v.map, v.step, v.unit, first)
        if config.page_size == 0:
            return RaggedKeys(k_rows), RaggedKeys(v_rows)
        else:
            return PagedKeys(k_rows, table, config.box), PagedKeys(v_rows, table, config.box)
