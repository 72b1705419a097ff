"""What the roles of the pair kernel share: the parts of every tile in two CTAs, barriers, and the tile, as one value.

      CTA 0   rows   0-127 of Q0, Q1 │ keys 0-63 of K  │ left half of V's columns  │ rows   0-127 of S, P, O
      CTA 1   rows 128-255 of Q0, Q1 │ keys 64-127     │ right half               │ rows 128-255

A product of the pair reads both halves of its operands and each CTA keeps its rows of the result, so K and V are loaded
and held once for 512 rows. CTA 0, the leader, issues the products: what has to come together before one arrives on
barriers that are the leader's (`two_ctas`), and commits arrive in both CTAs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    mbarrier,
    tensor_memory_descriptor,
)

from ...nvidia.pipelines import PairKVPipeline, make_pair_pipeline
from ...nvidia.tma_ring import KVConsumerRings, KVProducerRings, TMAConsumerPipeline, make_tma_producer
from ...pieces.modifiers import Modifiers
from ...pieces.scheduler import Tile
from ...pieces.span import TileSpan
from ..layouts import element_type, stacked
from ..prefill_2q.context import Sources, Work


@gluon.aggregate
class Memory:
    q: gl.shared_memory_descriptor  # [2 * chunks, *query box]: query tile after query tile, in chunks of columns
    scales: gl.shared_memory_descriptor  # [2, 256] fp32
    s: tensor_memory_descriptor  # [2, 256, BN] fp32
    o: tensor_memory_descriptor  # [2, 256, Dv] fp32


@gluon.aggregate
class Barriers:
    """An arrival is that of a whole warpgroup."""

    p_ready: gl.shared_memory_descriptor  # [4, 1], the leader's: wg * 2 + part of P
    q1: gl.shared_memory_descriptor  # [1, 1], the leader's: the second query tile has arrived
    s_ready: gl.shared_memory_descriptor  # [2, 2]
    o_ready: gl.shared_memory_descriptor  # [2, 2]
    scale_full: gl.shared_memory_descriptor  # [2, 2]
    scale_empty: gl.shared_memory_descriptor  # [2, 2]


@gluon.aggregate
class Context:
    tensors: Sources
    memory: Memory
    k: PairKVPipeline
    v: PairKVPipeline
    bars: Barriers
    work: Work
    tile: Tile
    span: TileSpan
    mods: Modifiers
    scale: gl.tensor  # softmax scale, fp32
    config: gl.constexpr
    has_sinks: gl.constexpr
    has_lse: gl.constexpr

    @gluon.jit
    def producer(self):
        """The load warps' side of the rings."""
        k = make_tma_producer(self.k, True, self.config.k_chunk_bytes)
        return KVProducerRings(k, make_tma_producer(self.v, False, self.config.v_bytes))

    @gluon.jit
    def consumer(self):
        """The MMA warp's side of the rings."""
        return KVConsumerRings(TMAConsumerPipeline(self.k, True), TMAConsumerPipeline(self.v, False))


@gluon.jit
def make_memory(config: gl.constexpr):
    """Shared memory of Q and the scales, and all of tensor memory."""
    dtype: gl.constexpr = element_type(config.dtype)
    box: gl.constexpr = pair_box(config, "q")
    q = gl.allocate_shared_memory(dtype, stacked(2 * config.num_qk_stages, box), pair_layout(config, "q", dtype))
    rows: gl.constexpr = config.MMA_M
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], [[1]])
    scales = gl.allocate_shared_memory(gl.float32, [2, rows], plain)
    s = allocate_tensor_memory(gl.float32, [2, rows, config.BN], pair_lanes(config.BN))
    o = allocate_tensor_memory(gl.float32, [2, rows, config.padded_ov_depth], pair_lanes(config.padded_ov_depth))
    return Memory(q, scales, s, o)


@gluon.jit
def make_rings(config: gl.constexpr):
    """The K ring, in chunks, and the V ring, initialised."""
    dtype: gl.constexpr = element_type(config.dtype)
    chunks: gl.constexpr = config.num_qk_stages
    stages: gl.constexpr = config.num_kv_stages
    k_shape: gl.constexpr = stacked(stages * chunks, pair_box(config, "k"))
    k = make_pair_pipeline(
        gl.allocate_shared_memory(dtype, k_shape, pair_layout(config, "k", dtype)), stages, chunks
    )
    v_shape: gl.constexpr = stacked(stages, pair_box(config, "v"))
    v = make_pair_pipeline(gl.allocate_shared_memory(dtype, v_shape, pair_layout(config, "v", dtype)), stages)
    k.init()
    v.init()
    return k, v


@gluon.jit
def make_barriers():
    """Every barrier outside the rings, initialised. For those of the leader `count` is that of one CTA."""
    p_ready = mbarrier.allocate_mbarrier(batch=4, two_ctas=True)
    q1 = mbarrier.allocate_mbarrier(batch=1, two_ctas=True)
    mbarrier.init(q1.index(0), count=1)
    for wg in gl.static_range(2):
        mbarrier.init(p_ready.index(2 * wg), count=2)
        mbarrier.init(p_ready.index(2 * wg + 1), count=1)
    return Barriers(p_ready, q1, _two(), _two(), _two(), _two())


@gluon.jit
def _two():
    """One barrier per query tile in each CTA."""
    bars = mbarrier.allocate_mbarrier(batch=2)
    for wg in gl.static_range(2):
        mbarrier.init(bars.index(wg), count=1)
    return bars


@gluon.jit
def arrive(bar, pred=True):
    """One arrival of a warpgroup after its accesses to tensor memory, in the leader if the barrier is its own."""
    gl.inline_asm("tcgen05.fence::before_thread_sync;")
    mbarrier.arrive(bar, count=1, pred=pred)


@gluon.jit
def p_tile(memory, wg: gl.constexpr, config: gl.constexpr):
    """P [256, BN] in the operands' type over the left half of S."""
    s = memory.s.index(wg).slice(0, config.BN // 2)
    return s.reinterpret(element_type(config.dtype), [config.MMA_M, config.BN], pair_lanes(config.BN))


@gluon.jit
def row_place(ctx, rows, wg: gl.constexpr):
    """(query in its sequence, query head) of rows of a query tile."""
    config: gl.constexpr = ctx.config
    first = ctx.tile.row + wg * (config.PairBM_eff // 2)
    if config.fuse_gqa:
        return first + rows // config.group, ctx.tile.h + rows % config.group
    else:
        return first + rows, ctx.tile.h + gl.zeros_like(rows)


@gluon.constexpr_function
def pair_box(config, operand):
    """Box of a chunk of Q ("q", also of an output block), of K ("k"), of V ("v"), over both CTAs."""
    if operand == "q":
        return [1, config.MMA_M // config.tile_heads, config.tile_heads, config.BK0]
    return [1, config.BN, 1, config.BK0 if operand == "k" else config.padded_ov_depth]


@gluon.constexpr_function
def pair_layout(config, operand, dtype):
    """Swizzled layout of a box of which each CTA has half: of V's columns, else of the rows."""
    half = [[0, 0, 0, 1]] if operand == "v" else [[0, 1, 0, 0]]
    return gl.NVMMASharedLayout.get_default_for(pair_box(config, operand), dtype, cga_layout=half)


@gluon.constexpr_function
def pair_lanes(cols):
    """Tensor memory of 256 rows, 128 in each CTA, for products of the pair."""
    return TensorMemoryLayout([128, cols], 1, [[1, 0]], True)
