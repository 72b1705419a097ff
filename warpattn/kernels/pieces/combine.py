"""Combining partial results of a row: outputs normalised over their own keys, with base-2 log-sum-exps.

With l the log2 of each part's denominator, the row's is  l* = m + log2 Σ 2^(l - m)  and its output Σ 2^(l - l*) · o.
A part without visible keys has l = -inf and counts for nothing; one with a NaN has l = NaN, which the sum carries.
Parts are added in the order of their numbers, in blocks of a fixed size, so the result does not depend on which CTA
does it or when.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import PropagateNan

from .combine_config import COLUMNS_PER_LANE, CombineTile
from .softmax import LOG2_E, LOWEST, exponent

HIGHEST = gl.constexpr(3.4028234663852886e38)  # of finite numbers
_ALL = gl.constexpr(PropagateNan.ALL)


@gluon.jit
def in_base_2(x, c):
    """c · x, a base-2 exponent of natural `x`: finite where `x` is, and an infinity where it is one."""
    y = gl.maximum(x * c, LOWEST, propagate_nan=_ALL)
    return gl.where(gl.abs(x) == float("inf"), x, gl.minimum(y, HIGHEST, propagate_nan=_ALL))


@gluon.aggregate
class Partials:
    """Workspace: outputs [slot, rows, cols] and log2 denominators [slot, rows], fp32."""

    o: gl.tensor
    lse: gl.tensor
    rows: gl.tensor  # rows of a slot
    cols: gl.constexpr

    @gluon.jit
    def store(self, slot, o, lse, column: gl.constexpr = 0, first=0):
        """Write a part: `o` [M, N], rows `first` and columns `column` and on; `lse` [M] in the layout of its rows,
        written with the first columns; rows past the slot's are dropped."""
        row = first + gl.arange(0, o.shape[0], lse.type.layout)
        col = column + gl.arange(0, o.shape[1], gl.SliceLayout(0, o.type.layout))
        at = slot.to(gl.int64) * self.rows + row
        if column == 0:
            gl.store(self.lse + at, lse, mask=row < self.rows)
        gl.store(self.o + (at * self.cols)[:, None] + col[None, :], o, mask=(row < self.rows)[:, None])


@gluon.aggregate
class EqualParts:
    """Rows with equally many parts: part i is in slot `first` + i · `step`."""

    first: gl.tensor
    step: gl.tensor
    splits: gl.tensor

    @gluon.jit
    def slot(self, split, invariant: gl.constexpr):
        """The slot of part `split`."""
        return split * self.step + self.first


@gluon.jit
def normalise(state, c):
    """(factor [M, 4], log2 denominator [M, 4]) of a softmax state; 0 and -inf for rows without a key."""
    l = gl.sum(state.l, 1, keep_dims=True) + gl.zeros_like(state.l)
    some = l != 0
    top = gl.minimum(exponent(state.m, c), HIGHEST)
    return gl.where(some, 1.0 / l, 0.0), gl.where(some, top + gl.log2(l), -float("inf"))


@gluon.jit
def with_sink(lse, sink):
    """(factor of the output, log2 denominator) after a logit `sink` (natural units) has joined the denominator."""
    sink = gl.maximum(in_base_2(sink, LOG2_E), LOWEST, propagate_nan=_ALL)
    top = gl.maximum(gl.maximum(lse, sink), LOWEST)
    total = top + gl.log2(gl.exp2(lse - top) + gl.exp2(sink - top))
    return gl.exp2(lse - total), gl.where(total == LOWEST, lse, total)


@gluon.jit
def combine_rows(
    partials, part, first_row, layout: gl.constexpr, block: gl.constexpr, invariant: gl.constexpr, column=0,
    width: gl.constexpr = None,
):  # fmt: skip
    """(o [rows, width], log2 denominator [rows]) of rows from `first_row` and columns from `column` on over all parts;
    `width` is all columns if None, `layout` that of a [block[0] parts, block[1] rows, width] tensor."""
    cols: gl.constexpr = partials.cols if width is None else width
    lse_layout: gl.constexpr = gl.SliceLayout(2, layout)
    row = first_row + gl.arange(0, block[1], gl.SliceLayout(0, lse_layout))
    col = column + gl.arange(0, cols, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    m = gl.full([block[1]], -float("inf"), gl.float32, gl.SliceLayout(0, lse_layout))
    l = gl.zeros_like(m)
    o = gl.zeros([block[1], cols], gl.float32, gl.SliceLayout(0, layout))
    for begin in range(0, part.splits, block[0]):
        split = begin + gl.arange(0, block[0], gl.SliceLayout(1, lse_layout))
        at = (part.slot(split, invariant).to(gl.int64) * partials.rows)[:, None] + row[None, :]
        there = (split < part.splits)[:, None] & (row < partials.rows)[None, :]
        lse = gl.load(partials.lse + at, mask=there, other=-float("inf"), cache_modifier=".cg")
        values = gl.load(
            partials.o + (at * partials.cols)[:, :, None] + col[None, None, :],
            mask=there[:, :, None], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        top = gl.maximum(m, gl.max(lse, 0))
        shift = gl.maximum(top, LOWEST)
        old = gl.exp2(m - shift)
        weight = gl.exp2(lse - shift[None, :])
        l = l * old + gl.sum(weight, 0)
        moved = gl.convert_layout(old, gl.SliceLayout(1, o.type.layout))
        o = o * moved[:, None] + gl.sum(values * weight[:, :, None], 0)
        m = top
    some = l != 0
    factor = gl.convert_layout(gl.where(some, 1.0 / l, 0.0), gl.SliceLayout(1, o.type.layout))
    total = gl.where(some, gl.maximum(m, LOWEST) + gl.log2(l), -float("inf"))
    return o * factor[:, None], gl.convert_layout(total, gl.SliceLayout(1, o.type.layout))


@gluon.constexpr_function
def combine_block(cols, most=32, warps=4):
    """(parts, rows) that so many warps combine at once, see `CombineTile`."""
    tile = CombineTile(cols, most, warps)
    return (tile.parts, tile.rows)


@gluon.constexpr_function
def combine_layout(cols, most=32, warps=4):
    """Registers of their [parts, rows, cols] partial outputs."""
    return parts_layout(CombineTile(cols, most, warps))


@gluon.constexpr_function
def parts_layout(tile):
    """Registers of the [parts, rows, cols] partial outputs of a `CombineTile`."""
    threads = [1, tile.rows_per_warp, tile.lanes_per_row]
    return gl.BlockedLayout([tile.parts, 1, COLUMNS_PER_LANE], threads, [1, tile.warps, 1], [2, 1, 0])
