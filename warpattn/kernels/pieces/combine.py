"""Combines partial outputs of a row, each normalised over its own keys, by their denominators.

If e^m · l is the denominator of a part and M the largest m, then the row's denominator is  e^M · L,  L = Σ e^(m - M) ·
l,  and its output Σ e^(m - M) · l · o / L. (A part's LSE alone would have no digits left for l beyond 2^16.)
A part without visible keys has the lowest m and l = 0, and adds nothing; one with a NaN has l = NaN, which the
sum propagates. Parts are added in a fixed order, in blocks of a fixed size, so the result does not depend on which CTA
combines them or when.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .combine_config import COLUMNS_PER_LANE, CombineTile
from .softmax import LOG2_E, LOWEST, Denominator, finish_rows

NO_KEY = gl.constexpr(-0x80_0001 << 32)  # the packed `Denominator` of a row without a key: m is `LOWEST`, l is 0


@gluon.aggregate
class Partials:
    """Workspace: outputs [slot, rows, cols], fp32, and packed denominators [slot, rows]."""

    o: gl.tensor
    denominators: gl.tensor
    rows: gl.tensor  # rows of a slot
    cols: gl.constexpr

    @gluon.jit
    def store(self, slot, o, denominator, column: gl.constexpr = 0, first=0):
        """Stores a part: `o` [M, N] to rows from `first` and columns from `column` on, and with the first columns
        `denominator` [M], which is in the row layout of `o`. Rows past the slot's are dropped."""
        row = first + gl.arange(0, o.shape[0], denominator.l.type.layout)
        col = column + gl.arange(0, o.shape[1], gl.SliceLayout(0, o.type.layout))
        at = slot.to(gl.int64) * self.rows + row
        if column == 0:
            gl.store(self.denominators + at, denominator.packed(), mask=row < self.rows)
        gl.store(self.o + (at * self.cols)[:, None] + col[None, :], o, mask=(row < self.rows)[:, None])


@gluon.aggregate
class EqualParts:
    """Rows with the same number of parts: part i is in slot `first` + i · `step`."""

    first: gl.tensor
    step: gl.tensor
    splits: gl.tensor

    @gluon.jit
    def slot(self, split):
        """The slot of part `split`."""
        return split * self.step + self.first


@gluon.jit
def to_layout(denominator, layout: gl.constexpr, trivial: gl.constexpr = False):
    """A `Denominator` in another layout; `trivial`: every thread already has its numbers."""
    m = gl.convert_layout(denominator.m, layout, trivial)
    return Denominator(m, gl.convert_layout(denominator.l, layout, trivial))


@gluon.jit
def with_sink(denominator, sink):
    """Adds a logit `sink` to a denominator; returns (factor of the output, `Denominator`)."""
    l = denominator.l
    factor, joined = finish_rows(denominator.m, l, 1.0, l != 0, sink, True)
    return factor * l, joined


@gluon.jit
def combine_rows(partials, part, first_row, tile: gl.constexpr, rows: gl.constexpr, column=0):
    """(o [rows, columns of the `CombineTile`], `Denominator` [rows]) of rows from `first_row` and columns from `column`
    on, over all parts."""
    layout: gl.constexpr = parts_layout(tile)
    part_layout: gl.constexpr = gl.SliceLayout(2, layout)
    row = first_row + gl.arange(0, rows, gl.SliceLayout(0, part_layout))
    col = column + gl.arange(0, tile.cols, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    m = gl.full([rows], LOWEST, gl.float32, gl.SliceLayout(0, part_layout))
    l = gl.zeros_like(m)
    o = gl.zeros([rows, tile.cols], gl.float32, gl.SliceLayout(0, layout))
    for begin in range(0, part.splits, tile.parts):
        split = begin + gl.arange(0, tile.parts, gl.SliceLayout(1, part_layout))
        at = (part.slot(split).to(gl.int64) * partials.rows)[:, None] + row[None, :]
        there = (split < part.splits)[:, None] & (row < partials.rows)[None, :]
        part_of = unpacked(gl.load(partials.denominators + at, mask=there, other=NO_KEY, cache_modifier=".cg"))
        values = gl.load(
            partials.o + (at * partials.cols)[:, :, None] + col[None, None, :],
            mask=there[:, :, None], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        top = gl.maximum(m, gl.max(part_of.m, 0))
        old = gl.exp2((m - top) * LOG2_E)
        weight = gl.exp2((part_of.m - top[None, :]) * LOG2_E) * part_of.l
        l = l * old + gl.sum(weight, 0)
        moved = gl.convert_layout(old, gl.SliceLayout(1, o.type.layout))
        o = o * moved[:, None] + gl.sum(values * weight[:, :, None], 0)
        m = top
    by_row: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    factor = gl.convert_layout(gl.where(l != 0, 1.0 / l, 0.0), by_row)
    return o * factor[:, None], to_layout(Denominator(m, l), by_row)


@gluon.constexpr_function
def tile_for(cols, most=32, warps=4):
    """The `CombineTile` of `warps` warps that have all parts of an element in one lane."""
    return CombineTile(cols, most, warps)


@gluon.constexpr_function
def combine_layout(cols, most=32, warps=4):
    """Registers of the [parts, rows, cols] partial outputs of `tile_for`."""
    return parts_layout(CombineTile(cols, most, warps))


@gluon.constexpr_function
def parts_layout(tile):
    """Registers of the [parts, rows, cols] partial outputs of a `CombineTile`."""
    elements = [tile.lane_parts, tile.lane_rows, COLUMNS_PER_LANE]
    warps = [tile.part_warps, tile.warps // tile.part_warps, 1]
    return gl.BlockedLayout(elements, [1, tile.rows_per_warp, tile.lanes_per_row], warps, [2, 1, 0])


@gluon.jit
def unpacked(number):
    """The `Denominator` of a `packed` number."""
    l = number.to(gl.int32).to(gl.float32, bitcast=True)
    return Denominator((number >> 32).to(gl.int32).to(gl.float32, bitcast=True), l)
