"""What every role of the Hopper kernel can see: tensors, rings, problem and config, as one value."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..nvidia.pipelines import StagedPipeline, make_pipeline
from ..pieces.apply import Modifiers
from ..pieces.tiles import TILE_FIELDS, Work
from .layouts import element_type, tile_layout


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
    lse: gl.tensor  # float* (batch, heads_q, seq_q), written when the config of the launch asks for it
    sinks: gl.tensor  # float* (heads_q,)
    counter: gl.tensor  # int32* tile counter, zero between launches

    @gluon.jit
    def load_queries(self, tile, row, full, smem):
        """Queries from `row` on of a tile's head into shared memory."""
        tma.async_load(self.q, [tile.b, row, tile.h, 0], full, smem)

    @gluon.jit
    def store_output(self, tile, row, column: gl.constexpr, smem):
        """Rows from `row` on of a tile's output, from `column` on, out of shared memory."""
        tma.async_store(self.o, [tile.b, row, tile.h, column], smem)


@gluon.aggregate
class Rings:
    """Shared memory: the Q, K and V rings, the tiles' places, and the output staging tiles."""

    q: StagedPipeline  # a part per warpgroup: [stages * warpgroups, 1, 64, 1, D]
    k: StagedPipeline  # [stages, 1, N, 1, D]
    v: StagedPipeline  # [stages, 1, N, 1, Dv]
    tiles: gl.shared_memory_descriptor  # [stages * TILE_FIELDS, 1] int32: the tile that travels with each Q slot
    out: gl.shared_memory_descriptor  # [warpgroup, 1, 64, 1, store_cols]


@gluon.aggregate
class Context:
    tensors: Tensors
    rings: Rings
    work: Work  # or what answers as it does
    mods: Modifiers
    scale: gl.tensor  # softmax scale, fp32
    config: gl.constexpr
    has_sinks: gl.constexpr
    has_lse: gl.constexpr


@gluon.jit
def make_rings(config: gl.constexpr):
    """Allocate shared memory and initialise every barrier."""
    dtype: gl.constexpr = element_type(config.dtype)
    wgs: gl.constexpr = config.consumers
    q_layout: gl.constexpr = tile_layout(config.rows, config.padded_qk, dtype)
    k_layout: gl.constexpr = tile_layout(config.block_n, config.padded_qk, dtype)
    v_layout: gl.constexpr = tile_layout(config.block_n, config.padded_v, dtype)
    o_layout: gl.constexpr = tile_layout(config.rows, config.store_cols, dtype)
    q = gl.allocate_shared_memory(dtype, [config.q_stages * wgs, 1, config.rows, 1, config.padded_qk], q_layout)
    k = gl.allocate_shared_memory(dtype, [config.kv_stages, 1, config.block_n, 1, config.padded_qk], k_layout)
    v = gl.allocate_shared_memory(dtype, [config.kv_stages, 1, config.block_n, 1, config.padded_v], v_layout)
    out = gl.allocate_shared_memory(dtype, [wgs, 1, config.rows, 1, config.store_cols], o_layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = gl.allocate_shared_memory(gl.int32, [config.q_stages * TILE_FIELDS, 1], plain)
    return Rings(
        make_pipeline(q, wgs, config.q_stages, wgs),
        make_pipeline(k, wgs, config.kv_stages),
        make_pipeline(v, wgs, config.kv_stages),
        tiles,
        out,
    )
