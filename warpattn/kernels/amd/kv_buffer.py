"""Buffers that move strips of K or V from DRAM to the matrix cores, in four ways.

      KVBuffer       DRAM ─▶ registers ─▶ LDS ─▶ registers    the next strip is loaded while this one is multiplied
      KVBufferOwn    DRAM ─▶ registers ────────▶ registers    the same; each wave multiplies what it has loaded
      KVBufferLDS    DRAM ─────DMA─────▶ LDS ─▶ registers     one slot: load, wait for all of it, multiply
      KVBufferRing   DRAM ─────DMA─────▶ LDS ─▶ registers     two or more slots, waits for the oldest load only

The methods, in the order of their calls:

      load_from_dram    start a load
      operand           KVBuffer, KVBufferOwn: the loaded registers as the operand of a product
      wait_for          KVBufferLDS, KVBufferRing: wait until the DMA has filled the slot
      load_from_shared  the same two: reads the strip as the operand of a product

A slot is acquired and released by barriers of the workgroup, which the compiler inserts (its analysis of shared memory;
`machine_code.gcn` checks the outcome): where a strip becomes readable, and before it is overwritten.

Columns past the head dim are zeros, and so are keys past the end, as lanes without a key get an offset out of bounds.
Only where a page may end inside a strip, keys past the end repeat the last one; the end of the keys masks them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from ..pieces.element_type import element_type
from .strips import by_base, copy_layout, first_col, first_row, shared_layout


@gluon.aggregate
class ScaleSource:
    """Scales of blocks of columns of one head in DRAM: rows at `base` + key * `row`, or in pages."""

    base: gl.tensor  # float* of the first row of the head (of page 0)
    row: gl.tensor  # int64 elements from key to key
    page: gl.tensor  # int64 elements from page to page
    block: gl.tensor  # int64 elements from one block to the next


@gluon.aggregate
class KVSource:
    """Keys or values of one head in DRAM: rows at `base` + key * `row`, or in pages of `page_size` keys."""

    base: gl.tensor  # pointer to the first row of the head (of page 0)
    row: gl.tensor  # int64 elements from key to key, a multiple of 16 bytes
    page: gl.tensor  # int64 elements from page to page, a multiple of 16 bytes
    table: gl.tensor  # int32* pages of this sequence, in order
    keys: gl.tensor  # int32 number of keys
    page_size: gl.constexpr  # 0: not paged
    scales: gl.base_value  # ScaleSource of what is multiplied on its way; () where nothing is


@gluon.aggregate
class RegisterLoads:
    """Strips from DRAM to registers."""

    config: gl.constexpr

    @gluon.jit
    def pages(self, source, key):
        """Page numbers that `load_from_dram` needs for the tile at `key`, looked up early; see `tile_pages`."""
        return tile_pages(source, self.config, key)

    @gluon.jit
    def load_from_dram(self, source, key, strip: gl.constexpr, pages):
        """Request strip number `strip` of the tile at `key`; returns a register stage for `operand`."""
        page = pages[strip if len(pages) > 1 else 0]
        if self.config.scales == 0:
            return self.load_values(source, key, strip, page)
        else:
            scales = load_scales(source, self.config, key, strip, page)
            return Scaled(self.load_values(source, key, strip, page), scales)

    @gluon.jit
    def load_values(self, source, key, strip: gl.constexpr, page):
        """The elements of a strip, as they are stored."""
        rows, cols, inside = strip_elements(source, self.config, key, strip)
        if by_base(self.config, source.page_size):
            offsets = (rows * source.row).to(gl.int32) + cols
            return cdna3.buffer_load(strip_base(source, self.config, key, strip, page), offsets, mask=inside)
        else:
            return load_rows(page_pointers(source, self.config, key, strip, page), cols, self.config)


@gluon.aggregate
class KVBuffer(RegisterLoads):
    """Through registers, with two stages: a strip that is being loaded, and one that is written to LDS."""

    smem: gl.shared_memory_descriptor

    @gluon.jit
    def operand(self, stage, layout: gl.constexpr):
        """A stage as the right operand of a product, [depth, keys] for K, [keys, depth] for V."""
        slot = self.smem.index(0)
        slot.store(widened(stage, slot.dtype, self.config))
        return get_mma_tile(slot, self.config).load(layout)


@gluon.aggregate
class KVBufferOwn(RegisterLoads):
    """Through registers only: a wave multiplies the keys that it has loaded itself (`KVBufferConfig.slots` is 0)."""

    @gluon.jit
    def operand(self, stage, layout: gl.constexpr):
        """A stage as the right operand of a product, moved between the lanes of a wave."""
        mine = gl.convert_layout(get_mma_tile(stage, self.config), layout)
        return widened(mine, element_type(self.config.element), self.config)


@gluon.jit
def make_register_buffer(config: gl.constexpr, page_size: gl.constexpr):
    """The buffer of a kernel that loads into registers."""
    if config.slots == 0:
        return KVBufferOwn(config)
    else:
        return KVBuffer(config, allocate(config, page_size))


@gluon.aggregate
class Scaled:
    """A strip in registers, and the scales [R, 1] of its rows for each block of columns."""

    values: gl.tensor
    scales: gl.base_value


@gluon.jit
def widened(x, dtype: gl.constexpr, config: gl.constexpr):
    """Elements of 8 bits in 16, exactly, or times their scales, rounded once; others as they are."""
    if config.scales > 0:
        factor = x.scales[0]
        blocks: gl.constexpr = config.scales
        for block in gl.static_range(1, blocks):
            factor = gl.where(strip_columns(config) < block * config.scaled_columns, factor, x.scales[block])
        return (x.values.to(gl.float32) * factor).to(dtype)
    elif x.dtype == dtype:
        return x
    else:
        return x.to(dtype)


@gluon.jit
def load_scales(source, config: gl.constexpr, key, strip: gl.constexpr, page):
    """Scales [R, 1] of a strip's rows for each block of columns, 1 past the last key; `page` as `strip_pages` says."""
    layout: gl.constexpr = gl.SliceLayout(1, copy_layout(config))
    rows: gl.constexpr = config.btile[0]
    first = key + first_row(config, strip)
    at = first + gl.arange(0, rows, layout)[:, None]
    scales = source.scales
    inside = at < source.keys
    if source.page_size == 0:
        places = scales.base + at.to(gl.int64) * scales.row
    elif by_base(config, source.page_size):
        at = first % source.page_size + gl.arange(0, rows, layout)[:, None]
        places = scales.base + page.to(gl.int64) * scales.page + at.to(gl.int64) * scales.row
    else:
        places = scales.base + page.to(gl.int64) * scales.page + (at % source.page_size).to(gl.int64) * scales.row
    found = ()
    blocks: gl.constexpr = config.scales
    for block in gl.static_range(blocks):
        found += (gl.load(places + block * scales.block, mask=inside, other=1.0),)
    return found


@gluon.jit
def load_rows(rows, cols, config: gl.constexpr):
    """Columns of rows [R, 1]; past the head dim zeros for K, other columns of the row for V (products are dropped).

    No load has a condition: with a branch each, they waited for one another and compiling took four times as long
    (gfx942, head dim 72 in pages of 16).
    """
    if config.dim == config.depth:
        return gl.load(rows + cols)
    elif config.operand == "K":
        strip = gl.load(rows + cols % config.dim)
        return gl.where(cols < config.dim, strip, gl.zeros_like(strip))
    else:
        return gl.load(rows + cols % config.dim)


@gluon.aggregate
class KVBufferLDS:
    """DMA with one slot: nothing is in flight while a strip is multiplied."""

    smem: gl.shared_memory_descriptor
    config: gl.constexpr

    @gluon.jit
    def load_from_dram(self, source, key, strip: gl.constexpr):
        """Start the DMA of a strip."""
        start_copy(self.smem.index(0), source, self.config, key, strip, strip_pages(source, self.config, key, strip))

    @gluon.jit
    def wait_for(self):
        """Wait until the DMA is done: s_waitcnt vmcnt(0)."""
        async_copy.wait_group(0)

    @gluon.jit
    def load_from_shared(self, layout: gl.constexpr):
        """The strip as the right operand of a product."""
        return async_copy.load_shared_relaxed(get_mma_tile(self.smem.index(0), self.config), layout)


@gluon.aggregate
class KVBufferRing:
    """DMA with several slots; a strip is a whole tile."""

    smem: gl.shared_memory_descriptor
    config: gl.constexpr

    @gluon.jit
    def pages(self, source, key):
        """Page numbers that `load_from_dram` needs for the tile at `key`: looked up a tile early, because memory
        answers in order, after all copies that were requested before."""
        return strip_pages(source, self.config, key, 0)

    @gluon.jit
    def load_from_dram(self, source, key, slot, pages):
        """Start the DMA of the tile at `key` into a slot."""
        start_copy(self.smem.index(slot), source, self.config, key, 0, pages)

    @gluon.jit
    def wait_for(self, in_flight: gl.constexpr):
        """Wait until at most the `in_flight` tiles (of K and V together) that were requested last are in flight.

        The compiler turns this into s_waitcnt vmcnt(n) with n the loads of these tiles (tests/sim/cdna/counts.py).
        """
        async_copy.wait_group(in_flight)

    @gluon.jit
    def load_from_shared(self, slot, layout: gl.constexpr):
        """The tile in a slot as the right operand of a product."""
        return async_copy.load_shared_relaxed(get_mma_tile(self.smem.index(slot), self.config), layout)


@gluon.jit
def slot_after(slot, slots: gl.constexpr):
    """The slot of the next tile. By comparison instead of a remainder, so that `gcn.check_copies` sees few values."""
    if slots == 2:
        return 1 - slot
    else:
        return gl.where(slot + 1 == slots, 0, slot + 1)


@gluon.jit
def slot_before(slot, slots: gl.constexpr):
    """The slot of the tile before, which is filled next."""
    if slots == 2:
        return 1 - slot
    else:
        return gl.where(slot == 0, slots, slot) - 1


@gluon.jit
def get_mma_tile(slot, config: gl.constexpr):
    """A slot as the right operand of its product: K transposed."""
    if config.operand == "K":
        return slot.permute((1, 0))
    else:
        return slot


@gluon.jit
def start_copy(slot, source, config: gl.constexpr, key, strip: gl.constexpr, pages):
    """DMA of a strip into a slot, a commit group of its own; `pages` as `strip_pages` says.

    Out of bounds, buffer loads write zeros. Loads by pointers repeat the last key past the end, and leave columns past
    the head dim as `allocate` filled them.
    """
    rows, cols, inside = strip_elements(source, config, key, strip)
    if by_base(config, source.page_size):
        offsets = (rows * source.row).to(gl.int32) + cols
        async_copy.buffer_load_to_shared(slot, strip_base(source, config, key, strip, pages), offsets, mask=inside)
    elif config.dim < config.depth:
        pointers = page_pointers(source, config, key, strip, pages) + cols
        async_copy.global_load_to_shared(slot, pointers, mask=cols < config.dim)
    else:
        async_copy.global_load_to_shared(slot, page_pointers(source, config, key, strip, pages) + cols)
    async_copy.commit_group()


@gluon.jit
def strip_elements(source, config: gl.constexpr, key, strip: gl.constexpr):
    """(rows in the strip [R, 1] int64, columns of the tensor [1, C], whether they are in bounds) of its elements."""
    layout: gl.constexpr = copy_layout(config)
    shape: gl.constexpr = config.btile
    rows = gl.arange(0, shape[0], gl.SliceLayout(1, layout))[:, None]
    cols = strip_columns(config) + first_col(config, strip)
    inside = rows < source.keys - key - first_row(config, strip)
    if config.dim < config.depth:
        inside = inside & (cols < config.dim)
    return rows.to(gl.int64), cols, inside


@gluon.jit
def strip_columns(config: gl.constexpr):
    """Columns [1, C] of a strip, from its first."""
    cols: gl.constexpr = config.btile[1]
    return gl.arange(0, cols, gl.SliceLayout(0, copy_layout(config)))[None, :]


@gluon.jit
def strip_base(source, config: gl.constexpr, key, strip: gl.constexpr, page):
    """Pointer to column 0 of a strip's first row; its rows follow at equal distances. Unused past the last key."""
    first = key + first_row(config, strip)
    if source.page_size == 0:
        return source.base + first.to(gl.int64) * source.row
    else:
        row = first % source.page_size
        return source.base + page.to(gl.int64) * source.page + row.to(gl.int64) * source.row


@gluon.jit
def tile_pages(source, config: gl.constexpr, key):
    """Tuple of the pages of each strip of the tile at `key`, or of one for all; see `strip_pages`."""
    pages = (strip_pages(source, config, key, 0),)
    parts: gl.constexpr = page_parts(config, source.page_size)
    for strip in gl.static_range(1, parts):
        pages += (strip_pages(source, config, key, strip),)
    return pages


@gluon.constexpr_function
def page_parts(config, page_size):
    """Strips of a tile that need page numbers of their own: those of V, unless one page holds them all."""
    whole = page_size == 0 or (by_base(config, page_size) and page_size % config.keys == 0)
    return 1 if whole or config.operand == "K" else config.strips


@gluon.jit
def strip_pages(source, config: gl.constexpr, key, strip: gl.constexpr):
    """The page of a strip, where one holds all of it; else the pages [R, 1] of its rows; 0 without pages.

    Past the last key it is the last key's page; without any key page 0, or one that no lane reads. The table is read
    without a condition, as a branch for each strip tripled the compile time.
    """
    if source.page_size == 0:
        return 0
    elif by_base(config, source.page_size):
        first = gl.minimum(key + first_row(config, strip), gl.maximum(source.keys - 1, 0))
        return gl.load(source.table + first // source.page_size)
    else:
        numbers = gl.load(source.table + strip_keys(source, config, key, strip) // source.page_size)
        return gl.where(source.keys > 0, numbers, 0)


@gluon.jit
def page_pointers(source, config: gl.constexpr, key, strip: gl.constexpr, pages):
    """Pointers [R, 1] to column 0 of a strip's rows, where a page may end inside the strip."""
    rows = strip_keys(source, config, key, strip) % source.page_size
    return source.base + pages.to(gl.int64) * source.page + rows.to(gl.int64) * source.row


@gluon.jit
def strip_keys(source, config: gl.constexpr, key, strip: gl.constexpr):
    """Keys [R, 1] of a strip's rows; past the last key, the last."""
    layout: gl.constexpr = copy_layout(config)
    shape: gl.constexpr = config.btile
    rows = key + first_row(config, strip) + gl.arange(0, shape[0], gl.SliceLayout(1, layout))[:, None]
    return gl.maximum(gl.minimum(rows, source.keys - 1), 0)


@gluon.jit
def allocate(config: gl.constexpr, page_size: gl.constexpr):
    """LDS of a buffer; columns that no copy writes are set to zero."""
    dtype: gl.constexpr = element_type(config.element)
    shape: gl.constexpr = [config.slots, config.btile[0], config.btile[1]]
    smem = gl.allocate_shared_memory(dtype, shape, shared_layout(config))
    if config.kind != "registers" and config.dim < config.depth and not by_base(config, page_size):
        slots: gl.constexpr = config.slots
        for slot in gl.static_range(slots):
            smem.index(slot).store(gl.zeros([shape[1], shape[2]], dtype, copy_layout(config)))
    return smem
