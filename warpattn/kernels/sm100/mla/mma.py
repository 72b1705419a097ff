"""The MMA warp of Blackwell's latent attention.

      S0 = Q·K0    then for i = 0, 1, …   (P(i) written)   S = Q·K(i+1),  O += P(i)·V(i)

S is overwritten once P(i), made from it, is written. A slot is released after the last product that reads it,
O += P(i)·V(i).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_commit, tcgen05_mma

from ...nvidia.pipelines import consumer_state
from ..sync import await_signal


@gluon.jit
def mma_role(ctx):
    """Issues all products of the run, in the order above."""
    total = ctx.run.total
    if total > 0:
        state = first_keys(ctx)
        multiply_qk(ctx, state)
        for i in range(total):
            following = state.step()
            ctx.keys.consumer_wait(following, pred=i + 1 < total)
            await_signal(ctx.bars.p, i & 1)
            if i + 1 < total:
                multiply_qk(ctx, following)
            multiply_pv(ctx, state, i)
            state = following


@gluon.jit
def first_keys(ctx):
    """Waits for queries and first keys; the state of their slot."""
    state = consumer_state(ctx.config.stages)
    await_signal(ctx.bars.q, 0)
    ctx.keys.consumer_wait(state)
    return state


@gluon.jit
def multiply_qk(ctx, state):
    """S = Q·Kᵀ with the tile of a slot."""
    config: gl.constexpr = ctx.config
    rope = ctx.memory.rope.index(state.index).reshape([config.BN, config.rope]).permute((1, 0))
    tcgen05_mma(ctx.memory.q_rope, rope, ctx.memory.s, use_acc=False)
    for part in gl.static_range(2):
        latents = ctx.keys.tile(state, part).reshape([config.BN, config.half]).permute((1, 0))
        tcgen05_mma(ctx.memory.q.index(part), latents, ctx.memory.s)
    tcgen05_commit(ctx.bars.s)


@gluon.jit
def multiply_pv(ctx, state, i):
    """O += P·V with the tile of a slot, which is free afterwards; the first product replaces O."""
    config: gl.constexpr = ctx.config
    for part in gl.static_range(2):
        latents = ctx.keys.tile(state, part).reshape([config.BN, config.half])
        tcgen05_mma(ctx.memory.p, latents, ctx.memory.o.slice(part * config.half, config.half), use_acc=i > 0)
    ctx.keys.consumer_release(state)
    tcgen05_commit(ctx.bars.o)
