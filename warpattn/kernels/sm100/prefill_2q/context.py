"""What every role of the Blackwell kernel can see: operands, memory, barriers, the tile and its keys, as one value.

      shared memory   Q0 Q1 │ K/V slots │ scale of each row │ barriers        (O leaves through the room of Q)
      tensor memory   S0 (P0 over it) │ S1 (P1 over it) │ O0 │ O1             512 columns of 128 lanes

Barriers, in the order in which they lie in memory (`wg` is a softmax warpgroup and its query tile):

      s_consumer[wg][part]   P's part is written (and, for part 0, O is rescaled)     4 or 4 + 4 warps  -> MMA
      c_producer[wg]         the scale of O is in shared memory                       4 softmax warps   -> correction
      c_consumer[wg]         the scale has been read                                  4 correction warps -> softmax
      s_producer[wg]         S = Q·K is complete                                      commit            -> softmax
      q1                     the second query tile has arrived                        its bytes         -> MMA
      ring full / empty      a K or V tile has arrived / has been read                bytes / commit    -> MMA / load
      o_producer[wg]         O += P·V is complete                                     commit            -> correction,
                                                                                                          softmax (last)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    allocate_tensor_memory,
    mbarrier,
    tensor_memory_descriptor,
    tma,
)
from triton.language.core import base_value

from ...nvidia.kv_ring import KVConsumerPipeline, KVProducerPipeline
from ...nvidia.pipelines import KVPipeline, make_kv_pipeline
from ...nvidia.tma_ring import KVConsumerRings, KVProducerRings, TMAConsumerPipeline, make_tma_producer
from ...pieces.modifiers import Modifiers
from ...pieces.scheduler import Tile
from ...pieces.span import TileSpan
from ..layouts import STORE_COLUMNS, box_layout, element_type, lanes, query_box, slot_box, stacked


@gluon.aggregate
class Tensors:
    """Operands in global memory; the descriptors are 4-D (batch, seq, heads, dim) and clip at the ends."""

    q: tma.tensor_descriptor
    k: base_value  # see sm100/global_rows.py
    v: base_value
    o: tma.tensor_descriptor
    lse: gl.tensor  # float* (batch, heads_q, seq_q), written when the config of the launch asks for it
    sinks: gl.tensor  # float* (heads_q,)


@gluon.aggregate
class Sources:
    """Operands in global memory, at this CTA's sequence: see sm100/global_rows.py."""

    q: base_value
    k: base_value
    v: base_value
    o: base_value
    lse: gl.tensor  # float*, of query head 0 of this sequence
    lse_stride: gl.tensor  # from a head to the next
    sinks: gl.tensor  # float* (heads_q,)


@gluon.aggregate
class Work:
    """Scalars of the problem at this tile, all int32."""

    seq_q: gl.tensor
    seq_k: gl.tensor
    heads_q: gl.tensor
    kv_head: gl.tensor


@gluon.aggregate
class Barriers:
    s_consumer: gl.shared_memory_descriptor  # [4, 1]: wg * 2 + part
    c_producer: gl.shared_memory_descriptor  # [2, 1]
    c_consumer: gl.shared_memory_descriptor  # [2, 1]
    s_producer: gl.shared_memory_descriptor  # [2, 1]
    o_producer: gl.shared_memory_descriptor  # [2, 1]
    q1: gl.shared_memory_descriptor  # [1, 1]: the first query tile comes with K0


@gluon.aggregate
class Memory:
    q: gl.shared_memory_descriptor  # [2, *query box]
    scales: gl.shared_memory_descriptor  # [2, 128] fp32
    s: tensor_memory_descriptor  # [2, 128, BN] fp32
    o: tensor_memory_descriptor  # [2, 128, Dv] fp32


@gluon.aggregate
class Context:
    tensors: Sources
    memory: Memory
    k: KVPipeline  # slots of K, or of K and V in turn
    v: KVPipeline  # slots of V; those of K and V where they share a ring
    bars: Barriers
    work: Work
    tile: Tile
    span: TileSpan
    tiles: gl.tensor  # key tiles that every role goes through; 0 where this CTA has no rows
    mods: Modifiers
    scale: gl.tensor  # softmax scale, fp32
    config: gl.constexpr
    has_sinks: gl.constexpr
    has_lse: gl.constexpr


@gluon.jit
def make_memory(config: gl.constexpr):
    """Shared memory of Q and the scales, and all of tensor memory."""
    dtype: gl.constexpr = element_type(config.dtype)
    box: gl.constexpr = query_box(config, config.padded_qk_depth)
    q = gl.allocate_shared_memory(dtype, stacked(2, box), box_layout(box, dtype))
    scales = gl.allocate_shared_memory(gl.float32, [2, config.BM_q], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    s = allocate_tensor_memory(gl.float32, [2, config.BM_q, config.BN], lanes(config.BN))
    o = allocate_tensor_memory(gl.float32, [2, config.BM_q, config.padded_ov_depth], lanes(config.padded_ov_depth))
    return Memory(q, scales, s, o)


@gluon.jit
def make_barriers():
    """Every barrier outside the rings, initialised. Softmax and correction arrive once per warp."""
    s_consumer = mbarrier.allocate_mbarrier(batch=4)
    q1 = mbarrier.allocate_mbarrier(batch=1)
    mbarrier.init(q1.index(0), count=1)
    for wg in gl.static_range(2):
        mbarrier.init(s_consumer.index(2 * wg), count=8)
        mbarrier.init(s_consumer.index(2 * wg + 1), count=4)
    return Barriers(s_consumer, _pair(4), _pair(4), _pair(1), _pair(1), q1)


@gluon.jit
def _pair(count: gl.constexpr):
    """One barrier per query tile."""
    bars = mbarrier.allocate_mbarrier(batch=2)
    for wg in gl.static_range(2):
        mbarrier.init(bars.index(wg), count=count)
    return bars


@gluon.jit
def make_rings(config: gl.constexpr):
    """(K ring, V ring), both the same one if the config says so."""
    dtype: gl.constexpr = element_type(config.dtype)
    if config.use_shared_kv:
        k = _ring(config.num_kv_stages, slot_box(config), dtype)
        return k, k
    else:
        k = _ring(config.num_kv_stages, [1, config.BN, 1, config.padded_qk_depth], dtype)
        v = _ring(config.num_kv_stages, [1, config.BN, 1, config.padded_ov_depth], dtype)
        return k, v


@gluon.jit
def _ring(stages: gl.constexpr, box: gl.constexpr, dtype: gl.constexpr):
    ring = make_kv_pipeline(gl.allocate_shared_memory(dtype, stacked(stages, box), box_layout(box, dtype)), stages)
    ring.init()
    return ring


@gluon.jit
def producer(ctx):
    """The load warp's side of the rings."""
    config: gl.constexpr = ctx.config
    if config.use_shared_kv:
        return KVProducerPipeline(ctx.k, config.v_bytes)
    else:
        k = make_tma_producer(ctx.k, True, config.k_chunk_bytes)
        return KVProducerRings(k, make_tma_producer(ctx.v, False, config.v_bytes))


@gluon.jit
def consumer(ctx):
    """The MMA warp's side of the rings."""
    if ctx.config.use_shared_kv:
        return KVConsumerPipeline(ctx.k)
    else:
        return KVConsumerRings(TMAConsumerPipeline(ctx.k, True), TMAConsumerPipeline(ctx.v, False))


@gluon.jit
def key_view(slot, columns: gl.constexpr, config: gl.constexpr):
    """A K or V tile [1, BN, 1, columns] in a slot, which is larger where the head dims differ."""
    if len(slot.shape) == 4:
        return slot
    else:
        dtype: gl.constexpr = element_type(config.dtype)
        box: gl.constexpr = [1, config.BN, 1, columns]
        if columns > STORE_COLUMNS:
            return slot.reinterpret(dtype, box, box_layout(box, dtype))
        else:
            return slot.reinterpret(dtype, slot.shape, box_layout(box, dtype)).index(0)


@gluon.jit
def p_tile(memory, wg: gl.constexpr, config: gl.constexpr):
    """P [128, BN] in the operands' type over the left half of S."""
    s = memory.s.index(wg).slice(0, config.BN // 2)
    return s.reinterpret(element_type(config.dtype), [config.BM_q, config.BN], lanes(config.BN))


@gluon.jit
def row_place(ctx, rows, wg: gl.constexpr):
    """(query in its sequence, query head) of rows of a query tile."""
    config: gl.constexpr = ctx.config
    first = ctx.tile.row + wg * config.wg_queries
    if config.fuse_gqa:
        return first + rows // config.group, ctx.tile.h + rows % config.group
    else:
        return first + rows, ctx.tile.h + gl.zeros_like(rows)
