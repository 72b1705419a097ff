"""MMA warp of the Blackwell kernel: the only one that gives work to the tensor core.

      S0 S1 │ S0' O0 S1' O1 … │      as issued:  S0 = Q0·K0, S1 = Q1·K0, O0 = P0·V0,
                                                 then for n = 1 …:  S0 = Q0·Kn, O1 += P1·Vn-1, S1 = Q1·Kn, O0 += P0·Vn,
                                                 and last O1 += P1·Vlast

Two products always lie between making S and using its P, so the softmax of one query tile runs beside the products of
the other. Nothing waits before S is overwritten: its P was used by a product issued earlier, and products retire in
their order. A P·V is issued in parts of 3/4 and 1/4 of the keys: the second part of P is written while the first runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_commit, tcgen05_mma

from ..sync import await_signal
from .context import consumer, key_view, p_tile


@gluon.jit
def mma_role(ctx):
    """All products of the tile, in the order above."""
    if ctx.tiles > 0:
        ring = consumer(ctx)
        state = ring.start()
        ring.wait_k(state)
        multiply_qk(ctx, 0, ring.k_tile(state))
        await_signal(ctx.bars.q1.index(0), 0)
        multiply_qk(ctx, 1, ring.k_tile(state))
        state = ring.release_k(state)
        state = ring.wait_v(state)
        multiply_pv(ctx, 0, ring.v_tile(state), 0)
        for n in range(1, ctx.tiles):
            ring.wait_k(state)
            multiply_qk(ctx, 0, ring.k_tile(state))
            multiply_pv(ctx, 1, ring.v_tile(state), n - 1)
            ring.release_v(state)
            multiply_qk(ctx, 1, ring.k_tile(state))
            state = ring.release_k(state)
            state = ring.wait_v(state)
            multiply_pv(ctx, 0, ring.v_tile(state), n)
        multiply_pv(ctx, 1, ring.v_tile(state), ctx.tiles - 1)


@gluon.jit
def multiply_qk(ctx, wg: gl.constexpr, k):
    """S = Q·Kᵀ of one query tile with the K tile in a slot."""
    config: gl.constexpr = ctx.config
    q = ctx.memory.q.index(wg).reshape([config.BM_q, config.padded_qk_depth])
    k = key_view(k, config.padded_qk_depth, config).reshape([config.BN, config.padded_qk_depth]).permute((1, 0))
    tcgen05_mma(q, k, ctx.memory.s.index(wg), use_acc=False)
    tcgen05_commit(ctx.bars.s_producer.index(wg))


@gluon.jit
def multiply_pv(ctx, wg: gl.constexpr, v, n):
    """O += P·V of key tile number `n`, as soon as the parts of P are written; the first one replaces O."""
    config: gl.constexpr = ctx.config
    v = key_view(v, config.padded_ov_depth, config).reshape([config.BN, config.padded_ov_depth])
    p = p_tile(ctx.memory, wg, config)
    o = ctx.memory.o.index(wg)
    half: gl.constexpr = config.BN // 2
    quarter: gl.constexpr = config.BN // 4
    await_signal(ctx.bars.s_consumer.index(2 * wg), n & 1)
    tcgen05_mma(p.slice(0, half), v.slice(0, half), o, use_acc=n > 0)
    tcgen05_mma(p.slice(half, quarter), v.slice(half, quarter), o)
    await_signal(ctx.bars.s_consumer.index(2 * wg + 1), n & 1)
    tcgen05_mma(p.slice(half + quarter, quarter), v.slice(half + quarter, quarter), o)
    tcgen05_commit(ctx.bars.o_producer.index(wg))
