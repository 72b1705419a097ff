"""Scales of 8-bit keys and values.

Those of a tensor or a head are part of the softmax scale and of the output (pieces/scales.py). Those of tokens multiply
the columns of scores and, before they are rounded, of weights; they are loaded a tile ahead, a lane a key, and their
page numbers one tile before that, because memory answers in order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..pieces.scales import by_token, has_scale
from .feed import first_key
from .layouts import product_layout


@gluon.aggregate
class TokenScales:
    """Scales [N] of the keys and values of a tile, and pages of the keys of the next; () where there are none."""

    k: gl.base_value
    v: gl.base_value
    pages: gl.base_value


@gluon.jit
def first_scales(ctx, work, feed, span, first):
    """The scales of tile number `first` of a span."""
    if by_token(ctx.config):
        keys = feed.k_source.keys
        key = tile_keys(first_key(span, first, keys, ctx.config), ctx.config)
        k, v = scales_at(ctx, work, feed, key, pages_of(feed.k_source, key))
        after = tile_keys(first_key(span, first + 1, keys, ctx.config), ctx.config)
        return TokenScales(k, v, pages_of(feed.k_source, after))
    else:
        return TokenScales((), (), ())


@gluon.jit
def next_scales(ctx, work, feed, visit, scales):
    """The scales of the tile after a visit's."""
    if by_token(ctx.config):
        k, v = scales_at(ctx, work, feed, tile_keys(visit.load_key, ctx.config), scales.pages)
        return TokenScales(k, v, pages_of(feed.k_source, tile_keys(visit.page_key, ctx.config)))
    else:
        return scales


@gluon.jit
def scaled(x, scales, operand: gl.constexpr, config: gl.constexpr):
    """Scores or weights [M, N] times the scales [N] of "k" or of "v", where its tokens have some."""
    if has_scale(config, operand, "token"):
        return x * gl.convert_layout(scales, gl.SliceLayout(0, product_layout(config)))[None, :]
    else:
        return x


@gluon.jit
def tile_keys(first, config: gl.constexpr):
    """Keys [N] of the tile at key `first`, a lane each."""
    layout: gl.constexpr = gl.BlockedLayout([1], [64], [config.waves], [0])
    return first + gl.arange(0, config.block_n, layout)


@gluon.jit
def pages_of(source, key):
    """Pages of keys [N] of a source; of those past the end any page that the table has, 0 if there is none."""
    if source.page_size == 0:
        return ()
    else:
        last = gl.maximum(source.keys - 1, 0)
        page = gl.load(source.table + gl.minimum(key, last) // source.page_size)
        return gl.where(source.keys > 0, page, 0)


@gluon.jit
def scales_at(ctx, work, feed, key, pages):
    """Scales of the keys and of the values of a tile, whose keys [N] have these pages."""
    k = ()
    v = ()
    if has_scale(ctx.config, "k", "token"):
        k = token_scales(ctx.scales.k, work, feed.k_source, key, pages)
    if has_scale(ctx.config, "v", "token"):
        v = token_scales(ctx.scales.v, work, feed.v_source, key, pages)
    return k, v


@gluon.jit
def token_scales(rows, work, source, key, pages):
    """Scales of keys, 1 past the end."""
    return gl.load(token_places(rows, work, source, key, pages), mask=key < source.keys, other=1.0)


@gluon.jit
def token_places(rows, work, source, key, pages):
    """Pointers to the scales of keys of a work, which are in these pages if there are any."""
    head = rows.scale + work.kv_head * rows.head
    if source.page_size == 0:
        return head + work.batch * rows.outer + (work.k_start + key) * rows.row
    else:
        return head + pages.to(gl.int64) * rows.outer + (key % source.page_size) * rows.row


@gluon.jit
def key_scale(ctx, work, source, key, operand: gl.constexpr):
    """The scale of one row of "k" or "v", 1 if tokens have none."""
    if has_scale(ctx.config, operand, "token"):
        rows = ctx.scales.k if operand == "k" else ctx.scales.v
        return gl.load(token_places(rows, work, source, key, pages_of(source, key)))
    else:
        return 1.0
