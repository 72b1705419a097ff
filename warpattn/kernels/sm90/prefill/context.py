"""The value that every role of the Hopper prefill kernel gets: tensors, rings, scheduler, mask and score, config."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...nvidia.pipelines import StagedPipeline, empty_arrivals, make_pipeline
from ...pieces.modifiers import Modifiers
from ...pieces.scheduler import TILE_FIELDS
from ..layouts import element_type


@gluon.aggregate
class KeyRows:
    """K or V of a dense batch."""

    desc: tma.tensor_descriptor

    @gluon.jit
    def load(self, ctx, ring, state, tile, key_tile, nbytes: gl.constexpr):
        """One key tile of the key head of `tile` into a slot."""
        full = ring.producer_acquire(state)
        mbarrier.expect(full, nbytes)
        coord = [tile.b, key_tile * ctx.config.block_n, tile.h // ctx.work.group, 0]
        tma.async_load(self.desc, coord, full, ring.tile(state))


@gluon.aggregate
class Tensors:
    """Operands in global memory; the descriptors are 4-D (batch, seq, heads, dim) and clip at the ends."""

    q: tma.tensor_descriptor
    k: KeyRows
    v: KeyRows
    o: tma.tensor_descriptor
    lse: gl.tensor  # float* (batch, heads_q, seq_q), written if `has_lse`
    sinks: gl.tensor  # float* (heads_q,)
    counter: gl.tensor  # int32* tile counter, zero between launches

    @gluon.jit
    def load_queries(self, tile, row, full, smem):
        """Queries from `row` on of a tile's heads into shared memory."""
        tma.async_load(self.q, [tile.b, row, tile.h, 0], full, smem)

    @gluon.jit
    def store_output(self, tile, row, column: gl.constexpr, smem):
        """Rows from `row` on of a tile's output, from `column` on, out of shared memory."""
        tma.async_store(self.o, [tile.b, row, tile.h, column], smem)


@gluon.aggregate
class Rings:
    """Shared memory: the Q, K and V rings, the published tiles, and the output staging tiles."""

    q: StagedPipeline  # a part per warpgroup: [stages * warpgroups, 1, 64 / packed, packed, D]
    k: StagedPipeline  # [stages, 1, N, 1, D]
    v: StagedPipeline  # [stages, 1, N, 1, Dv]
    tiles: gl.shared_memory_descriptor  # [stages * fields, 1] int32: the tile of each Q slot
    out: gl.shared_memory_descriptor  # [warpgroup, 1, 64 / packed, packed, store_cols]


@gluon.aggregate
class Context:
    tensors: gl.base_value  # Tensors or VarlenTensors
    rings: Rings
    work: gl.base_value  # Work or VarlenScheduler
    mods: Modifiers
    scale: gl.tensor  # softmax scale, fp32
    config: gl.constexpr
    has_sinks: gl.constexpr
    has_lse: gl.constexpr


@gluon.constexpr_function
def tile_box(rows, cols, clipped, packed=1):
    """Shape of a tile of rows of `packed` heads in its descriptor: 4-D, or 5-D for a `ClippedRows`."""
    return (1, 1, 1, rows, cols) if clipped else (1, rows // packed, packed, cols)


@gluon.constexpr_function
def stacked(count, box):
    """Shape of `count` tiles."""
    return (count, *box)


@gluon.jit
def make_tiles(
    count: gl.constexpr, rows: gl.constexpr, cols: gl.constexpr, dtype: gl.constexpr, clipped: gl.constexpr,
    packed: gl.constexpr = 1,
):  # fmt: skip
    """Shared memory of `count` tiles."""
    box: gl.constexpr = tile_box(rows, cols, clipped, packed)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(box, dtype)
    return gl.allocate_shared_memory(dtype, stacked(count, box), layout)


@gluon.jit
def make_rings(config: gl.constexpr, fields: gl.constexpr = TILE_FIELDS, clipped: gl.constexpr = False):
    """Allocate shared memory and initialise every barrier. `fields`: int32 of a published tile."""
    dtype: gl.constexpr = element_type(config.element)
    wgs: gl.constexpr = config.consumers
    q = make_tiles(config.q_stages * wgs, config.rows, config.padded_qk, dtype, clipped, config.packed)
    k = make_tiles(config.kv_stages, config.block_n, config.padded_qk, dtype, clipped)
    v = make_tiles(config.kv_stages, config.block_n, config.padded_v, dtype, clipped)
    out = make_tiles(wgs, config.rows, config.store_cols, dtype, clipped, config.packed)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = gl.allocate_shared_memory(gl.int32, [config.q_stages * fields, 1], plain)
    topology: gl.constexpr = config.topology
    return Rings(
        make_pipeline(q, empty_arrivals(topology, "Q"), config.q_stages, wgs),
        make_pipeline(k, empty_arrivals(topology, "K"), config.kv_stages),
        make_pipeline(v, empty_arrivals(topology, "V"), config.kv_stages),
        tiles,
        out,
    )
