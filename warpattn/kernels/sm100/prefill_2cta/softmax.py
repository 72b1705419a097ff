"""Softmax warpgroups of the pair kernel: every CTA for its 128 rows of each query tile.

What differs from the kernel of one CTA: warpgroups arrive as a whole (the other CTA, too, arrives on the leader's
barrier), and rows decide one by one whether their reference maximum moves. A CTA in which one has moved rescales O. A
row is computed in quarters: with a half and two quarters the code compiled in 3/4 of the time, but spilled 43 times
instead of 3.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...pieces.modifiers import exponent_scale
from ...pieces.scales import headroom_of
from ...pieces.softmax import exponent, row_scale
from ..exp2 import exp2_polynomial
from ..layouts import element_type
from ..prefill_2q.context import p_tile
from ..prefill_2q.epilogue import store_output
from ..prefill_2q.softmax import RowState, exponents, indices, maximum_or_nan, row_state
from ..sync import await_signal, notify


@gluon.jit
def softmax_role(ctx, wg: gl.constexpr):
    """Does every key tile of a query tile, then its output."""
    state = row_state(ctx.config.MMA_M, gl.SliceLayout(1, quarter_layout(ctx)))
    for n in range(ctx.run.total):
        state = softmax_tile(ctx, state, n, wg)
    await_signal(ctx.bars.o_producer.index(wg), (ctx.run.total - 1) & 1)
    store_output(ctx, state, wg)


@gluon.jit
def softmax_tile(ctx, state, n, wg: gl.constexpr):
    """Key tile number `n`: S to P."""
    config: gl.constexpr = ctx.config
    quarter: gl.constexpr = config.BN // 4
    c = exponent_scale(ctx)
    await_signal(ctx.bars.s_producer.index(wg), n & 1)
    s0 = visible_scores(ctx, n, 0, wg)
    s1 = visible_scores(ctx, n, 1, wg)
    s2 = visible_scores(ctx, n, 2, wg)
    s3 = visible_scores(ctx, n, 3, wg)
    top = maximum_or_nan(maximum_or_nan(largest(s0), largest(s1)), maximum_or_nan(largest(s2), largest(s3)))
    x = row_scale(state.m, c)
    m = gl.where(top * x <= state.m * x + headroom_of(ctx.traits.has_lse), state.m, top)
    c = row_scale(m, c)
    mc = exponent(m, c)
    alpha = gl.exp2(exponent(state.m, c) - mc)
    await_signal(ctx.bars.c_consumer.index(wg), n & 1, n > 1)
    ctx.memory.scales.index(wg).store(alpha)
    notify(ctx, ctx.bars.c_producer.index(wg), n > 0)

    p = p_tile(ctx.memory, wg, config)
    dtype: gl.constexpr = element_type(config.element)
    p0 = gl.exp2(exponents(s0, c, mc))
    p.slice(0, quarter).store(p0.to(dtype))
    l = state.l * alpha + gl.sum(p0, 1)
    p1 = gl.exp2(exponents(s1, c, mc))
    p.slice(quarter, quarter).store(p1.to(dtype))
    l += gl.sum(p1, 1)
    p2 = exp2_polynomial(exponents(s2, c, mc))
    p.slice(2 * quarter, quarter).store(p2.to(dtype))
    notify(ctx, ctx.bars.s_consumer.index(2 * wg))
    l += gl.sum(p2, 1)
    p3 = gl.exp2(exponents(s3, c, mc))
    p.slice(3 * quarter, quarter).store(p3.to(dtype))
    notify(ctx, ctx.bars.s_consumer.index(2 * wg + 1))
    return RowState(m, l + gl.sum(p3, 1))


@gluon.jit
def visible_scores(ctx, n, part: gl.constexpr, wg: gl.constexpr):
    """A quarter [256, N/4] of S after the score function and, in a masked tile, the mask and the end of the keys."""
    config: gl.constexpr = ctx.config
    quarter: gl.constexpr = config.BN // 4
    layout: gl.constexpr = quarter_layout(ctx)
    s = ctx.memory.s.index(wg).slice(part * quarter, quarter).load(layout)
    tile, q, k = indices(ctx, s, ctx.run.key_tile(n) * config.BN + part * quarter, wg)
    return ctx.mods.visible_scores(s, ctx.scale, tile, ctx.work, q, k, n < ctx.run.masked)


@gluon.jit
def largest(s):
    """Row maxima, [256, W] -> [256]; NaN if a row has one."""
    return gl.reduce(s, 1, maximum_or_nan)


@gluon.jit
def quarter_layout(ctx):
    """Registers of a quarter of S."""
    quarter: gl.constexpr = ctx.config.BN // 4
    layout: gl.constexpr = ctx.memory.s.index(0).slice(0, quarter).get_reg_layout()
    return layout
