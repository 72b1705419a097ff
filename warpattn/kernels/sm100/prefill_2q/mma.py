"""The MMA warp of two query tiles, which issues all products; in a pair, the leader's.

      S0 S1 │ S0' O0 S1' O1 … │      as issued:  S0 = Q0·K0, S1 = Q1·K0, O0 = P0·V0,
                                                 then for n = 1 …:  S0 = Q0·Kn, O1 += P1·Vn-1, S1 = Q1·Kn, O0 += P0·Vn,
                                                 and last O1 += P1·Vlast

Two products always separate making S from using its P, so the softmax of one query tile runs beside the products of
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
    """Does nothing if the tile has no rows."""
    if ctx.run.total > 0:
        multiply_tiles(ctx)


@gluon.jit
def multiply_tiles(ctx):
    """All products of the tile, in the order above."""
    ring = consumer(ctx)
    state = ring.start()
    multiply_qk(ctx, ring, state, 0)
    await_signal(ctx.bars.q1.index(0), 0)
    multiply_qk(ctx, ring, state, 1)
    state = release_k(ctx, ring, state)
    state = ring.wait_v(state)
    multiply_pv(ctx, 0, ring.v_tile(state), 0)
    for n in range(1, ctx.run.total):
        multiply_qk(ctx, ring, state, 0)
        multiply_pv(ctx, 1, ring.v_tile(state), n - 1)
        ring.release_v(state)
        multiply_qk(ctx, ring, state, 1)
        state = release_k(ctx, ring, state)
        state = ring.wait_v(state)
        multiply_pv(ctx, 0, ring.v_tile(state), n)
    multiply_pv(ctx, 1, ring.v_tile(state), ctx.run.total - 1)


@gluon.jit
def multiply_qk(ctx, ring, state, wg: gl.constexpr):
    """S = Q·Kᵀ of one query tile with the next K tile, chunk by chunk; the first query tile waits for the chunks."""
    chunks: gl.constexpr = ctx.config.num_qk_stages
    for c in gl.static_range(chunks):
        if wg == 0:
            ring.wait_k(state, c)
        multiply_chunk(ctx, wg, wg * chunks + c, ring.k_tile(state, c), c > 0)
    tcgen05_commit(ctx.bars.s_producer.index(wg))


@gluon.jit
def multiply_chunk(ctx, wg: gl.constexpr, q: gl.constexpr, k, use_acc: gl.constexpr):
    """S = Q·Kᵀ, or S += Q·Kᵀ, of a chunk of columns: number `q` of the queries', and a slot of K."""
    config: gl.constexpr = ctx.config
    q_chunk = ctx.memory.q.index(q).reshape([config.MMA_M, config.BK0])
    k_chunk = key_view(k, config.BK0, config).reshape([config.BN, config.BK0]).permute((1, 0))
    tcgen05_mma(q_chunk, k_chunk, ctx.memory.s.index(wg), use_acc=use_acc)


@gluon.jit
def release_k(ctx, ring, state):
    """Releases all chunks of a K tile; returns the next state."""
    chunks: gl.constexpr = ctx.config.num_qk_stages
    for c in gl.static_range(chunks):
        state = ring.release_k(state, c)
    return state


@gluon.jit
def multiply_pv(ctx, wg: gl.constexpr, v, n):
    """O += P·V of key tile number `n`, as soon as the parts of P are written; the first one replaces O."""
    config: gl.constexpr = ctx.config
    v = key_view(v, config.padded_ov_depth, config).reshape([config.BN, config.padded_ov_depth])
    p = p_tile(ctx.memory, wg, config)
    o = ctx.memory.o.index(wg)
    first: gl.constexpr = config.p_columns[0]
    second: gl.constexpr = config.p_columns[1]
    third: gl.constexpr = config.p_columns[2]
    await_signal(ctx.bars.s_consumer.index(2 * wg), n & 1)
    tcgen05_mma(p.slice(0, first), v.slice(0, first), o, use_acc=n > 0)
    tcgen05_mma(p.slice(first, second), v.slice(first, second), o)
    await_signal(ctx.bars.s_consumer.index(2 * wg + 1), n & 1)
    tcgen05_mma(p.slice(first + second, third), v.slice(first + second, third), o)
    tcgen05_commit(ctx.bars.o_producer.index(wg))
