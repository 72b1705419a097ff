"""Loads key tiles of a paged cache page by page into a slot of the K or V ring.

      slot     ┌ page 7, rows 0-15 ┬ page 2, rows 0-15 ┬ page 9, rows 0-4 ┬ zeros ┐        page size 16, 37 keys

A TMA box has as many rows as the largest power of two that divides the page size, at most those of a key tile. The
producer reads page numbers before it waits for the slot, so that the consumers' work hides their latency. A swizzled
tile cannot take boxes of fewer than 8 rows, so ordinary copies read such pages (sizes 1, 2, 3, 4, 12 ...) row by row.

The producer never reads entries of the block table past a sequence's length, and clamps page numbers to the cache.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...nvidia.clipped_rows import ClippedColumns
from .config import LEAST_BOX

AT_ONCE = gl.constexpr(8)  # page numbers that the producer reads together
LEAST_ROWS = gl.constexpr(LEAST_BOX)


@gluon.aggregate
class Table:
    """The block table: pages of every sequence in order."""

    entries: gl.tensor  # int32* (batch, max_pages)
    stride: gl.tensor  # entries from one sequence to the next
    pages: gl.tensor  # pages of the cache
    page_size: gl.constexpr

    @gluon.jit
    def page(self, b, key, seq_k):
        """The page of `key` (any shape) of sequence `b`; past the end of the keys, any page."""
        entry = self.entries + b.to(gl.int64) * self.stride + key // self.page_size
        page = gl.load(entry, mask=key < seq_k, other=0)
        return gl.minimum(gl.maximum(page, 0), self.pages - 1)


@gluon.aggregate
class PagedKeys:
    """Loads K or V from pages by TMA."""

    rows: ClippedColumns  # indexed by page instead of by first row of a sequence
    table: Table
    box: gl.constexpr  # rows of a TMA box

    @gluon.jit
    def load(self, ctx, ring, state, tile, key_tile, nbytes: gl.constexpr):
        """Loads a key tile of the key head of `tile` into a slot."""
        first = key_tile * ctx.config.block_n
        parts: gl.constexpr = ctx.config.block_n // self.box
        together: gl.constexpr = min(parts, AT_ONCE)
        pages = self.pages_from(tile, first, together)
        full = ring.producer_acquire(state)
        mbarrier.expect(full, nbytes)
        slot, head = ring.tile(state), tile.h // ctx.work.group
        for begin in gl.static_range(0, parts, together):
            if begin > 0:
                pages = self.pages_from(tile, first + begin * self.box, together)
            for i in gl.static_range(together):
                smem = slice_rows(slot, (begin + i) * self.box, self.box, 2)
                self.load_box(tile, first + (begin + i) * self.box, pages[i], head, full, smem)

    @gluon.jit
    def place(self, ctx, tile, key):
        """(page, row) of `key` of a tile's sequence, which locates its scale."""
        return self.table.page(tile.b, key, tile.seq_k), key % self.table.page_size

    @gluon.jit
    def pages_from(self, tile, key, count: gl.constexpr):
        """Page numbers of `count` boxes from `key` on."""
        pages = ()
        for i in gl.static_range(count):
            pages += (self.table.page(tile.b, key + i * self.box, tile.seq_k),)
        return pages

    @gluon.jit
    def load_box(self, tile, key, page, head, full, smem):
        """Loads one box from `key` on; zeros past the sequence."""
        row = key % self.table.page_size
        length = row + gl.minimum(gl.maximum(tile.seq_k - key, 0), self.box)
        self.rows.load(page, length, row, head, full, smem)


@gluon.aggregate
class CopiedKeys:
    """Loads K or V from pages row by row with cp.async, 16 bytes a lane. Strides are in runs of 8 elements."""

    base: gl.tensor
    page_stride: gl.tensor
    row_stride: gl.tensor
    head_stride: gl.tensor
    table: Table
    column: gl.constexpr  # first column to load
    end: gl.constexpr  # column after the last one

    @gluon.jit
    def load(self, ctx, ring, state, tile, key_tile, nbytes: gl.constexpr):
        """Loads one key tile of the key head of `tile` into a slot; zeros past the sequence and past the head dim."""
        first = key_tile * ctx.config.block_n
        head = (tile.h // ctx.work.group).to(gl.int64) * self.head_stride
        full = ring.producer_acquire(state)
        column = self.column
        slot = ring.tile(state)
        for part in gl.static_range(len(slot)):
            self.copy_part(tile, first, head, column, slot[part])
            column += slot[part].shape[4]
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(full, count=1)

    @gluon.jit
    def copy_part(self, tile, first, head, column, smem):
        """Copies a part of a key tile, from `first` and `column` on."""
        rows: gl.constexpr = smem.shape[2]
        cols: gl.constexpr = smem.shape[4]
        smem = smem.reshape([rows, cols])
        lanes: gl.constexpr = min(cols // 8, 32)
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [gl.num_warps(), 1], [1, 0])
        runs = column + gl.arange(0, cols, gl.SliceLayout(0, layout))[None, :]
        for block in gl.static_range(rows // LEAST_ROWS):
            key = first + block * LEAST_ROWS + gl.arange(0, LEAST_ROWS, gl.SliceLayout(1, layout))
            page = self.table.page(tile.b, key, tile.seq_k).to(gl.int64)
            row = (key % self.table.page_size).to(gl.int64)
            start = (page * self.page_stride + row * self.row_stride + head) * 8
            inside = (key < tile.seq_k)[:, None] & (runs < self.end)
            into = smem.slice(block * LEAST_ROWS, LEAST_ROWS)
            async_copy.async_load(into, self.base + start[:, None] + runs, mask=inside)


@gluon.jit
def slice_rows(tile, first: gl.constexpr, rows: gl.constexpr, dim: gl.constexpr):
    """`rows` rows from `first` on of every part of a tile."""
    parts = ()
    for part in gl.static_range(len(tile)):
        parts += (tile[part].slice(first, rows, dim=dim),)
    return parts
