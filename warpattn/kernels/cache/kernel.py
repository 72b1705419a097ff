"""Writes new keys and values into the pages of a cache, and rotates the keys if tables are given.

A program copies a few rows, one head of one new token each. A row's place in the cache comes from a value with the
method `at`:

      TablePlaces    position from the length of the sequence, page from the block table
      SlotPlaces     slot = page · page size + row, from a list; below 0: padding

Rows of new tokens are loaded while their places are in flight. Rotation reads each element's partner once more,
from L1:

      half-split    x[c] · cos[c mod R/2]  -+  x[c ± R/2] · sin[c mod R/2]      first R columns, first half minus
      interleaved   x[c] · cos[c div 2]    -+  x[c xor 1] · sin[c div 2]        first R columns, even ones minus

Where pages have 8 bits, rows are divided by their scale, saturated and rounded on the way; a scale per token is that
of the row itself, and written beside it, as are those of blocks of its columns.

Nothing is written for positions below 0 or past the table, and for pages that are not in the cache.

Attention usually follows. On Hopper every program triggers the dependent launch when it begins (PDL): attention itself
waits for the keys and values of this launch, and all else was written before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents

from .config import VECTOR

_VECTOR = gl.constexpr(VECTOR)
_LEAST_SCALE = gl.constexpr(2.0**-126)


@gluon.aggregate
class Place:
    """Rows of new tokens and their places in the cache, a block of them."""

    b: gl.tensor  # sequence
    token: gl.tensor  # among the new ones of the sequence
    head: gl.tensor
    given: gl.tensor  # bool: whether there is such a row
    page: gl.tensor
    row: gl.tensor  # of the page
    position: gl.tensor  # in the sequence
    inside: gl.tensor  # bool: whether the cache has that row


@gluon.aggregate
class TablePlaces:
    """Places by block table and lengths."""

    table: gl.tuple  # Table
    lengths: gl.tensor  # int32*
    shape: gl.tuple  # AppendShape

    @gluon.jit
    def at(self, number, rotated: gl.constexpr):
        """The place of rows (sequence, token, head), counted through."""
        shape = self.shape
        given = number < shape.count
        index = number // shape.heads
        b = index // shape.tokens
        token = index - b * shape.tokens
        position = gl.load(self.lengths + b, mask=given, other=0) - shape.tokens + token
        slot = position // shape.page_size
        inside = given & (position >= 0) & (slot < shape.table_pages)
        page = gl.load(self.table.pointer + b.to(gl.int64) * self.table.stride + slot, mask=inside, other=-1)
        inside = inside & (page >= 0) & (page < shape.pages)
        row = position - slot * shape.page_size
        return Place(b, token, number - index * shape.heads, given, page, row, position, inside)


@gluon.aggregate
class SlotPlaces:
    """Places by slots."""

    slots: gl.tensor  # int32* or int64* (tokens,)
    positions: gl.tensor  # int32* or int64* (tokens,)
    shape: gl.tuple  # AppendShape

    @gluon.jit
    def at(self, number, rotated: gl.constexpr):
        """The place of rows (token, head), counted through."""
        shape = self.shape
        given = number < shape.count
        token = number // shape.heads
        slot = gl.load(self.slots + token, mask=given, other=-1)
        inside = (slot >= 0) & (slot < shape.pages * shape.page_size)
        slot = gl.where(inside, slot, 0).to(gl.int32)
        page = slot // shape.page_size
        position = slot
        if rotated:
            position = gl.load(self.positions + token, mask=given, other=0).to(gl.int32)
        row = slot - page * shape.page_size
        return Place(token * 0, token, number - token * shape.heads, given, page, row, position, inside)


@gluon.jit
def append_kernel(
    k_pages, v_pages, k_new, v_new, places, cos, sin, shape,
    config: gl.constexpr, by_table: gl.constexpr, lanes: gl.constexpr, trigger_dependents: gl.constexpr,
):  # fmt: skip
    """k_pages, v_pages, k_new, v_new: `Rows`; without values if `config.dims` has one entry. places: `TableArgs` or
    `SlotArgs`, `by_table`: which. cos, sin: `Table`. shape: `AppendShape`. lanes: of a warp. trigger_dependents:
    whether the next launch may start at once. Grid: blocks of `config.rows` rows."""
    if trigger_dependents:
        gdc_launch_dependents()
    if by_table:
        places = TablePlaces(places.table, places.lengths, shape)
    else:
        places = SlotPlaces(places.slots, places.positions, shape)
    copy_rows(k_new, k_pages, places, (cos, sin), 0, config, lanes)
    if len(config.dims) > 1:
        copy_rows(v_new, v_pages, places, (cos, sin), 1, config, lanes)


@gluon.jit
def copy_rows(source, target, places, angles, which: gl.constexpr, config: gl.constexpr, lanes: gl.constexpr):
    """This program's rows of new tokens to their pages; `which`: 0 keys, 1 values."""
    dim: gl.constexpr = config.dims[which]
    rotation: gl.constexpr = config.rotation if which == 0 else None
    width: gl.constexpr = 1 << (dim - 1).bit_length()
    size: gl.constexpr = source.pointer.dtype.element_ty.primitive_bitwidth // 8
    vector: gl.constexpr = min(width, _VECTOR // size)
    across: gl.constexpr = min(width // vector, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, vector], [lanes // across, across], [4, 1], [1, 0])
    number = gl.program_id(0) * config.rows + gl.arange(0, config.rows, gl.SliceLayout(1, layout))
    at = places.at(number, rotation is not None)
    col = gl.arange(0, width, gl.SliceLayout(0, layout))[None, :]
    given = at.given[:, None] & (col < dim)
    start = at.b.to(gl.int64) * source.outer + at.token.to(gl.int64) * source.row + at.head.to(gl.int64) * source.head
    rows = source.pointer + (start * config.run)[:, None]
    x = gl.load(rows + col, mask=given, other=0.0)
    if rotation is not None:
        half: gl.constexpr = rotation.dim // 2
        if rotation.interleaved:
            partner = col ^ 1
            angle = col // 2
            first = (col & 1) == 0
        else:
            partner = gl.where(col < half, col + half, col - half)
            angle = gl.where(col < half, col, col - half)
            first = col < half
        cos, sin = angles
        turned = (col < rotation.dim) & at.inside[:, None]
        position = at.position.to(gl.int64)[:, None]
        other = gl.load(rows + partner, mask=turned, other=0.0).to(gl.float32)
        c = gl.load(cos.pointer + position * cos.stride + angle, mask=turned, other=1.0).to(gl.float32)
        s = gl.load(sin.pointer + position * sin.stride + angle, mask=turned, other=0.0).to(gl.float32)
        x = (x.to(gl.float32) * c + gl.where(first, -other, other) * s).to(x.dtype)
    if config.eight_bit is not None:
        x = in_eight_bits(x, target, at, config, which)
    start = at.page.to(gl.int64) * target.outer + at.row.to(gl.int64) * target.row + at.head.to(gl.int64) * target.head
    gl.store(target.pointer + (start * config.run)[:, None] + col, x, mask=given & at.inside[:, None])


@gluon.jit
def in_eight_bits(x, target, at, config: gl.constexpr, which: gl.constexpr):
    """Rows [M, D] divided by their scales, in the elements of the pages; scales of tokens, and of blocks of their
    columns, are computed and written."""
    per: gl.constexpr = config.eight_bit.scales[which]
    largest: gl.constexpr = config.eight_bit.largest
    x = x.to(gl.float32)
    if per == 64 or per == 128:
        x = divided_blocks(x, target, at, config.dims[which] // per, per, largest)
    elif per is not None:
        rows = target.scale.pointer + at.page.to(gl.int64) * target.scale.outer + at.row.to(gl.int64) * target.scale.row
        rows = rows + at.head.to(gl.int64) * target.scale.head
        if per == "token":
            scale = whole_range(gl.abs(x), 1, largest)
            gl.store(rows, scale, mask=at.given & at.inside)
        else:
            scale = gl.load(rows, mask=at.given & at.inside, other=1.0)
        x = gl.div_rn(x, scale[:, None] + gl.zeros_like(x))
    x = gl.where(x != x, x, gl.minimum(gl.maximum(x, -largest), largest))
    return x.to(target.pointer.dtype.element_ty)


@gluon.jit
def whole_range(size, axis: gl.constexpr, largest: gl.constexpr):
    """The scale that gives the largest finite one of magnitudes along an axis the largest number; 1 for zeros."""
    top = gl.max(gl.where(size < float("inf"), size, 0.0), axis)
    scale = gl.maximum(gl.div_rn(top, gl.full_like(top, largest)), _LEAST_SCALE)
    return gl.where(top == 0, 1.0, scale)


@gluon.jit
def divided_blocks(x, target, at, given: gl.constexpr, columns: gl.constexpr, largest: gl.constexpr):
    """Rows [M, D] divided by the scales of blocks of so many columns, which are computed and written; `given`: those
    of the head dim, without what fills up a row."""
    rows: gl.constexpr = x.shape[0]
    blocks: gl.constexpr = x.shape[1] // columns
    each = x.reshape([rows, blocks, columns])
    scale = whole_range(gl.abs(each), 2, largest)
    row: gl.constexpr = gl.SliceLayout(1, scale.type.layout)
    start = at.page.to(gl.int64) * target.scale.outer + at.row.to(gl.int64) * target.scale.row
    start = gl.convert_layout(start + at.head.to(gl.int64) * target.scale.head, row)
    there = gl.convert_layout(at.given & at.inside, row)
    block = gl.arange(0, blocks, gl.SliceLayout(0, scale.type.layout))
    inside = there[:, None] & (block < given)[None, :]
    gl.store(target.scale.pointer + start[:, None] + (block * target.scale.block)[None, :], scale, mask=inside)
    quotient = gl.div_rn(each, scale[:, :, None] + gl.zeros_like(each))
    return gl.convert_layout(quotient.reshape([rows, blocks * columns]), x.type.layout)
