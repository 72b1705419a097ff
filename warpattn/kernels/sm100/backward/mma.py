"""MMA warp of the Blackwell backward: all five products of every query tile, in an order in which the next tile's S and
dP are made beside the sums of this one.

      S(0)  dP(0)   then for i = 0, 1, …    (P(i) written)   S(i+1)   dV += P(i) · dO(i)
                                            (dS(i) written)  dP(i+1)  dK += dS(i) · Q(i)   dQ = dS(i)ᵀ · K

Products retire in the order in which they are issued. S is overwritten when P is there, which was made from it, dP when
dS is.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_commit, tcgen05_mma

from ...nvidia.backward.visits import MORE, STAGES, record
from ...nvidia.pipelines import consumer_state
from ..sync import await_signal
from .context import ds_signal, ds_state


@gluon.jit
def mma_role(ctx):
    """Issues all products of the CTA's keys, in the order above."""
    rings = ctx.rings
    bars = rings.bars
    state = consumer_state(STAGES)  # of the rings of Q and dO, and of the slots of dS
    tile = consumer_state(1)  # of all with one slot
    rings.q.consumer_wait(state)
    if ctx.mods.keep is not None:
        await_signal(bars.keys, 0)
    else:
        rings.k.consumer_wait(tile)
    multiply_scores(ctx, state)
    rings.do.consumer_wait(state)
    rings.v.consumer_wait(tile)
    multiply_values(ctx, state)
    more = has_more(ctx, state)
    later = gl.to_tensor(True)
    first = gl.to_tensor(True)
    while later:
        following = state.step()
        later = more
        await_signal(bars.p, tile.phase)  # so S has been read
        if ctx.slope is not None:
            await_signal(bars.s_read, tile.phase)
        if later:
            rings.q.consumer_wait(following)
            more = has_more(ctx, following)
            multiply_scores(ctx, following)
        add_value_gradients(ctx, state, first)
        slot = ds_state(ctx, state, tile)
        await_signal(ds_signal(ctx, slot), slot.phase)
        if later:
            rings.do.consumer_wait(following)
            multiply_values(ctx, following)
        add_key_gradients(ctx, state, slot, first)
        await_signal(bars.dq_read, tile.phase ^ 1)
        multiply_query_gradients(ctx, slot)
        first = gl.to_tensor(False)
        state = following
        tile = tile.step()
    tcgen05_commit(bars.sums)


@gluon.jit
def has_more(ctx, state):
    """Whether a tile follows the one in a Q slot; called by one warp."""
    flags = ctx.rings.visits.index(record(state) + 2).load(gl.BlockedLayout([1], [32], [1], [0]))
    return (gl.max(flags, 0) & MORE) != 0


@gluon.jit
def key_tile(ctx, ring):
    """K or V [N, D]."""
    return ring.smem.index(0).reshape([ctx.config.rows, ring.smem.shape[-1]])


@gluon.jit
def query_tile(ctx, ring, state):
    """Q or dO [M, D] in a slot."""
    return ring.tile(state).reshape([ctx.config.block_m, ring.smem.shape[-1]])


@gluon.jit
def multiply_scores(ctx, state):
    """Starts S = K · Qᵀ."""
    q = query_tile(ctx, ctx.rings.q, state)
    tcgen05_mma(key_tile(ctx, ctx.rings.k), q.permute((1, 0)), ctx.rings.sums.s, use_acc=False)
    tcgen05_commit(ctx.rings.bars.s)


@gluon.jit
def multiply_values(ctx, state):
    """Starts dP = V · dOᵀ."""
    do = query_tile(ctx, ctx.rings.do, state)
    tcgen05_mma(key_tile(ctx, ctx.rings.v), do.permute((1, 0)), ctx.rings.sums.dp, use_acc=False)
    tcgen05_commit(ctx.rings.bars.dp)


@gluon.jit
def add_value_gradients(ctx, state, first):
    """Starts dV += P · dO, and releases P."""
    do = query_tile(ctx, ctx.rings.do, state)
    tcgen05_mma(ctx.rings.sums.p, do, ctx.rings.sums.dv, use_acc=not first)
    tcgen05_commit(ctx.rings.bars.p_read)


@gluon.jit
def add_key_gradients(ctx, state, slot, first):
    """Starts dK += dS · Q, and releases Q and dO; `slot`: that of dS."""
    q = query_tile(ctx, ctx.rings.q, state)
    tcgen05_mma(ctx.rings.ds.index(slot.index), q, ctx.rings.sums.dk, use_acc=not first)
    tcgen05_commit(ctx.rings.q.empty(state.index))


@gluon.jit
def multiply_query_gradients(ctx, slot):
    """Starts dQ = dSᵀ · K, or its transpose."""
    ds = ctx.rings.ds.index(slot.index)
    k = key_tile(ctx, ctx.rings.k)
    if ctx.config.transposed:
        tcgen05_mma(k.permute((1, 0)), ds, ctx.rings.sums.dq, use_acc=False)
    else:
        tcgen05_mma(ds.permute((1, 0)), k, ctx.rings.sums.dq, use_acc=False)
    tcgen05_commit(ctx.rings.bars.dq)
