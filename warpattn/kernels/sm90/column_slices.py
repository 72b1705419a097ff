"""Slices of the columns of tiles in shared memory and of tensors in registers, and where the parts of a tile begin."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def columns_before(widths, part):
    """First column of a part; with `part` = number of parts, the sum of all widths."""
    return sum(widths[:part])


@gluon.jit
def columns_of(tile, widths: gl.constexpr, part: gl.constexpr):
    """The columns of one part of a tile."""
    if widths[part] == tile.shape[1]:
        return tile
    else:
        return tile.slice(columns_before(widths, part), widths[part], dim=1)


@gluon.constexpr_function
def columns_in(parts, count):
    """Columns of the first `count` parts."""
    return sum(part.shape[1] for part in parts[:count])


@gluon.constexpr_function
def place_in(widths, column):
    """(part, column in it) of a column of a tile in parts of `widths`."""
    part = 0
    while column >= widths[part]:
        column -= widths[part]
        part += 1
    return part, column


@gluon.constexpr_function
def parts_from(widths, least):
    """How many parts have at least `least` columns; they are the first ones."""
    return sum(width >= least for width in widths)


@gluon.jit
def column_blocks(o, cols: gl.constexpr):
    """Cuts O [64, columns] into blocks of `cols` columns, without moving data between threads."""
    blocks = (o,)
    for _ in gl.static_range(doublings(o.shape[1], cols)):
        halves = ()
        for i in gl.static_range(len(blocks)):
            halves += blocks[i].reshape([o.shape[0], 2, blocks[i].shape[1] // 2]).permute((0, 2, 1)).split()
        blocks = halves
    return blocks


@gluon.constexpr_function
def doublings(columns, cols):
    """log2(columns / cols)."""
    return (columns // cols).bit_length() - 1
