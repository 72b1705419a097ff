"""Scales of 8-bit keys and values.

Those of a tensor or a head are part of the softmax scale and of the output (pieces/scales.py). Those of tokens multiply
the columns of scores and, before they are rounded, of weights; they are loaded a tile ahead, a lane a key, and their
page numbers one tile before that, because memory answers in order. Those of blocks of a key's columns multiply the
product of these columns (feed.py), which rounds nothing; those of blocks of a value's columns its elements, as they
become 16-bit ones (amd/kv_buffer.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..pieces.scales import has_row_scale, has_token_scale, scale_row
from .feed import first_key, of_keys


@gluon.aggregate
class TokenScales:
    """Scales [N] of the keys and values of a tile, of keys perhaps one for each block of columns, and pages of the keys
    of the next; () where there are none."""

    k: gl.base_value
    v: gl.base_value
    pages: gl.base_value


@gluon.constexpr_function
def loads_scales(config):
    """Whether scores or weights are multiplied by scales of tokens."""
    return has_token_scale(config, "k") or has_row_scale(config, "v")


@gluon.jit
def first_scales(ctx, work, feed, span, first):
    """The scales of tile number `first` of a span."""
    if loads_scales(ctx.config):
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
    if loads_scales(ctx.config):
        k, v = scales_at(ctx, work, feed, tile_keys(visit.load_key, ctx.config), scales.pages)
        return TokenScales(k, v, pages_of(feed.k_source, tile_keys(visit.page_key, ctx.config)))
    else:
        return scales


@gluon.jit
def scaled(x, scales, operand: gl.constexpr, config: gl.constexpr):
    """Scores or weights [M, N] times the scales [N] of "k" or of "v", where its tokens have some."""
    if has_row_scale(config, operand):
        return x * of_keys(scales, config)
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
    if has_row_scale(ctx.config, "k"):
        k = token_scales(ctx, "k", work, feed.k_source, (key, pages))
    blocks: gl.constexpr = ctx.config.key_blocks
    for block in gl.static_range(blocks):
        k += (token_scales(ctx, "k", work, feed.k_source, (key, pages), block),)
    if has_row_scale(ctx.config, "v"):
        v = token_scales(ctx, "v", work, feed.v_source, (key, pages))
    return k, v


@gluon.jit
def token_scales(ctx, operand: gl.constexpr, work, source, at, block: gl.constexpr = 0):
    """Scales of "k" or "v" of keys `at` (key, page), or of a block of their columns, 1 past the end."""
    rows = rows_of(ctx, operand)
    places = token_places(ctx, operand, work, source, at)
    if block > 0:
        places += block * rows.block
    return gl.load(places, mask=at[0] < source.keys, other=1.0)


@gluon.jit
def rows_of(ctx, operand: gl.constexpr):
    """The `ScaleRows` of "k" or "v"."""
    return ctx.scales.k if operand == "k" else ctx.scales.v


@gluon.jit
def token_places(ctx, operand: gl.constexpr, work, source, at):
    """Pointers to the scales of "k" or "v" of a work's keys `at` (key, page), or key alone."""
    rows = rows_of(ctx, operand)
    key, pages = at
    head = rows.scale + work.kv_head * rows.head
    if source.page_size == 0:
        return head + work.batch * rows.outer + scale_row(ctx.config, operand, work.k_start + key) * rows.row
    else:
        return head + pages.to(gl.int64) * rows.outer + (key % source.page_size) * rows.row


@gluon.jit
def key_scale(ctx, work, source, key, operand: gl.constexpr, columns):
    """The scale of one row of "k" or "v", or those of its `columns` [D] if blocks of them have some; 1 if tokens have
    none."""
    if not has_token_scale(ctx.config, operand):
        return 1.0
    else:
        places = token_places(ctx, operand, work, source, (key, pages_of(source, key)))
        shared: gl.constexpr = ctx.config.scaled_columns(operand)
        if shared == 0:
            return gl.load(places)
        else:
            dim: gl.constexpr = ctx.config.key_blocks * shared if operand == "k" else ctx.config.dim_v
            return gl.load(places + columns // shared * rows_of(ctx, operand).block, mask=columns < dim, other=1.0)
