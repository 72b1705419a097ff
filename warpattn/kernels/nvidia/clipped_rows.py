"""TMA on sequences in one tensor, each clipped at its own end: loads read zeros past it, stores write nothing there.

TMA clips a box at the extents of its tensor map, but a map has only one extent for rows. So the map has five
dimensions. The row dimension ends at 2^30, and a sequence's last row gets the last coordinate before that end. Two
outer dimensions move the address back, because addresses wrap around at 2^64 (as in Triton's ragged descriptors):

      dimension     wrap            offset                    rows           heads     columns
      extent        2^31 - 2^16     2^31 - 2^16               2^30           H         D
      stride        2^34 - row      step                      row            head      1          elements
      coordinate    2^30            start·step + n·unit       2^30 - n + i   h         c

The row stride is `unit` offset strides, so the address is 2^64 bytes + start of the sequence + i rows, and rows from n
on are outside. `start` counts rows, pages or batch entries, `step` offsets each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

FAR = gl.constexpr(1 << 30)


@gluon.aggregate
class ClippedRows:
    """A tensor of sequences of rows; `clipped_map` makes its map."""

    desc: tma.tensor_descriptor
    step: gl.tensor  # offsets from one start to the next
    unit: gl.tensor  # offsets from one row to the next

    @gluon.jit
    def load(self, start, length, row, head, full, smem, column: gl.constexpr = 0):
        """Loads rows from `row` on, columns from `column` on, of the sequence at `start`; zeros from row
        `length` on."""
        offset = start * self.step + length * self.unit
        tma.async_load(self.desc, [FAR, offset, FAR - length + row, head, column], full, smem)

    @gluon.jit
    def store(self, start, length, row, head, column: gl.constexpr, smem):
        """Stores `smem` to rows from `row` on; rows from `length` on keep their values."""
        offset = start * self.step + length * self.unit
        tma.async_store(self.desc, [FAR, offset, FAR - length + row, head, column], smem)


@gluon.aggregate
class ClippedColumns:
    """`ClippedRows` for tiles in column parts, with a map for each part."""

    maps: gl.tuple
    step: gl.tensor
    unit: gl.tensor
    column: gl.constexpr  # first column

    @gluon.jit
    def load(self, start, length, row, head, full, smem):
        """Loads rows from `row` on of the sequence at `start` into a tile's parts; zeros from `length` on."""
        offset = start * self.step + length * self.unit
        column = self.column
        for part in gl.static_range(len(smem)):
            tma.async_load(self.maps[part], [FAR, offset, FAR - length + row, head, column], full, smem[part])
            column += smem[part].shape[4]

    @gluon.jit
    def store(self, start, length, row, head, column, smem):
        """Stores a tile's parts to rows from `row` on, columns from `column` on; rows from `length` on stay."""
        offset = start * self.step + length * self.unit
        column += self.column
        for part in gl.static_range(len(smem)):
            tma.async_store(self.maps[part], [FAR, offset, FAR - length + row, head, column], smem[part])
            column += smem[part].shape[4]


@gluon.constexpr_function
def tile_box(rows, cols, clipped, packed=1):
    """Shape of a tile's TMA box, with rows of `packed` heads: 4-D, or 5-D for `ClippedRows`."""
    return (1,) * (1 + clipped) + (rows // packed, packed, cols)


@gluon.constexpr_function
def stacked(count, box):
    """Shape of `count` tiles."""
    return (count, *box)
