"""Packed GQA: a query tile holds `packed` query heads of one key head; row r has token r // packed, head r % packed.

      rows       0       1       2       3       4     …            packed = 4, all of one key head
      token      0       0       0       0       1     …
      head       h     h + 1   h + 2   h + 3     h     …

The rows then cover fewer tokens: under a narrow window fewer of a tile's keys are hidden, and few queries fill a tile.
They may be any number of heads, see ../partial_rows.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..partial_rows import head_of, token_of


@gluon.aggregate
class RowHeads:
    """A tile's batch entry and each row's query head [M, 1], as mask and score functions read them."""

    b: gl.tensor
    h: gl.tensor


@gluon.jit
def row_tokens(layout: gl.constexpr, config: gl.constexpr):
    """Tokens [64] of a warpgroup's rows, from its first token on."""
    row = gl.arange(0, config.rows, layout)
    if config.packed == 1:
        return row
    else:
        return token_of(row, config)


@gluon.jit
def row_heads(tile, layout: gl.constexpr, config: gl.constexpr):
    """Query heads [64] of a warpgroup's rows; a scalar if the tile has one head."""
    if config.packed == 1:
        return tile.h
    else:
        return tile.h + head_of(gl.arange(0, config.rows, layout), config)


@gluon.jit
def mask_heads(tile, layout: gl.constexpr, config: gl.constexpr):
    """What mask and score functions of scores [M, N] get for batch entry and head: the tile, or `RowHeads`."""
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
