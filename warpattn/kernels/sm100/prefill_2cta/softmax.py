"""Softmax warpgroups and correction of the pair kernel: every CTA for its 128 rows of each query tile.

What differs from the kernel of one CTA: warpgroups arrive as a whole (an arrival on the leader's barrier comes from the
other CTA), and rows decide one by one whether their reference maximum moves. A CTA in which one has moved rescales O. A
row is worked on in quarters: with a half and two quarters the code compiled in 3/4 of the time, but spilled 43 times,
not 3.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, fma2, mul2, tma

from ...pieces.modifiers import exponent_scale
from ...pieces.scheduler import Tile
from ...pieces.softmax import HEADROOM, exponent
from ..exp2 import exp2_polynomial
from ..layouts import element_type
from ..prefill_2q.epilogue import finish
from ..prefill_2q.softmax import RowState
from ..sync import any_greater_of_role, await_signal
from .context import arrive, p_tile, row_place

COLUMNS = gl.constexpr(16)  # of O at a time in the correction


@gluon.jit
def softmax_0(ctx):
    softmax_role(ctx, 0)


@gluon.jit
def softmax_1(ctx):
    softmax_role(ctx, 1)


@gluon.jit
def softmax_role(ctx, wg: gl.constexpr):
    """Every key tile of one query tile, then its output."""
    config: gl.constexpr = ctx.config
    rows: gl.constexpr = gl.SliceLayout(1, quarter_layout(ctx))
    m = gl.full([config.MMA_M], -float("inf"), gl.float32, rows)
    state = RowState(m, gl.zeros_like(m))
    for n in range(ctx.span.total):
        state = softmax_tile(ctx, state, n, wg)
    await_signal(ctx.bars.o_ready.index(wg), (ctx.span.total - 1) & 1)
    store_output(ctx, state, wg)


@gluon.jit
def softmax_tile(ctx, state, n, wg: gl.constexpr):
    """Key tile number `n`: S to P."""
    config: gl.constexpr = ctx.config
    quarter: gl.constexpr = config.BN // 4
    c = exponent_scale(ctx)
    await_signal(ctx.bars.s_ready.index(wg), n & 1)
    s0 = visible_scores(ctx, n, 0, wg)
    s1 = visible_scores(ctx, n, 1, wg)
    s2 = visible_scores(ctx, n, 2, wg)
    s3 = visible_scores(ctx, n, 3, wg)
    top = gl.maximum(gl.maximum(gl.max(s0, 1), gl.max(s1, 1)), gl.maximum(gl.max(s2, 1), gl.max(s3, 1)))
    m = gl.where(top * c > state.m * c + HEADROOM, top, state.m)
    mc = exponent(m, c)
    alpha = gl.exp2(exponent(state.m, c) - mc)
    await_signal(ctx.bars.scale_empty.index(wg), n & 1, n > 1)
    ctx.memory.scales.index(wg).store(alpha)
    arrive(ctx.bars.scale_full.index(wg), n > 0)

    p = p_tile(ctx.memory, wg, config)
    dtype: gl.constexpr = element_type(config.dtype)
    p0 = gl.exp2(exponents(s0, c, mc))
    p.slice(0, quarter).store(p0.to(dtype))
    l = state.l * alpha + gl.sum(p0, 1)
    p1 = gl.exp2(exponents(s1, c, mc))
    p.slice(quarter, quarter).store(p1.to(dtype))
    l += gl.sum(p1, 1)
    p2 = exp2_polynomial(exponents(s2, c, mc))
    p.slice(2 * quarter, quarter).store(p2.to(dtype))
    arrive(ctx.bars.p_ready.index(2 * wg))
    l += gl.sum(p2, 1)
    p3 = gl.exp2(exponents(s3, c, mc))
    p.slice(3 * quarter, quarter).store(p3.to(dtype))
    arrive(ctx.bars.p_ready.index(2 * wg + 1))
    return RowState(m, l + gl.sum(p3, 1))


@gluon.jit
def visible_scores(ctx, n, part: gl.constexpr, wg: gl.constexpr):
    """A quarter [256, N/4] of S after the score function and, in a masked tile, the mask and the end of the keys."""
    config: gl.constexpr = ctx.config
    quarter: gl.constexpr = config.BN // 4
    layout: gl.constexpr = quarter_layout(ctx)
    s = ctx.memory.s.index(wg).slice(part * quarter, quarter).load(layout)
    rows = gl.arange(0, config.MMA_M, gl.SliceLayout(1, layout))[:, None]
    first = ctx.span.key_tile(n) * config.BN + part * quarter
    k = first + gl.arange(0, quarter, gl.SliceLayout(0, layout))[None, :]
    queries, heads = row_place(ctx, rows, wg)
    q = queries + ctx.work.seq_k - ctx.work.seq_q
    tile = Tile(ctx.tile.b, heads, ctx.tile.row)
    if ctx.mods.score is not None:
        s = ctx.mods.apply_score(s, ctx.scale, tile, ctx.work, q, k)
    if n < ctx.span.masked:
        s = ctx.mods.apply_mask(s, tile, ctx.work, q, k)
        s = gl.where(k < ctx.work.seq_k, s, -float("inf"))
    return s


@gluon.jit
def exponents(s, c, mc):
    """c * s - mc, two elements an instruction; `mc` is one value a row."""
    return fma2(s, gl.full_like(s, 1.0) * c, (gl.zeros_like(mc) - mc)[:, None])


@gluon.jit
def quarter_layout(ctx):
    """Registers of a quarter of S."""
    quarter: gl.constexpr = ctx.config.BN // 4
    layout: gl.constexpr = ctx.memory.s.index(0).slice(0, quarter).get_reg_layout()
    return layout


@gluon.jit
def correction_role(ctx):
    """Rescale the O of both query tiles, key tile after key tile; there is none before the second."""
    arrive(ctx.bars.p_ready.index(0))
    arrive(ctx.bars.p_ready.index(2))
    for n in range(1, ctx.span.total):
        correct(ctx, 0, n)
        correct(ctx, 1, n)


@gluon.jit
def correct(ctx, wg: gl.constexpr, n):
    """O of one query tile, before P·V of key tile number `n` >= 1 is added; left alone if no reference has moved."""
    o = ctx.memory.o.index(wg)
    layout: gl.constexpr = o.slice(0, COLUMNS).get_reg_layout()
    await_signal(ctx.bars.scale_full.index(wg), (n - 1) & 1)
    scale = ctx.memory.scales.index(wg).load(gl.SliceLayout(1, layout))
    arrive(ctx.bars.scale_empty.index(wg))
    await_signal(ctx.bars.o_ready.index(wg), (n - 1) & 1)
    if any_greater_of_role(gl.full_like(scale, 1.0), scale):
        for i in gl.static_range(ctx.config.padded_ov_depth // COLUMNS):
            part = o.slice(i * COLUMNS, COLUMNS)
            part.store(mul2(part.load(layout), scale[:, None]))
    arrive(ctx.bars.p_ready.index(2 * wg))


@gluon.jit
def store_output(ctx, state, wg: gl.constexpr):
    """O normalised, through the room of this query tile's chunks, by TMA; and the LSE."""
    config: gl.constexpr = ctx.config
    rows = gl.arange(0, config.MMA_M, state.m.type.layout)
    queries, heads = row_place(ctx, rows, wg)
    sink = 0.0
    if ctx.has_sinks:
        sink = gl.load(ctx.tensors.sinks + heads)
    factor, lse = finish(state.m, state.l, exponent_scale(ctx), sink, ctx.has_sinks)
    if ctx.has_lse:
        row = heads.to(gl.int64) * ctx.tensors.lse_stride + queries
        gl.store(ctx.tensors.lse + row, lse, mask=queries < ctx.work.seq_q)
    first = ctx.tile.row + wg * (config.PairBM_eff // 2)
    cols: gl.constexpr = config.BK0
    layout: gl.constexpr = ctx.memory.o.index(wg).slice(0, cols).get_reg_layout()
    scale = gl.convert_layout(factor, gl.SliceLayout(1, layout), assert_trivial=True)
    for i in gl.static_range(config.padded_ov_depth // cols):
        values = mul2(ctx.memory.o.index(wg).slice(i * cols, cols).load(layout), scale[:, None])
        block = ctx.memory.q.index(wg * config.num_qk_stages + i)
        block.reshape([config.MMA_M, cols]).store(values.to(element_type(config.dtype)))
        fence_async_shared()
        gl.barrier()
        ctx.tensors.o.store(first, ctx.tile.h, i * cols, block)
    tma.store_wait(0)
