"""The MMA warp of Blackwell's kernel for wide heads.

      S0 = Q·K0    then for i = 0, 1, …   (P(i) written)   S = Q·K(i+1),  O += P(i)·V(i)

S is overwritten once P(i), made from it, is written. A slot is released after the product that reads it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_commit, tcgen05_mma

from ..mla.mma import first_keys
from ..sync import await_signal


@gluon.jit
def mma_role(ctx):
    """Issues all products of the run, in the order above."""
    total = ctx.run.total
    if total > 0:
        state = multiply_qk(ctx, first_keys(ctx))
        for i in range(total):
            more = i + 1 < total
            ctx.keys.consumer_wait(state, pred=more)
            await_signal(ctx.bars.p, i & 1)
            if more:
                state = multiply_qk(ctx, state)
            ctx.keys.consumer_wait(state)
            state = multiply_pv(ctx, state, i)


@gluon.jit
def multiply_qk(ctx, state):
    """S = Q·Kᵀ with the tile of a slot; returns the state after it."""
    config: gl.constexpr = ctx.config
    blocks: gl.constexpr = config.k_blocks
    for block in gl.static_range(blocks):
        keys = ctx.keys.tile(state, block).reshape([config.BN, config.half]).permute((1, 0))
        tcgen05_mma(ctx.memory.q.index(block), keys, ctx.memory.s, use_acc=block > 0)
    ctx.keys.consumer_release(state)
    tcgen05_commit(ctx.bars.s)
    return state.step()


@gluon.jit
def multiply_pv(ctx, state, i):
    """O += P·V with the tile of a slot; the first product replaces O. Returns the state after it."""
    config: gl.constexpr = ctx.config
    blocks: gl.constexpr = config.v_blocks
    for block in gl.static_range(blocks):
        values = ctx.keys.tile(state, block).reshape([config.BN, config.half])
        tcgen05_mma(ctx.memory.p, values, ctx.memory.o.slice(block * config.half, config.half), use_acc=i > 0)
    ctx.keys.consumer_release(state)
    tcgen05_commit(ctx.bars.o)
    return state.step()
