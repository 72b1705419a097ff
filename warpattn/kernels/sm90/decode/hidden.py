"""What becomes of hidden values in decode, in the key tiles that hide any; see `finite.py`.

      keys   first ···· full_lo ················ full_hi ···· last          of a row tile's span
             cleared │  seen by some │ seen by all │ seen by some │ cleared
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..finite import any_special, clear_outside, take_special
from .context import Lens, rows_of
from .eight_bit import column_of


@gluon.jit
def without_hidden(ctx, o, tile, item, i, axis: gl.constexpr):
    """The output `o` of an item before the values of key tile number `i` are added, a `tile` [N, Dv] in shared memory
    that a product may then read. Rows are along `axis` of `o`."""
    config: gl.constexpr = ctx.config
    if config.schedule.has_lengths or ctx.mods.keep is not None:
        if item.number(i) < item.row_tile.span.masked:
            keys = item.row_tile.keys
            first = item.key_tile(i) * config.block_n
            begin, end = keys.first - first, keys.last - first
            copied = end < config.block_n
            if not config.schedule.has_lengths:
                copied = keys.last < item.row_tile.length  # TMA writes zeros past the last key
            if (begin > 0) | copied:
                clear_outside(tile, begin, end)
            if ctx.mods.keep is not None:
                seen_by_all = (keys.full_lo < keys.full_hi) & (gl.maximum(first, keys.first) >= keys.full_lo)
                seen_by_all &= gl.minimum(first + config.block_n, keys.last) <= keys.full_hi
                if not seen_by_all:
                    if any_special(tile):
                        o = with_special(ctx, o, tile, item, first, axis)
    return o


@gluon.jit
def with_special(ctx, o, tile, item, first, axis: gl.constexpr):
    """`o` plus what is not finite in a tile of values, keys `first` and on, in the rows that see it; 0 in the tile
    afterwards."""
    row_tile = item.row_tile
    row = gl.arange(0, o.shape[axis], gl.SliceLayout(1 - axis, o.type.layout)).expand_dims(1 - axis)
    rows = rows_of(ctx, item, row)
    lens = Lens(row_tile.tokens, row_tile.length)
    q = rows.token + row_tile.length - row_tile.tokens
    columns = gl.arange(0, tile.shape[1], gl.BlockedLayout([1], [32], [4], [0]))
    if ctx.config.eight_bit is not None:
        columns = column_of(columns, ctx.config)
    for j in range(ctx.config.block_n):
        value = gl.convert_layout(take_special(tile, j, columns), gl.SliceLayout(axis, o.type.layout))
        o = gl.where(ctx.mods.keeps(rows, lens, q, first + j), o + value.expand_dims(axis), o)
    fence_async_shared()
    gl.barrier()
    return o
