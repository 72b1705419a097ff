"""Two warpgroups of Blackwell's backward, one key a thread: `weigh` computes P, `derive` dS.

      weigh      S(0) ─▶ P(0)    S(1) ─▶ P(1)    …      at the end dV ─▶ global memory
      derive             P(0), dP(0) ─▶ dS(0)    …      at the end dK ─▶ global memory

P is in tensor memory, where it is an operand; dS in shared memory, as both its products read it there. `derive` takes
the slope of a score from S itself. What is hidden has P = 0, and so dS = 0 whatever dP and the slope are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared

from ...nvidia.backward.visits import STAGES, read_visit
from ...nvidia.finite import bound_nonfinite
from ...nvidia.pipelines import consumer_state
from ...pieces.modifiers import exponent_scale
from ..layouts import element_type
from ..sync import await_signal, signal
from . import config as sizes
from .context import ds_signal, ds_state
from .epilogue import store_sums

PART = gl.constexpr(sizes.PART)


@gluon.jit
def weigh_role(ctx):
    """P of every tile, then dV. Under a mask keys are made finite before: dQ multiplies hidden ones by 0, and rows that
    see what was not finite have a shift of NaN."""
    queries: gl.constexpr = ctx.config.block_m
    rings = ctx.rings
    bars = rings.bars
    if ctx.mods.keep is not None:
        rings.k.consumer_wait(consumer_state(1))
        bound_nonfinite(rings.k.smem.index(0).reshape([ctx.config.rows, ctx.config.padded_qk]))
        signal(bars.keys)
    state = consumer_state(STAGES)  # of the ring of Q
    tile = consumer_state(1)  # of all with one slot
    more = gl.to_tensor(True)
    while more:
        rings.q.consumer_wait(state)
        visit = read_visit(ctx, state)
        await_signal(bars.s, tile.phase)
        await_signal(bars.p_read, tile.phase ^ 1)
        for column in gl.static_range(0, queries, PART):
            weights_part(ctx, column).store(weights(ctx, state, visit, column))
        rings.q.consumer_release(state)
        if ctx.config.wide:
            fence_async_shared()
        signal(bars.p)
        more = visit.more()
        state = state.step()
        tile = tile.step()
    await_signal(bars.sums, 0)
    store_sums(ctx, ctx.tensors.dv, rings.sums.dv, None, rings.v)


@gluon.jit
def weights_part(ctx, column: gl.constexpr):
    """The memory of P [N, PART] from query `column` on."""
    if ctx.config.wide:
        return ctx.rings.sums.p.slice(column, PART, dim=1)
    else:
        return ctx.rings.sums.p.slice(column, PART)


@gluon.jit
def weights(ctx, state, visit, column: gl.constexpr):
    """P [N, PART] of the tile in a slot, by the row's LSE, from query `column` on."""
    s = ctx.rings.sums.s.slice(column, PART).load()
    shift = row_numbers(ctx, ctx.rings.shift, state, column, s.type.layout)
    q, k = positions(ctx, visit, column, s.type.layout)
    if ctx.mods.score is not None:
        s = ctx.mods.apply_score(s, ctx.scale, visit, ctx.keys, q, k)
    s = s + shift
    if visit.masked():
        kept = k < ctx.keys.seq_k
        if ctx.mods.score is not None:
            kept = kept & (q < ctx.keys.seq_k)
        if ctx.mods.keep is not None:
            keys = ctx.keys
            kept = kept & ctx.mods.keep(visit.b, visit.h, q, k, keys.seq_q, keys.seq_k, ctx.mods.mask_args)
        s = gl.where(kept, s, -float("inf"))
    return gl.exp2(s * exponent_scale(ctx)).to(element_type(ctx.config.element))


@gluon.jit
def derive_role(ctx):
    """dS of every tile, then dK."""
    queries: gl.constexpr = ctx.config.block_m
    rings = ctx.rings
    bars = rings.bars
    state = consumer_state(STAGES)  # of the rings of Q and dO, and of the slots of dS
    tile = consumer_state(1)
    more = gl.to_tensor(True)
    while more:
        rings.q.consumer_wait(state)
        visit = read_visit(ctx, state)
        rings.do.consumer_wait(state)  # delta
        await_signal(bars.p, tile.phase)
        await_signal(bars.dp, tile.phase)
        slot = ds_state(ctx, state, tile)
        for column in gl.static_range(0, queries, PART):
            ds = score_gradients(ctx, state, visit, column)
            if ctx.config.ds_slots == 1:
                await_signal(bars.dq, tile.phase ^ 1)  # both products of the last tile have read dS
            rings.ds.index(slot.index).slice(column, PART, dim=1).store(ds)
        signal(bars.p_read)
        if ctx.slope is not None:
            signal(bars.s_read)
        fence_async_shared()
        signal(ds_signal(ctx, slot))
        more = visit.more()
        state = state.step()
        tile = tile.step()
    await_signal(bars.sums, 0)
    store_sums(ctx, ctx.tensors.dk, rings.sums.dk, ctx.scale, rings.k)


@gluon.jit
def score_gradients(ctx, state, visit, column: gl.constexpr):
    """dS = P · (dP - delta) · slope [N, PART] of the tile in a slot, from query `column` on."""
    dp = ctx.rings.sums.dp.slice(column, PART).load()
    p = weights_at(ctx, column, dp.type.layout).to(gl.float32)
    ds = p * (dp + row_numbers(ctx, ctx.rings.delta, state, column, dp.type.layout))
    if ctx.slope is not None:
        s = ctx.rings.sums.s.slice(column, PART).load()
        keys = ctx.keys
        q, k = positions(ctx, visit, column, s.type.layout)
        slope = ctx.slope(s * ctx.scale, visit.b, visit.h, q, k, keys.seq_q, keys.seq_k, ctx.mods.score_args)
        ds = ds * slope
    return gl.where(p == 0, 0.0, ds).to(element_type(ctx.config.element))


@gluon.jit
def weights_at(ctx, column: gl.constexpr, layout: gl.constexpr):
    """P [N, PART] from query `column` on."""
    if ctx.config.wide:
        return weights_part(ctx, column).load(layout)
    else:
        return weights_part(ctx, column).load()


@gluon.jit
def positions(ctx, visit, column: gl.constexpr, layout: gl.constexpr):
    """(queries in key coordinates [1, PART], keys [N, 1]) of a tile, from query `column` on."""
    keys = ctx.keys
    k = visit.first_key() + gl.arange(0, ctx.config.rows, gl.SliceLayout(1, layout))
    q = visit.row + column + keys.seq_k - keys.seq_q + gl.arange(0, PART, gl.SliceLayout(0, layout))
    return q[None, :], k[:, None]


@gluon.jit
def row_numbers(ctx, numbers, state, column: gl.constexpr, layout: gl.constexpr):
    """The numbers of PART query rows in a slot [1, PART], from query `column` on."""
    part = numbers.index(state.index).reshape([ctx.config.block_m]).slice(column, PART, dim=0)
    return part.load(gl.SliceLayout(0, layout))[None, :]
