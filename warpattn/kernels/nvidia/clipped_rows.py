"""TMA on sequences in one tensor, each clipped at its own end: loads read zeros past it, stores write nothing there.

TMA clips a box at the extents of its tensor map, and a map has one extent for the rows of all sequences. So the map has
five dimensions: the row dimension ends at 2^30, and two outer ones take back the distance to that end, because
addresses wrap around at 2^64 (the idea is that of Triton's ragged descriptors):

      dimension     wrap            offset                    rows           heads     columns
      extent        2^31 - 2^16     2^31 - 2^16               2^30           H         D
      stride        2^34 - row      step                      row            head      1          elements
      coordinate    2^30            start·step + n·unit       2^30 - n + i   h         c

The row stride is `unit` times the offset's stride, so that the sum is 2^64 bytes + start of the sequence + i rows; rows
from n on are outside. `start` counts the units that sequences are aligned to: rows, pages or batch entries.
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
        """Rows from `row` on of the sequence at `start`, columns from `column` on, into shared memory; zeros from
        `length` on."""
        offset = start * self.step + length * self.unit
        tma.async_load(self.desc, [FAR, offset, FAR - length + row, head, column], full, smem)

    @gluon.jit
    def store(self, start, length, row, head, column: gl.constexpr, smem):
        """Rows from `row` on, out of shared memory; rows from `length` on keep their values."""
        offset = start * self.step + length * self.unit
        tma.async_store(self.desc, [FAR, offset, FAR - length + row, head, column], smem)


@gluon.aggregate
class ClippedColumns:
    """The same where tiles are in parts, with a box and its map for each."""

    maps: gl.tuple
    step: gl.tensor
    unit: gl.tensor
    column: gl.constexpr  # the first one

    @gluon.jit
    def load(self, start, length, row, head, full, smem):
        """Rows from `row` on of the sequence at `start` into the parts of a tile; zeros from `length` on."""
        offset = start * self.step + length * self.unit
        column = self.column
        for part in gl.static_range(len(smem)):
            tma.async_load(self.maps[part], [FAR, offset, FAR - length + row, head, column], full, smem[part])
            column += smem[part].shape[4]

    @gluon.jit
    def store(self, start, length, row, head, column, smem):
        """Rows from `row` on, columns from `column` on, out of parts; rows from `length` on keep their values."""
        offset = start * self.step + length * self.unit
        column += self.column
        for part in gl.static_range(len(smem)):
            tma.async_store(self.maps[part], [FAR, offset, FAR - length + row, head, column], smem[part])
            column += smem[part].shape[4]
