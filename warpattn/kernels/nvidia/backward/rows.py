"""The rows of a program in the kernels before and after the main one, in a dense batch or packed sequences.

In the kernels' own numbers sequences begin at multiples of PADDING, and a program takes ROWS rows, so that all
belong to one sequence. For packed sequences it finds that by counting how many begin before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import arguments as sizes
from .visits import padded_start

ROWS = gl.constexpr(sizes.ROWS)
LANES = gl.constexpr(sizes.LANES)


@gluon.aggregate
class RowBlock:
    """ROWS rows of a query head."""

    b: gl.tensor
    h: gl.tensor
    token: gl.tensor  # [ROWS] row in the tensors' batch entry, or in the packed tensor
    there: gl.tensor  # [ROWS] whether the sequence has the row
    given: gl.tensor  # [ROWS] int64, index in lse and dlse
    own: gl.tensor  # [ROWS] int64, row in the kernels' own numbers


@gluon.constexpr_function
def row_layout(cols):
    """Registers of a [ROWS, cols] tile: 8 elements of a row a thread."""
    lanes = min(32, cols // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def lane_layout():
    """One number a thread."""
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.jit
def row_head():
    """The head of this program, in descending order. So L2 holds data of the first heads when the main kernel begins,
    and after it `finish` begins with the last heads, whose dQ is still in L2."""
    return gl.num_programs(1) - 1 - gl.program_id(1)


@gluon.jit
def row_block(shape, cu_q, config: gl.constexpr):
    """The rows of this program; grid (blocks of ROWS padded rows, heads)."""
    lane: gl.constexpr = gl.SliceLayout(1, row_layout(config.padded))
    first = gl.program_id(0) * ROWS
    head = row_head()
    i = gl.arange(0, ROWS, lane)
    own = head.to(gl.int64) * shape.padded_q + first + i
    if config.ragged:
        b = sequence_at(first, shape.batch, cu_q)
        start = gl.load(cu_q + b)
        row = first - padded_start(start, b) + i
        there = row < gl.load(cu_q + b + 1) - start
        return RowBlock(b, head, start + row, there, head.to(gl.int64) * shape.seq_q + start + row, own)
    else:
        b = head // shape.heads_q
        row = first + i
        given = head.to(gl.int64) * shape.seq_q + row
        return RowBlock(b, head - b * shape.heads_q, row, row < shape.seq_q, given, own)


@gluon.jit
def sequence_at(row, batch, cu_q):
    """The sequence that padded row `row` belongs to."""
    before = gl.zeros([LANES], gl.int32, lane_layout())
    for i in range(0, batch, LANES):
        b = i + gl.arange(0, LANES, lane_layout())
        start = gl.load(cu_q + b, mask=b < batch, other=0)
        before += gl.where((b < batch) & (padded_start(start, b) <= row), 1, 0)
    return gl.sum(before, 0) - 1


@gluon.jit
def strided_rows(x, rows, col):
    """Pointers to [ROWS, cols] elements of a `StridedRows`."""
    start = (rows.b.to(gl.int64) * x.outer + rows.h * x.head) * 8
    return x.pointer + start + (rows.token.to(gl.int64) * (x.row * 8))[:, None] + col[None, :]
