"""Load and MMA warp and the correction of the 1Q kernel: one query tile, key tiles in turn for two accumulators.

      load     Q K0 K1 V0 K2 V1 K3 …
      MMA      S0 = Q·K0, S1 = Q·K1, then for n = 0, 1, …:  O(n%2) += P·Vn, S(n%2) = Q·K(n+2)

Two products lie between making S and using its P, as with two query tiles. S is overwritten right behind the P·V that
read its P: products retire in the order in which they are issued.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier, tcgen05_commit, tcgen05_mma, tma

from .context import p_tile
from .correction_warp import correct
from .signals import signal


@gluon.jit
def load_role(ctx, kv):
    """Feed the run's keys in its order, K two tiles ahead of V."""
    if ctx.run.total > 0:
        state = load_k(ctx, kv, kv.start(), 0, True)
        if ctx.run.total > 1:
            state = load_k(ctx, kv, state, 1, False)
        for n in range(ctx.run.total):
            kv.acquire_v(state)
            full, smem = kv.get_v(state)
            tma.async_load(ctx.tensors.v, key_place(ctx, n, 0), full, smem)
            state = kv.commit_v(state)
            if n + 2 < ctx.run.total:
                state = load_k(ctx, kv, state, n + 2, False)


@gluon.jit
def load_k(ctx, kv, state, n, first: gl.constexpr):
    """K tile number `n` of the run, in chunks; the first one's bring those of Q with them."""
    config: gl.constexpr = ctx.config
    for c in gl.static_range(config.num_qk_stages):
        kv.acquire_k(state, c)
        if first:
            full, smem = kv.get_k(state, c, False)
            mbarrier.expect(full, config.q_bytes // config.num_qk_stages + config.k_chunk_bytes)
            place = [ctx.tile.b, ctx.tile.row, ctx.tile.h, c * config.BK0]
            tma.async_load(ctx.tensors.q, place, full, ctx.memory.q.index(c))
        else:
            full, smem = kv.get_k(state, c)
        tma.async_load(ctx.tensors.k, key_place(ctx, n, c * config.BK0), full, smem)
    return kv.commit_k(state)


@gluon.jit
def key_place(ctx, n, column):
    """Coordinates of key tile number `n` of the run, from a column on."""
    return [ctx.tile.b, ctx.run.key_tile(n) * ctx.config.BN, ctx.work.kv_head, column]


@gluon.jit
def mma_role(ctx, kv):
    """All products of the run, in the order above."""
    total = ctx.run.total
    if total > 0:
        state = multiply_qk(ctx, kv, kv.start(), 0)
        if total > 1:
            state = multiply_qk(ctx, kv, state, 1)
        for n in range(0, total, 2):
            state = multiply_pv(ctx, kv, state, 0, n)
            if n + 2 < total:
                state = multiply_qk(ctx, kv, state, 0)
            if n + 1 < total:
                state = multiply_pv(ctx, kv, state, 1, n)
                if n + 3 < total:
                    state = multiply_qk(ctx, kv, state, 1)


@gluon.jit
def multiply_qk(ctx, kv, state, wg: gl.constexpr):
    """S = Q·Kᵀ with the next K tile, chunk by chunk."""
    config: gl.constexpr = ctx.config
    for c in gl.static_range(config.num_qk_stages):
        kv.wait_k(state, c)
        q = ctx.memory.q.index(c).reshape([config.BM_q, config.BK0])
        k = kv.k_tile(state, c).reshape([config.BN, config.BK0]).permute((1, 0))
        tcgen05_mma(q, k, ctx.memory.s.index(wg), use_acc=c > 0)
        state = kv.release_k(state, c)
    tcgen05_commit(ctx.bars.s_producer.index(wg))
    return state


@gluon.jit
def multiply_pv(ctx, kv, state, wg: gl.constexpr, n):
    """O += P·V with the next V tile, as soon as the parts of P are written; `n` is its number, or the even one below."""
    config: gl.constexpr = ctx.config
    half: gl.constexpr = config.BN // 2
    quarter: gl.constexpr = config.BN // 4
    state = kv.wait_v(state)
    v = kv.v_tile(state).reshape([config.BN, config.padded_ov_depth])
    p = p_tile(ctx.memory, wg, config)
    o = ctx.memory.o.index(wg)
    phase = (n // 2) & 1
    mbarrier.wait(ctx.bars.s_consumer.index(2 * wg), phase)
    tcgen05_mma(p.slice(0, half), v.slice(0, half), o, use_acc=n > 1)
    tcgen05_mma(p.slice(half, quarter), v.slice(half, quarter), o)
    mbarrier.wait(ctx.bars.s_consumer.index(2 * wg + 1), phase)
    tcgen05_mma(p.slice(half + quarter, quarter), v.slice(half + quarter, quarter), o)
    tcgen05_commit(ctx.bars.o_producer.index(wg))
    kv.release_v(state)
    return state


@gluon.jit
def correction_role(ctx):
    """Both accumulators in turn; there is nothing to rescale before their second tiles."""
    if ctx.run.total > 0:
        signal(ctx.bars.s_consumer.index(0))
        signal(ctx.bars.s_consumer.index(2))
        for n in range(2, ctx.run.total, 2):
            correct(ctx, 0, n // 2)
            if n + 1 < ctx.run.total:
                correct(ctx, 1, n // 2)
