"""Load warp of the Blackwell kernel: Q0 and K0 behind one barrier, Q1, V0, then K and V of each key tile in turn."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from ..global_rows import LEAST_ROWS
from .context import key_view, producer


@gluon.jit
def load_role(ctx):
    """Feed the keys of the tile's span, in its order; nothing where the tile has no rows."""
    config: gl.constexpr = ctx.config
    if ctx.tiles > 0:
        ring = producer(ctx)
        state = ring.start()
        key_tile = ctx.span.key_tile(0)
        state = load_k(ctx, ring, state, key_tile, True)
        second = ctx.bars.q1.index(0)
        mbarrier.expect(second, config.q_bytes)
        load_q(ctx, 1, second)
        for i in range(1, ctx.tiles):
            state = load_v(ctx, ring, state, key_tile)
            key_tile = ctx.span.key_tile(i)
            state = load_k(ctx, ring, state, key_tile, False)
        load_v(ctx, ring, state, key_tile)


@gluon.jit
def load_q(ctx, wg: gl.constexpr, full):
    """One query tile: its rows in all heads of the group, where heads are fused."""
    row = ctx.tile.row + wg * (ctx.config.BM_eff // 2)
    ctx.tensors.q.load(row, ctx.tile.h, full, ctx.memory.q.index(wg))


@gluon.jit
def load_k(ctx, ring, state, key_tile, with_q: gl.constexpr):
    """A K tile, the first one with the first query tile; returns the state after it."""
    config: gl.constexpr = ctx.config
    ring.acquire_k(state)
    full, slot = ring.get_k(state, expect=False)
    smem = key_view(slot, config.padded_qk_depth, config)
    if with_q:
        arm(ctx, ctx.tensors.k, key_tile, full, smem, config.q_bytes)
        load_q(ctx, 0, full)
    else:
        arm(ctx, ctx.tensors.k, key_tile, full, smem, 0)
    load_keys(ctx, ctx.tensors.k, key_tile, full, smem)
    return ring.commit_k(state)


@gluon.jit
def load_v(ctx, ring, state, key_tile):
    """A V tile; returns the state after it."""
    ring.acquire_v(state)
    full, slot = ring.get_v(state, expect=False)
    smem = key_view(slot, ctx.config.padded_ov_depth, ctx.config)
    arm(ctx, ctx.tensors.v, key_tile, full, smem, 0)
    load_keys(ctx, ctx.tensors.v, key_tile, full, smem)
    return ring.commit_v(state)


@gluon.jit
def arm(ctx, rows, key_tile, full, smem, others: gl.constexpr, column=0):
    """Arrive on the full barrier of a tile of BN keys, expecting its bytes and `others`. Where TMA cannot load them,
    they are copied first, and only the others are still to come."""
    config: gl.constexpr = ctx.config
    if config.box_rows < LEAST_ROWS:
        rows.copy(key_tile * config.BN, ctx.work.kv_head, smem, column)
        if others > 0:
            mbarrier.expect(full, others)
        else:
            mbarrier.arrive(full, count=1)
    else:
        nbytes: gl.constexpr = config.BN * smem.shape[3] * config.dtype_bytes
        mbarrier.expect(full, nbytes + others)


@gluon.jit
def load_keys(ctx, rows, key_tile, full, smem, column=0):
    """BN rows of K or V by TMA, from a column on; what `arm` has copied is there."""
    if ctx.config.box_rows >= LEAST_ROWS:
        rows.load(key_tile * ctx.config.BN, ctx.work.kv_head, full, smem, column)
