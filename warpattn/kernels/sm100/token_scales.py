"""Scales of tokens, and of blocks of their columns, where two warps make 16-bit tiles of 8-bit keys and values.

      table ──▶ pages of a tile, registers       one request earlier, as a page number takes as long to arrive as
      its scales ── cp.async ──▶ shared memory [slots * blocks, BN]       the scale that it leads to
      its 8 bits ── × scale, rounded once ──▶ ring of 16 bits

A request is sent after the conversion of the tile whose slot it takes. With one slot it has the time of a tile of the
other operand; where keys are values there are two slots.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.core import base_value

from ..pieces.scales import scale_row
from . import config as sizes

CONVERTING = gl.constexpr(sizes.CONVERT.warps)
CHUNK = gl.constexpr(128)  # columns that are converted at once, at most


@gluon.aggregate
class NextScales:
    """The tile whose scales are requested next, by its number in the run, and the pages of its keys."""

    number: gl.tensor
    pages: base_value  # [BN], () where there are no pages


@gluon.aggregate
class TokenScales:
    """The scales of keys or of values of one head, and the place in shared memory of a tile's."""

    smem: gl.shared_memory_descriptor  # [slots * blocks, BN] fp32
    operand: gl.constexpr  # "k" or "v"
    rows: gl.tuple  # ScaleRows or ColumnScaleRows
    source: base_value  # rows of keys, one of the classes of global_rows.py
    end: gl.tensor  # keys of the sequence; values may end earlier, where scales may be no numbers
    b: gl.tensor
    head: gl.tensor
    run: base_value  # TileSpan or TileRun
    config: gl.constexpr
    traits: gl.constexpr

    @gluon.jit
    def first(self):
        """Requests the scales of the first tile."""
        number = gl.to_tensor(0)
        return self.request(NextScales(number, self.pages(number)))

    @gluon.jit
    def request(self, following):
        """Requests the scales of the next tile, if there is one, and reads the pages of the one after."""
        key = self.keys(following.number)
        places = self.places(key, following.pages)
        inside = (key < self.end) & (following.number < self.run.total)
        slot = self.slot(following.number)
        blocks: gl.constexpr = self.config.scale_blocks(self.operand)
        for block in gl.static_range(blocks):
            if block > 0:
                places += self.rows.block
            async_copy.async_load(self.smem.index(slot + block), places, mask=inside)
        async_copy.commit_group()
        number = following.number + 1
        return NextScales(number, self.pages(number))

    @gluon.jit
    def slot(self, number):
        """The first row of a tile's scales in shared memory."""
        blocks: gl.constexpr = self.config.scale_blocks(self.operand)
        slots: gl.constexpr = self.smem.shape[0] // blocks
        if slots == 1:
            return 0
        else:
            return number % slots * blocks

    @gluon.jit
    def keys(self, number):
        """Keys [BN] of a tile of the run, of the last one for numbers beyond."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [CONVERTING], [0])
        first = self.run.key_tile(gl.minimum(number, self.run.total - 1)) * self.config.BN
        return first + gl.arange(0, self.config.BN, layout)

    @gluon.jit
    def pages(self, number):
        """Pages [BN] of the keys of a tile of the run."""
        if self.traits.paged:
            return self.source.table.page(self.keys(number))
        else:
            return ()

    @gluon.jit
    def places(self, key, pages):
        """Pointers [BN] to the first scale of each key."""
        head = self.rows.scale + self.head * self.rows.head
        if self.traits.paged:
            return head + pages.to(gl.int64) * self.rows.outer + (key % self.config.page_size) * self.rows.row
        elif self.traits.kind == "ragged":
            return head + (self.source.start + key) * self.rows.row
        else:
            return head + self.b * self.rows.outer + scale_row(self.config, self.operand, key) * self.rows.row


@gluon.jit
def make_slots(config: gl.constexpr, operand: gl.constexpr, slots: gl.constexpr = 1):
    """Shared memory [slots * blocks, BN] of the scales of tiles of "k" or "v", () where its tokens have none."""
    if config.scale_blocks(operand) == 0:
        return ()
    else:
        shape: gl.constexpr = [slots * config.scale_blocks(operand), config.BN]
        return gl.allocate_shared_memory(gl.float32, shape, gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def values_end(v, traits: gl.constexpr):
    """The keys whose values a tile of queries sees; what is past them is read as zeros."""
    if traits.paged:
        return v.table.length
    else:
        return v.length


@gluon.jit
def wait_for_scales(later: gl.constexpr):
    """Wait for the requests so far but as many `later` ones."""
    async_copy.wait_group(later)


@gluon.jit
def convert_scaled(narrow, wide, scales, slot, first: gl.constexpr, column: gl.constexpr, shared: gl.constexpr):
    """Elements [rows, columns] of 8 bits, those from a row and a `column` on, times their scales in fp32, rounded once
    to those of `wide`; scales: [slots * blocks, BN], a tile's from row `slot` on, of `shared` columns each."""
    cols: gl.constexpr = narrow.shape[1]
    chunk: gl.constexpr = min(cols, shared, CHUNK)
    layout: gl.constexpr = rows_layout(chunk)
    for at in gl.static_range(0, cols, chunk):
        rows = scales.index(slot + (column + at) // shared).slice(first, narrow.shape[0])
        scale = rows.load(gl.SliceLayout(1, layout))
        x = narrow.slice(at, chunk, 1).load(layout).to(gl.float16).to(gl.float32) * scale[:, None]
        wide.slice(at, chunk, 1).store(x.to(wide.dtype))


@gluon.jit
def convert_exactly(narrow, wide):
    """Elements [rows, columns] of 8 bits as those of `wide`, both of which hold them."""
    x = narrow.load(rows_layout(narrow.shape[1])).to(gl.float16)
    if wide.dtype == gl.bfloat16:
        x = x.to(gl.float32).to(gl.bfloat16)
    wide.store(x)


@gluon.constexpr_function
def rows_layout(cols):
    """Registers of some rows: 16 columns of a row in a lane."""
    return gl.BlockedLayout([1, 16], [32 * 16 // cols, cols // 16], [CONVERTING, 1], [1, 0])
