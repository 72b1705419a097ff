"""MMA warp of the 1Q kernel: one query tile, key tiles in turn for two accumulators.

      S0 = Q·K0, S1 = Q·K1, then for n = 0, 1, …:  O(n%2) += P·Vn, S(n%2) = Q·K(n+2)

Two products separate making S from using its P, as with two query tiles. S is overwritten directly after the P·V that
reads its P: products retire in the order in which they are issued.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_commit

from ..prefill_2q.context import consumer
from ..prefill_2q.mma import multiply_chunk, multiply_pv


@gluon.jit
def mma_role(ctx):
    """Issues all products of the run, in the order above."""
    total = ctx.run.total
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
    """Starts S = Q·Kᵀ with the next K tile, releases its chunks one by one; returns the next state."""
    chunks: gl.constexpr = ctx.config.num_qk_stages
    for c in gl.static_range(chunks):
        ring.wait_k(state, c)
        multiply_chunk(ctx, wg, c, ring.k_tile(state, c), c > 0)
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
