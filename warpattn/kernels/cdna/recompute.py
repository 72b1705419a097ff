"""Attention once more for a tile that met hidden values of NaN or infinity: key by key, each row what it sees.

P·V multiplies a hidden value by 0, and 0 times NaN is NaN, in every row of the tile. So the output is looked at once,
at the end; almost no tile needs it, so the code is short rather than fast.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..amd.kv_config import WAVE
from ..pieces.modifiers import exponent_scale
from ..pieces.scheduler import Tile
from ..pieces.softmax import exponent, row_scale
from .layouts import product_layout, scores_operand
from .scales import key_scale
from .visible import hide_by
from .work_tile import WorkTile, load_queries, score_rows

STRIP = gl.constexpr(32)  # columns of queries and keys that are in registers at once


@gluon.jit
def nonfinite_rows(o):
    """How many rows of O [M, Dv] hold NaN or infinity."""
    total = gl.sum(o, 1)
    return gl.sum((total - total != 0).to(gl.int32), 0)


@gluon.jit
def apart(work, rows):
    """A tile's work, of which the compiler does not know that it is the same, as it does not know that `rows` is small:
    else it keeps addresses of rows in registers throughout the loop over key tiles."""
    tile = Tile(work.rows.b, work.rows.h, work.rows.row + (rows >> 16))
    return WorkTile(tile, work.lengths, work.q_start, work.k_start, work.batch, work.kv_head)


@gluon.jit
def recompute_output(ctx, work, feed, state, span, run):
    """O [M, Dv], not normalised, of the key tiles of a span in `run`, (first, last); `state` is that of the rows at
    their end."""
    width: gl.constexpr = columns_at_once(ctx.config)
    o = recompute_columns(ctx, work, feed, state, span, run, 0)
    if width == ctx.config.padded_v:
        return o
    else:
        beside = recompute_columns(ctx, work, feed, state, span, run, width)
        o = gl.join(o, beside).permute(0, 2, 1).reshape(ctx.config.block_m, 2 * width)
        return gl.convert_layout(o, product_layout(ctx.config), assert_trivial=True)


@gluon.constexpr_function
def columns_at_once(config):
    """Columns of O that are in registers with the value's, all or half of them: 64 elements of O in a lane."""
    return min(config.padded_v, 64 * config.waves * WAVE // config.block_m)


@gluon.jit
def recompute_columns(ctx, work, feed, state, span, run, start: gl.constexpr):
    """The columns of O from `start` on."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = product_layout(config)
    width: gl.constexpr = columns_at_once(config)
    x = row_scale(state.m, exponent_scale(ctx))
    top = exponent(state.m, x)
    o = gl.zeros([config.block_m, width], gl.float32, layout)
    begin, end = run
    for i in range(begin, end):
        first = span.key_tile(i) * config.block_n
        for key in range(first, gl.minimum(first + config.block_n, feed.k_source.keys)):
            s = score(ctx, work, feed, key)
            p = gl.exp2(s * x[:, None] - top[:, None])
            columns = start + gl.arange(0, width, gl.SliceLayout(0, layout))
            value = key_row(feed.v_source, key, columns, config.dim_v)
            value *= key_scale(ctx, work, feed.v_source, key, "v", columns)
            o = gl.where(sees(ctx, work, key, s), o + p * value[None, :], o)
    return o


@gluon.jit
def score(ctx, work, feed, key):
    """Scores [M, 1] of the rows with a key."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = scores_operand(config, 0)
    s = gl.zeros([config.block_m], gl.float32, gl.SliceLayout(1, layout))
    for first in range(0, config.padded_qk, STRIP):
        columns = first + gl.arange(0, STRIP, gl.SliceLayout(0, layout))
        q = load_queries(ctx.tensors, ctx.shape, work, columns, config, ctx.traits)
        s += gl.sum(q.to(gl.float32) * key_columns(ctx, work, feed, key, columns)[None, :], 1)
    s = gl.convert_layout(s, gl.SliceLayout(1, product_layout(config)))[:, None]
    if ctx.mods.score is not None:
        tile, row = score_rows(ctx.shape, work, config)
        s = ctx.mods.apply_score(s, ctx.scale, tile, work.lengths, row, key)
    return s


@gluon.jit
def key_columns(ctx, work, feed, key, columns):
    """`columns` of a key, fp32."""
    config: gl.constexpr = ctx.config
    if config.rope is None:
        k = key_row(feed.k_source, key, columns, config.dim_qk)
    else:
        latent: gl.constexpr = config.dim_v
        k = key_row(feed.k_source, key, columns, latent)
        k += key_row(feed.rope_source, key, columns - latent, config.dim_qk - latent)
    return k * key_scale(ctx, work, feed.k_source, key, "k", columns)


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
