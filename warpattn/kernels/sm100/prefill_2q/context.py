"""What the roles of the Blackwell prefill kernels share, as one value: operands, memory, barriers, the tile, its keys.

      shared memory   Q0 Q1 │ K/V slots │ scale of each row │ barriers        (O leaves through that of Q)
      tensor memory   S0 (P0 over it) │ S1 (P1 over it) │ O0 │ O1             512 columns of 128 lanes

Barriers (`wg` is a softmax warpgroup and its query tile):

      s_consumer[wg][part]   P's part is written (and, for part 0, O is rescaled)     4 or 4 + 4 warps  -> MMA
      c_producer[wg]         the scale of O is in shared memory                       4 softmax warps   -> correction
      c_consumer[wg]         the scale has been read                                  4 correction warps -> softmax
      s_producer[wg]         S = Q·K is complete                                      commit            -> softmax
      q1                     the second query tile has arrived                        its bytes         -> MMA
      ring full / empty      a K or V tile has arrived / has been read                bytes / commit    -> MMA / load
      o_producer[wg]         O += P·V is complete                                     commit            -> correction,
                                                                                                          softmax (last)
      combine[wg]            (1Q) a warpgroup's maximum and sum are written           4 softmax warps   -> the other one

The kernels of one query tile and of a pair of CTAs share this. With one query tile, `wg` is a softmax warpgroup and its
half of the key tiles, and there is no q1; in a pair, rows are those of both CTAs and warpgroups arrive as a whole.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    allocate_tensor_memory,
    mbarrier,
    tensor_memory_descriptor,
)
from triton.language.core import base_value

from ...nvidia.clipped_rows import stacked
from ...nvidia.kv_ring import (
    KVConsumerPipeline,
    KVProducerPipeline,
    SharedKVPipeline,
    make_kv_pipeline,
    make_pair_pipeline,
)
from ...nvidia.tma_ring import KVConsumerRings, KVProducerRings, TMAConsumerPipeline, make_tma_producer
from ...pieces.modifiers import Modifiers
from ...pieces.scales import block_scale, has_scale, head_scale, scaled_rows, scores_scale
from ...pieces.scheduler import Tile
from .. import config as sizes
from ..global_rows import Sources
from ..layouts import (
    STORE_COLUMNS,
    box_layout,
    element_type,
    halved_columns,
    halved_rows,
    key_box,
    lanes,
    query_box,
    row_layout,
    scale_layout,
    slot_box,
)
from ..sync import init_signal, make_signal, number_of
from ..token_scales import TokenScales, values_end

STAGED = gl.constexpr(sizes.STAGED)
CONVERTING = gl.constexpr(sizes.CONVERT.warps)


@gluon.aggregate
class Work:
    """Scalars of the problem at this tile, all int32."""

    seq_q: gl.tensor
    seq_k: gl.tensor
    heads_q: gl.tensor
    kv_head: gl.tensor


@gluon.aggregate
class Barriers:
    """The barriers above. In a pair, `s_consumer` and `q1` are the leader's, and each CTA has its own of the others."""

    s_consumer: gl.shared_memory_descriptor  # [4, 1]: wg * 2 + part
    c_producer: gl.shared_memory_descriptor  # [2, 1]
    c_consumer: gl.shared_memory_descriptor  # [2, 1]
    s_producer: gl.shared_memory_descriptor  # [2, 1]
    o_producer: gl.shared_memory_descriptor  # [2, 1]


@gluon.aggregate
class Barriers2Q(Barriers):
    q1: gl.shared_memory_descriptor  # [1, 1]; the first query tile shares K0's barrier


@gluon.aggregate
class Barriers1Q(Barriers):
    combine: gl.shared_memory_descriptor  # [2, 1]: a warpgroup's maximum and sum are written


@gluon.aggregate
class Memory:
    """Tiles of `MMA_M` rows."""

    q: gl.shared_memory_descriptor  # [query tiles * chunks, *query box]: query tile after query tile
    scales: gl.shared_memory_descriptor  # [2, rows] fp32
    s: tensor_memory_descriptor  # [2, rows, BN] fp32
    o: tensor_memory_descriptor  # [2, rows, Dv] fp32


@gluon.aggregate
class Context:
    """The argument of every role."""

    tensors: Sources
    memory: Memory
    k: base_value  # KVPipeline or PairKVPipeline: slots of K in chunks, or of K and V in turn
    v: base_value  # slots of V; those of K and V where they share a ring
    staged: base_value  # SharedKVPipeline of tiles of 8 bits, K and V in turn; () where there are none
    token_scales: base_value  # OfTokens: scales of a tile's keys and of its values, [blocks, BN] each
    bars: base_value  # Barriers2Q or Barriers1Q
    work: Work
    tile: Tile
    run: base_value  # TileSpan or TileRun: the key tiles that every role goes through; none where there are no rows
    mods: Modifiers
    scale: gl.tensor  # softmax scale, fp32; in the softmax role times those of 8-bit operands, which rows may have
    scales: base_value  # `Scales` of 8-bit keys and values
    config: gl.constexpr
    traits: gl.constexpr
    recomputes: gl.constexpr  # whether tiles that meet hidden values are attended to again, see sm100/recompute.py

    @gluon.jit
    def scales_of(self, operand: gl.constexpr):
        """The scales of the tokens of "k" or "v", which have some."""
        smem = self.token_scales.k if operand == "k" else self.token_scales.v
        rows = self.scales.k if operand == "k" else self.scales.v
        end = self.work.seq_k if operand == "k" else values_end(self.tensors.v, self.traits)
        b, head = self.tile.b, self.work.kv_head
        return TokenScales(smem, operand, rows, self.tensors.k, end, b, head, self.run, self.config, self.traits)


@gluon.jit
def with_scales(ctx, wg: gl.constexpr):
    """The context of a softmax role. It loads the scales of 8-bit keys and queries itself: a load before the roles
    start would keep a descriptor of global memory in registers of all of them, which spilled."""
    config: gl.constexpr = ctx.config
    queries = None
    if config.row_scales:
        tokens, heads = row_positions(ctx, gl.arange(0, config.MMA_M, row_layout()), wg)
        shared: gl.constexpr = scaled_rows(config, "q")
        if shared > 0:
            tokens = gl.minimum(tokens, ctx.work.seq_q - 1)
            queries = block_scale(ctx.scales.q, ctx.tile.b, tokens // shared, heads)
        else:
            queries = head_scale(ctx.scales.q, heads)
    elif has_scale(config, "q", "tensor", "head"):
        queries = head_scale(ctx.scales.q, ctx.tile.h)
    scale = scores_scale(ctx.scales, ctx.work.kv_head, ctx.mods, config, queries)
    return gl.aggregate_replace(ctx, scale=scale)


@gluon.jit
def make_memory(config: gl.constexpr):
    """Shared memory of Q and the scales, and all of tensor memory."""
    dtype: gl.constexpr = element_type(config.element)
    box: gl.constexpr = query_box(config, config.BK0)
    layout: gl.constexpr = box_layout(box, dtype, halved_rows(config))
    rows: gl.constexpr = config.MMA_M
    q = gl.allocate_shared_memory(dtype, stacked(config.num_q * config.num_qk_stages, box), layout)
    scales = gl.allocate_shared_memory(gl.float32, [2, rows], scale_layout(config))
    s = allocate_tensor_memory(gl.float32, [2, rows, config.BN], lanes(config, config.BN))
    o = allocate_tensor_memory(gl.float32, [2, rows, config.padded_ov_depth], lanes(config, config.padded_ov_depth))
    return Memory(q, scales, s, o)


@gluon.jit
def make_barriers(config: gl.constexpr):
    """Every barrier outside the rings, initialised."""
    topology: gl.constexpr = config.topology
    s_consumer = mbarrier.allocate_mbarrier(batch=number_of(topology, "S_consumer"), two_ctas=config.pair_cta)
    if config.num_q == 2:
        q1 = mbarrier.allocate_mbarrier(batch=number_of(topology, "Q1_sync"), two_ctas=config.pair_cta)
        init_signal(q1, topology, "Q1_sync")
    init_signal(s_consumer, topology, "S_consumer")
    c_producer = make_signal(topology, "C_producer")
    c_consumer = make_signal(topology, "C_consumer")
    s_producer = make_signal(topology, "S_producer")
    o_producer = make_signal(topology, "O_producer")
    if config.num_q == 2:
        return Barriers2Q(s_consumer, c_producer, c_consumer, s_producer, o_producer, q1)
    else:
        combine = make_signal(topology, "combine")
        return Barriers1Q(s_consumer, c_producer, c_consumer, s_producer, o_producer, combine)


@gluon.jit
def make_rings(config: gl.constexpr):
    """(K ring in chunks, V ring), or the ring of both twice."""
    if config.use_shared_kv:
        k = make_ring(config, slot_box(config), None, 1)
        return k, k
    else:
        k = make_ring(config, key_box(config, config.BK0), halved_rows(config), config.num_qk_stages)
        v = make_ring(config, key_box(config, config.padded_ov_depth), halved_columns(config), 1)
        return k, v


@gluon.jit
def make_ring(config: gl.constexpr, box: gl.constexpr, halved: gl.constexpr, chunks: gl.constexpr):
    """A ring of boxes, initialised."""
    dtype: gl.constexpr = element_type(config.element)
    stages: gl.constexpr = config.num_kv_stages
    smem = gl.allocate_shared_memory(dtype, stacked(stages * chunks, box), box_layout(box, dtype, halved))
    if config.pair_cta:
        ring = make_pair_pipeline(smem, stages, chunks)
    else:
        ring = make_kv_pipeline(smem, stages, chunks)
    ring.init()
    return ring


@gluon.jit
def make_staged(config: gl.constexpr):
    """The ring of tiles of 8 bits, initialised; () without them."""
    if not config.converts:
        return ()
    else:
        dtype: gl.constexpr = element_type(config.stored)
        box: gl.constexpr = slot_box(config)
        smem = gl.allocate_shared_memory(dtype, stacked(STAGED, box), box_layout(box, dtype))
        bars = mbarrier.allocate_mbarrier(batch=2 * STAGED)
        ring = SharedKVPipeline(smem, bars, STAGED, 1, 1, CONVERTING)
        ring.init()
        return ring


@gluon.jit
def loader(ctx):
    """The load warp's side of the rings that it fills."""
    if not ctx.config.converts:
        return producer(ctx)
    else:
        return KVProducerPipeline(ctx.staged, ctx.config.v_load_bytes)


@gluon.jit
def producer(ctx):
    """The side of the operands' rings that fills them: of the load warp, or of those that convert."""
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
        dtype: gl.constexpr = slot.dtype
        box: gl.constexpr = key_box(config, columns)
        if columns > STORE_COLUMNS:
            return slot.reinterpret(dtype, box, box_layout(box, dtype))
        else:
            return slot.reinterpret(dtype, slot.shape, box_layout(box, dtype)).index(0)


@gluon.jit
def p_tile(memory, wg: gl.constexpr, config: gl.constexpr):
    """P [rows, BN] in the operands' type over the first columns of S: packed, two or four in a column."""
    s = memory.s.index(wg).slice(0, config.BN * config.element.bytes // 4)
    return s.reinterpret(element_type(config.weights), [config.MMA_M, config.BN], lanes(config, config.BN))


@gluon.jit
def row_positions(ctx, rows, wg: gl.constexpr):
    """(query in its sequence, query head) of rows of a query tile."""
    config: gl.constexpr = ctx.config
    first = ctx.tile.row + wg * config.wg_queries
    if config.fuse_gqa:
        return first + rows // config.group, ctx.tile.h + rows % config.group
    else:
        return first + rows, ctx.tile.h + gl.zeros_like(rows)
