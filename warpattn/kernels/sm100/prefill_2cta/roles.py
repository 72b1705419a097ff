"""Load and MMA warp of the pair kernel. Every CTA loads its parts; the leader alone issues products.

The order is that of two query tiles in one CTA: S0 = Q0·K, O1 += P1·V of the tile before, S1 = Q1·K, O0 += P0·V. K
comes in chunks of columns, and the first ones bring those of Q0 with them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier, tcgen05_commit, tcgen05_mma

from ..prefill_2q.load import load_keys
from ..sync import await_signal
from .context import p_tile


@gluon.jit
def load_role(ctx):
    """Q0 and K0, Q1, V0, then K and V of each key tile in turn; each CTA waits for its own slots to be free."""
    config: gl.constexpr = ctx.config
    ring = ctx.producer()
    state = load_k(ctx, ring, ring.start(), 0, True)
    mbarrier.expect(ctx.bars.q1.index(0), config.q_bytes)
    chunks: gl.constexpr = config.num_qk_stages
    for c in gl.static_range(chunks):
        load_q(ctx, 1, c, ctx.bars.q1.index(0))
    for i in range(1, ctx.span.total):
        state = load_v(ctx, ring, state, i - 1)
        state = load_k(ctx, ring, state, i, False)
    load_v(ctx, ring, state, ctx.span.total - 1)


@gluon.jit
def load_q(ctx, wg: gl.constexpr, c: gl.constexpr, full):
    """A chunk of columns of one query tile."""
    config: gl.constexpr = ctx.config
    row = ctx.tile.row + wg * (config.PairBM_eff // 2)
    smem = ctx.memory.q.index(wg * config.num_qk_stages + c)
    ctx.tensors.q.load(row, ctx.tile.h, full, smem, c * config.BK0)


@gluon.jit
def load_k(ctx, ring, state, i, with_q: gl.constexpr):
    """K of key tile number `i`, chunk by chunk; returns the state after it."""
    config: gl.constexpr = ctx.config
    chunks: gl.constexpr = config.num_qk_stages
    for c in gl.static_range(chunks):
        ring.acquire_k(state, c)
        full, slot = ring.get_k(state, c, expect=False)
        if with_q:
            mbarrier.expect(full, config.q_bytes // chunks + config.k_chunk_bytes)
            load_q(ctx, 0, c, full)
        else:
            mbarrier.expect(full, config.k_chunk_bytes)
        load_keys(ctx, ctx.tensors.k, ctx.span.key_tile(i), full, slot, c * config.BK0)
    return ring.commit_k(state)


@gluon.jit
def load_v(ctx, ring, state, i):
    """V of key tile number `i`; returns the state after it."""
    ring.acquire_v(state)
    full, slot = ring.get_v(state)
    load_keys(ctx, ctx.tensors.v, ctx.span.key_tile(i), full, slot)
    return ring.commit_v(state)


@gluon.jit
def mma_role(ctx):
    """All products of the tile."""
    ring = ctx.consumer()
    state = ring.start()
    multiply_qk(ctx, ring, state, 0)
    await_signal(ctx.bars.q1.index(0), 0)
    multiply_qk(ctx, ring, state, 1)
    state = release_k(ctx, ring, state)
    state = ring.wait_v(state)
    multiply_pv(ctx, 0, ring.v_tile(state), 0)
    for n in range(1, ctx.span.total):
        multiply_qk(ctx, ring, state, 0)
        multiply_pv(ctx, 1, ring.v_tile(state), n - 1)
        ring.release_v(state)
        multiply_qk(ctx, ring, state, 1)
        state = release_k(ctx, ring, state)
        state = ring.wait_v(state)
        multiply_pv(ctx, 0, ring.v_tile(state), n)
    multiply_pv(ctx, 1, ring.v_tile(state), ctx.span.total - 1)


@gluon.jit
def multiply_qk(ctx, ring, state, wg: gl.constexpr):
    """S = Q·Kᵀ of one query tile, chunk by chunk; the first query tile waits for the chunks."""
    config: gl.constexpr = ctx.config
    chunks: gl.constexpr = config.num_qk_stages
    for c in gl.static_range(chunks):
        if wg == 0:
            ring.wait_k(state, c)
        q = ctx.memory.q.index(wg * chunks + c).reshape([config.MMA_M, config.BK0])
        k = ring.k_tile(state, c).reshape([config.BN, config.BK0]).permute((1, 0))
        tcgen05_mma(q, k, ctx.memory.s.index(wg), use_acc=c > 0)
    tcgen05_commit(ctx.bars.s_ready.index(wg))


@gluon.jit
def release_k(ctx, ring, state):
    """Give all chunks of a K tile back; returns the state after it."""
    chunks: gl.constexpr = ctx.config.num_qk_stages
    for c in gl.static_range(chunks):
        state = ring.release_k(state, c)
    return state


@gluon.jit
def multiply_pv(ctx, wg: gl.constexpr, v, n):
    """O += P·V of key tile number `n`, as soon as both CTAs have written the parts of P."""
    config: gl.constexpr = ctx.config
    v = v.reshape([config.BN, config.padded_ov_depth])
    p = p_tile(ctx.memory, wg, config)
    o = ctx.memory.o.index(wg)
    half: gl.constexpr = config.BN // 2
    quarter: gl.constexpr = config.BN // 4
    await_signal(ctx.bars.p_ready.index(2 * wg), n & 1)
    tcgen05_mma(p.slice(0, half), v.slice(0, half), o, use_acc=n > 0)
    tcgen05_mma(p.slice(half, quarter), v.slice(half, quarter), o)
    await_signal(ctx.bars.p_ready.index(2 * wg + 1), n & 1)
    tcgen05_mma(p.slice(half + quarter, quarter), v.slice(half + quarter, quarter), o)
    tcgen05_commit(ctx.bars.o_ready.index(wg))
