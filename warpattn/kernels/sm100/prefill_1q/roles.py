"""Load and MMA warp and the correction of the 1Q kernel: one query tile, key tiles in turn for two accumulators.

      load     Q K0 K1 V0 K2 V1 K3 …
      MMA      S0 = Q·K0, S1 = Q·K1, then for n = 0, 1, …:  O(n%2) += P·Vn, S(n%2) = Q·K(n+2)

Two products lie between making S and using its P, as with two query tiles. S is overwritten right behind the P·V that
read its P: products retire in the order in which they are issued.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_commit, tcgen05_mma

from ..prefill_2q.context import consumer, key_view, producer
from ..prefill_2q.correction import correct
from ..prefill_2q.load import arm, load_keys, load_v
from ..prefill_2q.mma import multiply_pv
from ..sync import signal


@gluon.jit
def load_role(ctx):
    """Feed the run's keys in its order, K two tiles ahead of V."""
    total = ctx.span.total
    if total > 0:
        ring = producer(ctx)
        state = load_k(ctx, ring, ring.start(), 0, True)
        if total > 1:
            state = load_k(ctx, ring, state, 1, False)
        for n in range(total):
            state = load_v(ctx, ring, state, ctx.span.key_tile(n))
            if n + 2 < total:
                state = load_k(ctx, ring, state, n + 2, False)


@gluon.jit
def load_k(ctx, ring, state, n, with_q: gl.constexpr):
    """K tile number `n` of the run in chunks of columns, the first tile's with those of Q; returns the state after."""
    config: gl.constexpr = ctx.config
    chunks: gl.constexpr = config.num_qk_stages
    for c in gl.static_range(chunks):
        ring.acquire_k(state, c)
        full, slot = ring.get_k(state, c, expect=False)
        smem = key_view(slot, config.BK0, config)
        key_tile = ctx.span.key_tile(n)
        if with_q:
            arm(ctx, ctx.tensors.k, key_tile, full, smem, config.q_bytes // chunks, c * config.BK0)
            ctx.tensors.q.load(ctx.tile.row, ctx.tile.h, full, ctx.memory.q.index(c), c * config.BK0)
        else:
            arm(ctx, ctx.tensors.k, key_tile, full, smem, 0, c * config.BK0)
        load_keys(ctx, ctx.tensors.k, key_tile, full, smem, c * config.BK0)
    return ring.commit_k(state)


@gluon.jit
def mma_role(ctx):
    """All products of the run, in the order above."""
    total = ctx.span.total
    if total > 0:
        ring = consumer(ctx)
        state = multiply_qk(ctx, ring, ring.start(), 0)
        if total > 1:
            state = multiply_qk(ctx, ring, state, 1)
        for n in range(0, total, 2):
            state = add_pv(ctx, ring, state, 0, n // 2)
            if n + 2 < total:
                state = multiply_qk(ctx, ring, state, 0)
            if n + 1 < total:
                state = add_pv(ctx, ring, state, 1, n // 2)
                if n + 3 < total:
                    state = multiply_qk(ctx, ring, state, 1)


@gluon.jit
def multiply_qk(ctx, ring, state, wg: gl.constexpr):
    """S = Q·Kᵀ with the next K tile, chunk by chunk; returns the state after it."""
    config: gl.constexpr = ctx.config
    chunks: gl.constexpr = config.num_qk_stages
    for c in gl.static_range(chunks):
        ring.wait_k(state, c)
        q = ctx.memory.q.index(c).reshape([config.BM_q, config.BK0])
        k = key_view(ring.k_tile(state, c), config.BK0, config).reshape([config.BN, config.BK0])
        tcgen05_mma(q, k.permute((1, 0)), ctx.memory.s.index(wg), use_acc=c > 0)
        state = ring.release_k(state, c)
    tcgen05_commit(ctx.bars.s_producer.index(wg))
    return state


@gluon.jit
def add_pv(ctx, ring, state, wg: gl.constexpr, n):
    """O += P·V with the next V tile, of number `n` for this accumulator; returns the state after it."""
    state = ring.wait_v(state)
    multiply_pv(ctx, wg, ring.v_tile(state), n)
    ring.release_v(state)
    return state


@gluon.jit
def correction_role(ctx):
    """Both accumulators in turn; there is nothing to rescale before their second tiles."""
    if ctx.span.total > 0:
        signal(ctx.bars.s_consumer.index(0))
        signal(ctx.bars.s_consumer.index(2))
        for n in range(2, ctx.span.total, 2):
            correct(ctx, 0, n // 2)
            if n + 1 < ctx.span.total:
                correct(ctx, 1, n // 2)
