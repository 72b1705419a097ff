"""Attention once more for a tile that met hidden values of NaN or infinity: key by key, each row what it sees.

P·V multiplies a hidden value by 0, and 0 times NaN is NaN, in every row of the tile. So the output is looked at once,
at the end; almost no tile needs it, so the code is short rather than fast.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..pieces.modifiers import exponent_scale
from ..pieces.softmax import exponent, row_scale
from .layouts import product_layout, scores_operand
from .scales import key_scale
from .visible import hide_by
from .work_tile import score_rows


@gluon.jit
def any_nonfinite(o):
    """Whether O [M, Dv] holds NaN or infinity."""
    total = gl.sum(o, 1)
    return gl.max((total - total != 0).to(gl.int32), 0) != 0


@gluon.jit
def recompute_output(ctx, work, q, feed, state, span, run):
    """O [M, Dv], not normalised, of the key tiles of a span in `run`, (first, last); `state` is that of the rows at
    their end."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = product_layout(config)
    x = row_scale(state.m, exponent_scale(ctx))
    top = exponent(state.m, x)
    o = gl.zeros([config.block_m, config.padded_v], gl.float32, layout)
    begin, end = run
    for i in range(begin, end):
        first = span.key_tile(i) * config.block_n
        for key in range(first, gl.minimum(first + config.block_n, feed.k_source.keys)):
            s = score(ctx, work, q, feed, key)
            p = gl.exp2(s * x[:, None] - top[:, None])
            columns = gl.arange(0, config.padded_v, gl.SliceLayout(0, layout))
            value = key_row(feed.v_source, key, columns, config.dim_v)
            value *= key_scale(ctx, work, feed.v_source, key, "v", columns)
            o = gl.where(sees(ctx, work, key, s), o + p * value[None, :], o)
    return o


@gluon.jit
def score(ctx, work, q, feed, key):
    """Scores [M, 1] of the rows with a key."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = scores_operand(config, 0)
    columns = gl.arange(0, config.padded_qk, gl.SliceLayout(0, layout))
    if config.rope is None:
        k = key_row(feed.k_source, key, columns, config.dim_qk)
    else:
        first: gl.constexpr = config.dim_v
        k = key_row(feed.k_source, key, columns, first)
        k += key_row(feed.rope_source, key, columns - first, config.dim_qk - first)
    k *= key_scale(ctx, work, feed.k_source, key, "k", columns)
    s = gl.sum(q.to(gl.float32) * k[None, :], 1)
    s = gl.convert_layout(s, gl.SliceLayout(1, product_layout(config)))[:, None]
    if ctx.mods.score is not None:
        tile, row = score_rows(ctx.shape, work, config)
        s = ctx.mods.apply_score(s, ctx.scale, tile, work.lengths, row, key)
    return s


@gluon.jit
def sees(ctx, work, key, s):
    """Whether rows see a key [M, 1]; `s` is of that shape."""
    tile, row = score_rows(ctx.shape, work, ctx.config)
    mark = gl.zeros_like(s)
    for i in gl.static_range(len(ctx.keeps)):
        mark = hide_by(ctx, mark, tile, work, row, key, i)
    return mark == 0


@gluon.jit
def key_row(source, key, columns, dim: gl.constexpr):
    """`columns` of a key or a value, fp32; 0 for those that are not in 0 .. dim - 1."""
    base = source.base
    row = key
    if source.page_size > 0:
        base += gl.load(source.table + key // source.page_size).to(gl.int64) * source.page
        row = key % source.page_size
    inside = (columns >= 0) & (columns < dim)
    return gl.load(base + row.to(gl.int64) * source.row + columns, mask=inside, other=0.0).to(gl.float32)
