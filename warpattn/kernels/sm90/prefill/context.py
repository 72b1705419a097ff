"""`Context`, the argument of every role of Hopper's prefill: tensors, rings, scheduler, mask and score, config."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...nvidia.pipelines import StagedPipeline, empty_arrivals, make_pipeline
from ...pieces.modifiers import Modifiers
from ...pieces.scheduler import TILE_FIELDS
from ..columns import Columns, make_columns
from ..exact_columns import make_boxes
from ..layouts import element_type
from ..partial_rows import box_heads, clear_queries
from .config import LEFT_SLOTS, RECOMPUTE_BARRIERS
from .eight_bit.rings import CONVERTING, NarrowRing, make_factors, make_scales

RECOMPUTE = gl.constexpr(RECOMPUTE_BARRIERS)
LEFT = gl.constexpr(LEFT_SLOTS)


@gluon.jit
def next_key_slot(ctx, ring, state, tile, key_tile, nbytes: gl.constexpr):
    """Waits for a slot and announces a key tile's bytes; returns (full barrier, first key, key head of `tile`)."""
    full = ring.producer_acquire(state)
    mbarrier.expect(full, nbytes)
    return full, key_tile * ctx.config.block_n, tile.h // ctx.work.group


@gluon.aggregate
class KeyRows:
    """Loads K or V of a dense batch by TMA."""

    maps: gl.tuple  # a TMA descriptor for each part of the head dim
    column: gl.constexpr  # first column to load

    @gluon.jit
    def load(self, ctx, ring, state, tile, key_tile, nbytes: gl.constexpr):
        """Loads a key tile of the key head of `tile` into a slot."""
        full, first, head = next_key_slot(ctx, ring, state, tile, key_tile, nbytes)
        load_columns(self.maps, tile.b, first, head, self.column, full, ring.tile(state))

    @gluon.jit
    def place(self, ctx, tile, key):
        """(batch entry, row) of `key` of a tile's sequence, which locates its scale."""
        return tile.b, key


@gluon.aggregate
class Tensors:
    """Operands in memory. There is one TMA descriptor per part of the head dim, 4-D (batch, seq, heads, dim);
    TMA clips at its ends."""

    q: gl.tuple
    k: KeyRows
    v: gl.base_value  # KeyRows or ValueColumns
    o: gl.tuple  # with split keys o and lse are a workspace of partial outputs
    lse: gl.tensor  # float* (batch, heads_q, seq_q), written if `has_lse`
    sinks: gl.tensor  # float* (heads_q,)
    counter: gl.tensor  # int32* tile counter, zero between launches
    column: gl.constexpr  # first column of the output

    @gluon.jit
    def load_queries(self, tile, row, full, smem):
        """Loads queries from `row` on into shared memory."""
        load_columns(self.q, tile.b, row, tile.h, 0, full, smem)

    @gluon.jit
    def load_output(self, tile, row, full, smem):
        """Loads output rows from `row` on back."""
        load_columns(self.o, tile.output(), row, tile.h, self.column, full, smem)

    @gluon.jit
    def store_output(self, tile, row, column, smem):
        """Stores `smem` to a tile's output from (`row`, `column`) on."""
        store_blocks(self.o, tile.output(), row, tile.h, column + self.column, smem)


@gluon.jit
def store_blocks(maps, b, row, head, column, smem):
    """Stores the parts of a tile to (`b`, `row`, `head`, `column`) and on."""
    for part in gl.static_range(len(smem)):
        tma.async_store(maps[part], [b, row, head, column], smem[part])
        column += smem[part].shape[3]


@gluon.constexpr_function
def output_type(config):
    """Type of the output in memory; fp32 for partial outputs."""
    return gl.float32 if config.split else element_type(config.out)


@gluon.jit
def load_columns(maps, b, row, head, column, full, smem):
    """Loads (`b`, `row`, `head`, `column`) and on into the parts of a tile."""
    for part in gl.static_range(len(smem)):
        tma.async_load(maps[part], [b, row, head, column], full, smem[part])
        column += smem[part].shape[3]


@gluon.aggregate
class Rings:
    """Shared memory: the Q, K and V rings, the published tiles, and the staging tiles of the output. All tiles but the
    published ones are `Columns`."""

    q: StagedPipeline  # a tile per warpgroup: [stages * warpgroups, 1, 64 / heads, heads, D], `box_heads`
    k: StagedPipeline  # [stages, 1, N, 1, D]
    v: StagedPipeline  # [stages, 1, N, 1, Dv]
    k_in: gl.base_value  # K ring as the producer fills it: `NarrowRing` for 8-bit tiles, else `k`
    v_in: gl.base_value
    factors: gl.shared_memory_descriptor  # [stages * warpgroups, 4 or 64] fp32, see `query_factors` of the config
    scales: gl.base_value  # `OfTokens` of 8-bit keys and values, each [stages * blocks, N] fp32; () without such
    tiles: gl.shared_memory_descriptor  # [stages * fields, 1] int32: the tile of each Q slot
    out: Columns  # [warpgroup, 1, 64 / heads, heads, columns stored at a time]
    left: gl.shared_memory_descriptor  # [4, 1] int32, see nonfinite.py
    recompute: gl.shared_memory_descriptor  # barriers of recompute.py


@gluon.aggregate
class Context:
    tensors: gl.base_value  # Tensors or VarlenTensors
    rings: Rings
    work: gl.base_value  # Work, SplitWork or VarlenScheduler
    mods: Modifiers
    scale: gl.tensor  # softmax scale, fp32; for 8-bit tensors `of_tile` multiplies their scales in
    scales: gl.base_value  # `Scales` of 8-bit keys and values
    config: gl.constexpr
    has_sinks: gl.constexpr
    has_lse: gl.constexpr
    moves_early: gl.constexpr  # references move in the second tile after a masked one, where rows have seen few keys

    @gluon.jit
    def with_scale(self, scale):
        """The context with another softmax scale."""
        return gl.aggregate_replace(self, scale=scale)


@gluon.jit
def make_rings(config: gl.constexpr, fields: gl.constexpr = TILE_FIELDS, clipped: gl.constexpr = False):
    """Allocates shared memory, initialises barriers. `fields`: int32 of a published tile."""
    dtype: gl.constexpr = element_type(config.element)
    wgs: gl.constexpr = config.consumers
    q = make_columns(config.q_stages * wgs, config.rows, config.qk_parts, dtype, clipped, box_heads(config))
    clear_queries(q, config)
    k = make_columns(config.kv_stages, config.block_n, config.qk_parts, element_type(config.operand), clipped)
    if config.exact_values:
        v = make_boxes(config.v_stages, config.v_rows, config.v_columns, element_type(config.weights), clipped)
    else:
        v = make_columns(config.v_stages, config.v_rows, config.v_columns, element_type(config.weights), clipped)
    converts: gl.constexpr = config.converts
    more: gl.constexpr = config.kv_stages if converts else 0
    fills: gl.constexpr = CONVERTING if converts else 1
    k_ring = make_pipeline(k, empty_arrivals(config.topology, "K"), config.kv_stages, 1, more, fills)
    v_ring = make_pipeline(v, empty_arrivals(config.topology, "V"), config.v_stages, 1, more, fills)
    k_in = k_ring
    v_in = v_ring
    if converts:
        k_in = NarrowRing(k_ring, config, 0)
        v_in = NarrowRing(v_ring, config, 1)
    out = make_columns(wgs, config.rows, config.store_parts, output_type(config), clipped, box_heads(config))
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = gl.allocate_shared_memory(gl.int32, [config.q_stages * fields, 1], plain)
    scales = make_scales(config)
    factors = make_factors(config, tiles)
    q_ring = make_pipeline(q, empty_arrivals(config.topology, "Q"), config.q_stages, wgs)
    left = gl.allocate_shared_memory(gl.int32, [LEFT, 1], plain)
    recompute = mbarrier.allocate_mbarrier(batch=RECOMPUTE)
    return Rings(q_ring, k_ring, v_ring, k_in, v_in, factors, scales, tiles, out, left, recompute)
