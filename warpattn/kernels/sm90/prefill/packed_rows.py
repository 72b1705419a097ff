"""Rows of a tile with `packed` query heads of a key head: row r has token r // packed, head r % packed.

      rows       0       1       2       3       4     …            packed = 4, all of one key head
      token      0       0       0       0       1     …
      head       h     h + 1   h + 2   h + 3     h     …

A tile then spans fewer queries: under a narrow window fewer of its keys are hidden, and few queries fill it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.aggregate
class RowHeads:
    """What masks and scores read of a tile: its batch entry and the query head of each row [M, 1]."""

    b: gl.tensor
    h: gl.tensor


@gluon.jit
def row_tokens(layout: gl.constexpr, config: gl.constexpr):
    """Tokens [64] of a warpgroup's rows, counted from its first."""
    row = gl.arange(0, config.rows, layout)
    if config.packed == 1:
        return row
    else:
        return row >> config.packed_bits


@gluon.jit
def row_heads(tile, layout: gl.constexpr, config: gl.constexpr):
    """Query heads [64] of a warpgroup's rows; a scalar if the tile has one head."""
    if config.packed == 1:
        return tile.h
    else:
        return tile.h + (gl.arange(0, config.rows, layout) & (config.packed - 1))


@gluon.jit
def mask_heads(tile, layout: gl.constexpr, config: gl.constexpr):
    """The value with the `b` and `h` of a tile's rows, for masks and scores of its scores [M, N]."""
    if config.packed == 1:
        return tile
    else:
        return RowHeads(tile.b, row_heads(tile, layout, config)[:, None])


@gluon.jit
def row_sinks(sinks, tile, layout: gl.constexpr, config: gl.constexpr):
    """Sinks of a warpgroup's rows, [64, 1] where `layout` is that of [64, lanes]; a scalar if the tile has one head."""
    if config.packed == 1:
        return gl.load(sinks + tile.h)
    else:
        return gl.load(sinks + row_heads(tile, gl.SliceLayout(1, layout), config))[:, None]
