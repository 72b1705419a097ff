"""Rows of Q, K, V and O in global memory, for each kind of sequence; all load (or store) boxes of the same shape.

      BatchRows       a batch entry: the map's own extents clip              dense batches but V, Q and O of paged ones
      SequenceRows    rows that end at a length of their own (nvidia/clipped_rows.py)     ragged batches, dense V
      PagedRows       pages that a table names, clipped at the sequence's end      paged keys and values
      CopiedRows      pages copied row by row by the load warp's threads     pages too small for a box

Rows past the end are read as zeros, so that P·V never reads stale memory, and not written. Values end (`until`)
at the last one that a row of the query tile sees, because later ones may be NaN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, tma
from triton.language.core import base_value

from ..nvidia.clipped_rows import FAR
from ..nvidia.opaque import hide_from_compiler
from ..pieces.scheduler_varlen import extent_of, extent_within
from . import traits

LEAST_ROWS = gl.constexpr(traits.LEAST_ROWS)
COPIED_ROWS = gl.constexpr(8)  # rows at a time


@gluon.aggregate
class Sources:
    """Operands in global memory, at this CTA's sequence; q, k, v, o are one of the classes below."""

    q: base_value
    k: base_value
    v: base_value
    o: base_value
    lse: gl.tensor  # float*, of query head 0 of this sequence
    lse_stride: gl.tensor  # from a head to the next
    sinks: gl.tensor  # float* (heads_q,)


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
        """Stores such a box from shared memory."""
        tma.async_store(self.desc, [self.b, row, head, column], smem)

    @gluon.jit
    def until(self, end, x):
        """All rows: the map knows one end (values of a pair of CTAs)."""
        return self


@gluon.aggregate
class SequenceRows:
    """Rows 0 .. length - 1 of a sequence; the map has (wrap, offset, rows, heads, dim)."""

    desc: tma.tensor_descriptor
    start: gl.tensor  # row of the tensor, or entry of the batch, that it begins at
    offset: gl.tensor
    length: gl.tensor

    @gluon.jit
    def load(self, row, head, full, smem, column=0):
        tma.async_load(self.desc, [FAR, self.offset, FAR - self.length + row, head, column], full, outer(smem))

    @gluon.jit
    def store(self, row, head, column, smem):
        tma.async_store(self.desc, [FAR, self.offset, FAR - self.length + row, head, column], outer(smem))

    @gluon.jit
    def until(self, end, x):
        """The first `end` rows, at most all, of V; `x`: `DenseArgs` or `RaggedArgs`."""
        return SequenceRows(self.desc, self.start, self.offset - (self.length - end) * x.v.unit, end)


@gluon.aggregate
class Table:
    """The pages of a sequence in order. Entries past its length are not read; page numbers are clamped to the cache."""

    entries: gl.tensor  # int32*
    last: gl.tensor  # page of the cache
    length: gl.tensor  # keys
    page_size: gl.constexpr

    @gluon.jit
    def page(self, key):
        """The page of `key` (any shape); some page past the end of the keys."""
        page = gl.load(self.entries + key // self.page_size, mask=key < self.length, other=0)
        return gl.minimum(gl.maximum(page, 0), self.last)

    @gluon.jit
    def until(self, end):
        """The pages of the first `end` keys, at most all."""
        return gl.aggregate_replace(self, length=end)


@gluon.aggregate
class PagedRows:
    """Keys of a sequence in pages; a box is of one page, a tile of BN keys is made of boxes."""

    desc: tma.tensor_descriptor
    step: gl.tensor  # offsets from a page to the next
    unit: gl.tensor  # offsets from a row to the next
    table: Table
    box: gl.constexpr  # rows

    @gluon.jit
    def load(self, row, head, full, smem, column=0):
        boxes: gl.constexpr = smem.shape[1] // self.box
        wide = outer(smem)
        for i in gl.static_range(boxes):
            key = hide_from_compiler(row + i * self.box)
            page = self.table.page(key)
            first = key // self.table.page_size * self.table.page_size
            used = gl.minimum(gl.maximum(self.table.length - first, 0), self.table.page_size)
            source = [FAR, page * self.step + used * self.unit, FAR - used + key - first, head, column]
            tma.async_load(self.desc, source, full, wide.slice(i * self.box, self.box, dim=2))

    @gluon.jit
    def until(self, end, x):
        """The first `end` keys, at most all."""
        return gl.aggregate_replace(self, table=self.table.until(end))


@gluon.aggregate
class CopiedRows:
    """Keys of a sequence in pages, row by row: boxes of fewer than 8 rows do not fit the atoms of a
    swizzled tile. Strides are in runs of 8 elements, 16 bytes, which a thread copies at once."""

    base: gl.tensor
    page_stride: gl.tensor
    row_stride: gl.tensor
    head_stride: gl.tensor
    runs: gl.tensor  # runs of a head's row
    table: Table

    @gluon.jit
    def copy(self, row, head, smem, column=0):
        """A tile [1, rows, 1, cols] from a row and a column on; zeros past the end of the keys and of the head dim.
        When this returns the tensor core, too, sees it, so the caller only arrives on the barrier."""
        self.start_copy(row, head, smem, column)
        finish_copies()

    @gluon.jit
    def start_copy(self, row, head, smem, column=0):
        """Starts `copy` without waiting for it."""
        rows: gl.constexpr = smem.shape[1]
        cols: gl.constexpr = smem.shape[3]
        tile = smem.reshape([rows, cols])
        lanes: gl.constexpr = cols // 8 if cols <= 128 else 8  # wide rows: few rows a lane, whose pages it looks up
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [1, 1], [1, 0])
        col = column + gl.arange(0, cols, gl.SliceLayout(0, layout))[None, :]
        at_head = head.to(gl.int64) * self.head_stride
        for i in gl.static_range(rows // COPIED_ROWS):
            first = hide_from_compiler(row + i * COPIED_ROWS)
            key = first + gl.arange(0, COPIED_ROWS, gl.SliceLayout(1, layout))
            page = self.table.page(key).to(gl.int64)
            at_row = (key % self.table.page_size).to(gl.int64) * self.row_stride
            start = (page * self.page_stride + at_row + at_head) * 8
            inside = (key < self.table.length)[:, None] & (col < self.runs * 8)
            part = tile.slice(i * COPIED_ROWS, COPIED_ROWS)
            async_copy.async_load(part, self.base + start[:, None] + col, mask=inside)

    @gluon.jit
    def until(self, end, x):
        """The first `end` keys, at most all."""
        return gl.aggregate_replace(self, table=self.table.until(end))


@gluon.jit
def finish_copies():
    """Waits for all copies and makes them visible to the tensor core."""
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()


@gluon.jit
def key_sources(k, v, seq_k, x, b, config: gl.constexpr, traits: gl.constexpr):
    """(K, V, keys) of sequence `b`; `x`: the arguments of the sequence kind."""
    if traits.paged:
        return paged_keys(k, v, x, b, config, traits)
    elif traits.kind == "ragged":
        start, seq_k = extent_of(x.cu_k, b)
        return sequence_rows(k, start, seq_k, x.k), sequence_rows(v, start, seq_k, x.v), seq_k
    else:
        return BatchRows(k, b), dense_values(v, b, seq_k, x), seq_k


@gluon.jit
def query_extent(x, b, traits: gl.constexpr):
    """(first row, number of rows) of the queries of packed sequence `b`."""
    if traits.paged:
        return extent_within(x.cu_q, b, x.batch)
    else:
        return extent_of(x.cu_q, b)


@gluon.jit
def paged_keys(k, v, x, b, config: gl.constexpr, traits: gl.constexpr):
    """(K, V, keys) of sequence `b` in pages; `x`: `PagedArgs` or `PagedRaggedArgs`."""
    if traits.ragged_queries:
        length = gl.load(x.table.lengths + b, mask=b < x.batch, other=0)
    else:
        length = gl.load(x.table.lengths + b)
    table = Table(x.table.entries + b.to(gl.int64) * x.table.stride, x.table.last, length, config.page_size)
    if config.box_rows < LEAST_ROWS:
        k = CopiedRows(k, x.k.page, x.k.row, x.k.head, x.k.runs, table)
        return k, CopiedRows(v, x.v.page, x.v.row, x.v.head, x.v.runs, table), length
    else:
        k = PagedRows(k, x.k.step, x.k.unit, table, config.box_rows)
        return k, PagedRows(v, x.v.step, x.v.unit, table, config.box_rows), length


@gluon.jit
def sequence_rows(desc, start, length, rows):
    """Rows of the sequence that begins at row (or page, or entry) `start`; `rows`: `MapRows`."""
    return SequenceRows(desc, start, start * rows.step + length * rows.unit, length)


@gluon.jit
def dense_values(desc, b, seq_k, x):
    """V of batch entry `b`; `x`: `DenseArgs`, or nothing where its map is that of a pair of CTAs."""
    if len(x) == 0:
        return BatchRows(desc, b)
    else:
        return sequence_rows(desc, b, seq_k, x.v)


@gluon.jit
def seen_values(v, span, seq_k, mods, x):
    """V up to the last key of `span`, an interval of a mask; `x`: the arguments of the sequence kind."""
    if mods.keep is None:
        return v
    else:
        return v.until(gl.minimum(span[3], seq_k), x)


@gluon.jit
def outer(smem):
    """[1, rows, heads, cols] with the extra dimension of a map of sequences."""
    return smem.reshape([1, smem.shape[0], smem.shape[1], smem.shape[2], smem.shape[3]])
