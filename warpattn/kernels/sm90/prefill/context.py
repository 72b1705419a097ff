"""The value that every role of the Hopper prefill kernel gets: tensors, rings, scheduler, mask and score, config."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...nvidia.boxes import stacked
from ...nvidia.pipelines import StagedPipeline, empty_arrivals, make_pipeline
from ...pieces.modifiers import Modifiers
from ...pieces.scales import OfTokens
from ...pieces.scheduler import TILE_FIELDS
from ..columns import Columns, make_columns
from ..layouts import element_type
from .config import LEFT_SLOTS, RECOMPUTE_BARRIERS

RECOMPUTE = gl.constexpr(RECOMPUTE_BARRIERS)
LEFT = gl.constexpr(LEFT_SLOTS)
CONVERTING = gl.constexpr(4)  # warps that make 16-bit tiles of 8-bit ones


@gluon.aggregate
class KeyRows:
    """K or V of a dense batch."""

    maps: gl.tuple  # a descriptor for each part of the head dim
    column: gl.constexpr  # the first one

    @gluon.jit
    def load(self, ctx, ring, state, tile, key_tile, nbytes: gl.constexpr):
        """One key tile of the key head of `tile` into a slot."""
        full = ring.producer_acquire(state)
        mbarrier.expect(full, nbytes)
        first, head = key_tile * ctx.config.block_n, tile.h // ctx.work.group
        load_columns(self.maps, tile.b, first, head, self.column, full, ring.tile(state))

    @gluon.jit
    def place(self, ctx, tile, key):
        """(outer, row) of keys of a tile's sequence, for their scales."""
        return tile.b, key


@gluon.aggregate
class ValueColumns:
    """V of a dense batch as transpose_values.py writes it: (batch, dim, heads, keys)."""

    maps: gl.tuple

    @gluon.jit
    def corner(self, ctx, tile, key_tile):
        """Where the values of a key tile begin in the tensor of `maps`."""
        return tile.b, 0, tile.h // ctx.work.group, key_tile * ctx.config.block_n

    @gluon.jit
    def load(self, ctx, ring, state, tile, key_tile, nbytes: gl.constexpr):
        """The values of one key tile into a slot."""
        full = ring.producer_acquire(state)
        mbarrier.expect(full, nbytes)
        tma.async_load(self.maps[0], self.corner(ctx, tile, key_tile), full, ring.tile(state)[0])


@gluon.aggregate
class Tensors:
    """Operands in global memory; the descriptors, one for each part of the head dim, are 4-D (batch, seq, heads, dim)
    and clip at the ends."""

    q: gl.tuple
    k: KeyRows
    v: gl.base_value  # KeyRows or ValueColumns
    o: gl.tuple  # where keys are in parts: of a workspace, as is lse
    lse: gl.tensor  # float* (batch, heads_q, seq_q), written if `has_lse`
    sinks: gl.tensor  # float* (heads_q,)
    counter: gl.tensor  # int32* tile counter, zero between launches
    column: gl.constexpr  # the first one of the output

    @gluon.jit
    def load_queries(self, tile, row, full, smem):
        """Queries from `row` on of a tile's heads into shared memory."""
        load_columns(self.q, tile.b, row, tile.h, 0, full, smem)

    @gluon.jit
    def load_output(self, tile, row, full, smem):
        """Rows from `row` on of a tile's output back into shared memory."""
        load_columns(self.o, tile.output(), row, tile.h, self.column, full, smem)

    @gluon.jit
    def store_output(self, tile, row, column, smem):
        """Rows from `row` on of a tile's output, from `column` on, out of shared memory."""
        store_blocks(self.o, tile.output(), row, tile.h, column + self.column, smem)


@gluon.jit
def store_blocks(maps, b, row, head, column, smem):
    """Rows from `row` on of one head or several, from `column` on, out of the parts of a tile."""
    for part in gl.static_range(len(smem)):
        tma.async_store(maps[part], [b, row, head, column], smem[part])
        column += smem[part].shape[3]


@gluon.constexpr_function
def output_type(config):
    """Of the output: parts of a split go out in fp32."""
    return gl.float32 if config.split else element_type(config.out)


@gluon.constexpr_function
def query_type(config):
    """Of queries in memory."""
    return stored_type(config) if config.eight_bit is not None and config.eight_bit.queries else element_type(
        config.element
    )


@gluon.constexpr_function
def stored_type(config):
    """Of keys and values in memory."""
    return element_type(config.element if config.eight_bit is None else config.eight_bit.element)


@gluon.jit
def load_columns(maps, b, row, head, column, full, smem):
    """Rows from `row` on of one head, columns from `column` on, into the parts of a tile."""
    for part in gl.static_range(len(smem)):
        tma.async_load(maps[part], [b, row, head, column], full, smem[part])
        column += smem[part].shape[3]


@gluon.aggregate
class NarrowRing:
    """A ring of 16-bit tiles as TMA fills it: 8-bit rows in the first half of each part, and barriers of its own."""

    ring: StagedPipeline
    config: gl.constexpr
    number: gl.constexpr  # 0 of keys, 1 of values

    @gluon.jit
    def producer_acquire(self, state):
        """Wait until a slot is empty; returns the barrier that its 8-bit tile completes."""
        self.ring.producer_acquire(state)
        return self.loaded(state)

    @gluon.jit
    def loaded(self, state):
        """The barrier that completes when a slot's 8-bit tile has arrived."""
        return self.ring.bars.index(state.index + 2 * self.ring.stages)

    @gluon.jit
    def wait(self, state):
        """Wait until a slot's 8-bit tile has arrived."""
        mbarrier.wait(self.loaded(state), state.phase)

    @gluon.jit
    def tile(self, state):
        """The 8-bit parts of a slot."""
        return first_halves(self.ring.tile(state), self.config)


@gluon.jit
def first_halves(wide, config: gl.constexpr):
    """The first halves of 16-bit parts of a tile, as 8-bit ones."""
    parts = ()
    for part in gl.static_range(len(wide)):
        parts += (first_half(wide[part], stored_type(config)),)
    return parts


@gluon.jit
def first_half(wide, dtype: gl.constexpr):
    """The first half of a 16-bit part, as one of 8 bits."""
    box: gl.constexpr = wide.shape
    return wide.reinterpret(dtype, stacked(2, box), gl.NVMMASharedLayout.get_default_for(box, dtype)).index(0)


@gluon.jit
def arriving_queries(tile, config: gl.constexpr):
    """The parts of a slot of queries as they are loaded."""
    if config.widens_queries:
        return first_halves(tile, config)
    else:
        return tile


@gluon.aggregate
class Rings:
    """Shared memory: the Q, K and V rings, the published tiles, and the output staging tiles; all but the published
    ones are `Columns`."""

    q: StagedPipeline  # a tile per warpgroup: [stages * warpgroups, 1, 64 / packed, packed, D]
    k: StagedPipeline  # [stages, 1, N, 1, D]
    v: StagedPipeline  # [stages, 1, N, 1, Dv]
    k_in: gl.base_value  # the same as they are filled: 8-bit ones as `NarrowRing`
    v_in: gl.base_value
    factors: gl.shared_memory_descriptor  # [stages * warpgroups, 1 or 64] fp32, see `query_factors` of the config
    scales: gl.base_value  # `OfTokens` of 8-bit keys and values, each [stages * blocks, N] fp32; () without such
    tiles: gl.shared_memory_descriptor  # [stages * fields, 1] int32: the tile of each Q slot
    out: Columns  # [warpgroup, 1, 64 / packed, packed, columns stored at a time]
    left: gl.shared_memory_descriptor  # [8, 1] int32, see nonfinite.py
    recompute: gl.shared_memory_descriptor  # barriers of recompute.py


@gluon.aggregate
class Context:
    tensors: gl.base_value  # Tensors or VarlenTensors
    rings: Rings
    work: gl.base_value  # Work, SplitWork or VarlenScheduler
    mods: Modifiers
    scale: gl.tensor  # softmax scale, fp32; of a tile with 8-bit keys `of_tile` times their scales
    scales: gl.base_value  # `Scales` of 8-bit keys and values
    config: gl.constexpr
    has_sinks: gl.constexpr
    has_lse: gl.constexpr

    @gluon.jit
    def with_scale(self, scale):
        """The same with another softmax scale."""
        return Context(
            self.tensors, self.rings, self.work, self.mods, scale, self.scales, self.config, self.has_sinks,
            self.has_lse,
        )  # fmt: skip


@gluon.jit
def make_rings(config: gl.constexpr, fields: gl.constexpr = TILE_FIELDS, clipped: gl.constexpr = False):
    """Allocate shared memory and initialise every barrier. `fields`: int32 of a published tile."""
    dtype: gl.constexpr = element_type(config.element)
    wgs: gl.constexpr = config.consumers
    q = make_columns(config.q_stages * wgs, config.rows, config.qk_parts, dtype, clipped, config.packed)
    k = make_columns(config.kv_stages, config.block_n, config.qk_parts, element_type(config.operand), clipped)
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
    out = make_columns(wgs, config.rows, config.store_parts, output_type(config), clipped, config.packed)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = gl.allocate_shared_memory(gl.int32, [config.q_stages * fields, 1], plain)
    topology: gl.constexpr = config.topology
    scales = ()
    if config.scale_bytes > 0:
        k_rows: gl.constexpr = config.eight_bit.blocks("k", config.padded_qk) + (config.eight_bit.columns("k") > 0)
        k_shape: gl.constexpr = [config.kv_stages * k_rows, config.block_n]
        v_shape: gl.constexpr = [config.kv_stages * config.eight_bit.blocks("v", config.padded_v), config.block_n]
        scales = OfTokens(
            gl.allocate_shared_memory(gl.float32, k_shape, plain), gl.allocate_shared_memory(gl.float32, v_shape, plain)
        )
    factors = tiles
    if config.query_factors > 0:
        factors = gl.allocate_shared_memory(gl.float32, [config.q_stages * wgs, config.query_factors], plain)
    return Rings(
        make_pipeline(q, empty_arrivals(topology, "Q"), config.q_stages, wgs),
        k_ring,
        v_ring,
        k_in,
        v_in,
        factors,
        scales,
        tiles,
        out,
        gl.allocate_shared_memory(gl.int32, [LEFT, 1], plain),
        mbarrier.allocate_mbarrier(batch=RECOMPUTE),
    )
