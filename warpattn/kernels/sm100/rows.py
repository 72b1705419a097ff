"""Where rows of Q, K, V and O lie, for each kind of sequence; every kind loads (or stores) boxes of the same shape.

      BatchRows       a batch entry: the map's own extents clip                     dense batches, Q and O of paged ones
      SequenceRows    rows that end at a length of their own (nvidia/ragged.py)     ragged batches
      PagedRows       pages that a table names, clipped at the sequence's end      paged keys and values

What lies past the end is read as zero, so P·V never meets what happens to be in memory there, and is not written.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import tma

from ..nvidia.ragged import FAR


@gluon.aggregate
class BatchRows:
    """Rows of batch entry `b`; the map has (batch, rows, heads, dim)."""

    desc: tma.tensor_descriptor
    b: gl.tensor

    @gluon.jit
    def load(self, row, head, full, smem, column=0):
        """A box [1, rows, heads, cols] from a row, a head and a column on."""
        tma.async_load(self.desc, [self.b, row, head, column], full, smem)

    @gluon.jit
    def store(self, row, head, column, smem):
        """The same out of shared memory."""
        tma.async_store(self.desc, [self.b, row, head, column], smem)


@gluon.aggregate
class SequenceRows:
    """Rows 0 .. length - 1 of a sequence; the map has (wrap, offset, rows, heads, dim)."""

    desc: tma.tensor_descriptor
    offset: gl.tensor
    length: gl.tensor

    @gluon.jit
    def load(self, row, head, full, smem, column=0):
        tma.async_load(self.desc, [FAR, self.offset, FAR - self.length + row, head, column], full, outer(smem))

    @gluon.jit
    def store(self, row, head, column, smem):
        tma.async_store(self.desc, [FAR, self.offset, FAR - self.length + row, head, column], outer(smem))


@gluon.aggregate
class PagedRows:
    """Keys 0 .. length - 1 of a sequence in pages; a box is of one page, a tile of BN keys is made of boxes.

    Entries of the table past the length are not read, and page numbers are clamped to the cache.
    """

    desc: tma.tensor_descriptor
    step: gl.tensor  # offsets from a page to the next
    unit: gl.tensor  # offsets from a row to the next
    entries: gl.tensor  # int32*, the pages of this sequence
    pages: gl.tensor  # of the cache
    length: gl.tensor
    page_size: gl.constexpr
    box: gl.constexpr  # rows

    @gluon.jit
    def load(self, row, head, full, smem, column=0):
        boxes: gl.constexpr = smem.shape[1] // self.box
        wide = outer(smem)
        for i in gl.static_range(boxes):
            key = row + i * self.box
            at = key // self.page_size
            page = gl.load(self.entries + at, mask=key < self.length, other=0)
            page = gl.minimum(gl.maximum(page, 0), self.pages - 1)
            used = gl.minimum(gl.maximum(self.length - at * self.page_size, 0), self.page_size)
            place = [FAR, page * self.step + used * self.unit, FAR - used + key - at * self.page_size, head, column]
            tma.async_load(self.desc, place, full, wide.slice(i * self.box, self.box, dim=2))


@gluon.jit
def sequence_rows(desc, start, length, step, unit):
    """Rows of the sequence that begins at row (or page, or entry) `start`."""
    return SequenceRows(desc, start * step + length * unit, length)


@gluon.jit
def outer(smem):
    """[1, rows, heads, cols] with the dimension that a map of sequences has more."""
    return smem.reshape([1, smem.shape[0], smem.shape[1], smem.shape[2], smem.shape[3]])
