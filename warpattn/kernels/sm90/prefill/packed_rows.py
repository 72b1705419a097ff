"""Packed GQA: a query tile holds `packed` query heads of one key head; row r has token r // packed, head r % packed.

      rows       0       1       2       3       4     …            packed = 4, all of one key head
      token      0       0       0       0       1     …
      head       h     h + 1   h + 2   h + 3     h     …

The rows then cover fewer tokens: under a narrow window fewer of a tile's keys are hidden, and few queries fill a tile.

Any number of heads may share a tile. Shared memory and registers have 64 rows, of which 7 heads of 9 tokens use 63: TMA
copies a box of 9 x 7 rows, which follow each other in shared memory, into the first rows of the tile, and stores these
alone. The others hold queries of zeros from the start; nothing reads what they give.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..layouts import accumulator_layout


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
    elif config.fills_rows:
        return row >> config.packed_bits
    else:
        return row // config.packed


@gluon.jit
def row_heads(tile, layout: gl.constexpr, config: gl.constexpr):
    """Query heads [64] of a warpgroup's rows; a scalar if the tile has one head."""
    if config.packed == 1:
        return tile.h
    elif config.fills_rows:
        return tile.h + (gl.arange(0, config.rows, layout) & (config.packed - 1))
    else:
        return tile.h + gl.arange(0, config.rows, layout) % config.packed


@gluon.jit
def clear_queries(queries, config: gl.constexpr):
    """Writes zeros to the tiles of the Q ring, of which no copy writes the rows that hold no queries."""
    if not config.fills_rows:
        for part in gl.static_range(len(queries.parts)):
            clear_tiles(queries.parts[part], config.rows, config.qk_parts[part])


@gluon.jit
def clear_tiles(ring, rows: gl.constexpr, columns: gl.constexpr):
    """Writes zeros to all tiles of one part of the columns."""
    zeros = gl.zeros([rows, columns], ring.dtype, accumulator_layout(columns))
    for tile in range(ring.shape[0]):
        ring.index(tile).reshape([rows, columns]).store(zeros)


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
