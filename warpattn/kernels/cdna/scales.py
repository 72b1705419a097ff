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
def first_scales(ctx, work, sources, span, first):
    """The scales of tile number `first` of a span; `sources`: (K, V)."""
    if by_token(ctx.config):
        keys = sources[0].keys
        key = tile_keys(first_key(span, first, keys, ctx.config), ctx.config)
        k, v = scales_at(ctx, work, sources, key, pages_of(sources[0], key))
        after = tile_keys(first_key(span, first + 1, keys, ctx.config), ctx.config)
        return TokenScales(k, v, pages_of(sources[0], after))
    else:
        return ()


@gluon.jit
def next_scales(ctx, work, sources, visit, scales):
    """The scales of the tile after a visit's."""
    if by_token(ctx.config):
        k, v = scales_at(ctx, work, sources, tile_keys(visit.load_key, ctx.config), scales.pages)
        return TokenScales(k, v, pages_of(sources[0], tile_keys(visit.page_key, ctx.config)))
    else:
        return ()


@gluon.jit
def scaled_scores(s, scales, config: gl.constexpr):
    """Scores [M, N] times their keys' scales, where tokens have some."""
    if has_scale(config, 0, "token"):
        return s * columns_of(scales.k, config)
    else:
        return s


@gluon.jit
def scaled_weights(p, scales, config: gl.constexpr):
    """Weights [M, N] times their values' scales, where tokens have some."""
    if has_scale(config, 1, "token"):
        return p * columns_of(scales.v, config)
    else:
        return p


@gluon.jit
def columns_of(x, config: gl.constexpr):
    """Scales [N] as a row [1, N] of a tile of scores."""
    return gl.convert_layout(x, gl.SliceLayout(0, product_layout(config)))[None, :]


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
def scales_at(ctx, work, sources, key, pages):
    """Scales of the keys and of the values of a tile, whose keys [N] have these pages."""
    k = ()
    v = ()
    if has_scale(ctx.config, 0, "token"):
        k = token_scales(ctx.scales.k, work, sources[0], key, pages)
    if has_scale(ctx.config, 1, "token"):
        v = token_scales(ctx.scales.v, work, sources[1], key, pages)
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
def key_scale(ctx, work, source, key, i: gl.constexpr):
    """The scale of one key (0) or value (1), 1 if tokens have none."""
    if has_scale(ctx.config, i, "token"):
        rows = ctx.scales.v if i else ctx.scales.k
        return gl.load(token_places(rows, work, source, key, pages_of(source, key)))
    else:
        return 1.0
