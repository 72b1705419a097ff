"""Before the main kernel: what it needs of each query row, and zeros in dQ.

      delta = Σ dout · out - dlse       written as -delta, where the accumulator of dP begins
      shift = -lse · unit               where that of S begins: unit is 1 / scale, or 1 if a score function sees S first

Rows that saw nothing, and those past the last one, have a shift of -inf and so P = 0. A sink's gradient is summed in
parts, one a program, which the kernel after the main one adds up in their order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...pieces.softmax import LOG2_E
from . import config as sizes

ROWS = gl.constexpr(sizes.ROWS)


@gluon.constexpr_function
def row_layout(cols):
    """Registers of a [ROWS, cols] tile: 8 elements of a row a thread."""
    lanes = min(32, cols // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def strided_rows(x, b, h, row, col):
    """Pointers to [rows, cols] elements of a `StridedRows`."""
    start = (b.to(gl.int64) * x.outer + h * x.head) * 8
    return x.pointer + start + (row.to(gl.int64) * (x.row * 8))[:, None] + col[None, :]


@gluon.jit
def prepare_kernel(
    out, dout, statistics, made, unit, shape, config: gl.constexpr, has_dlse: gl.constexpr, has_sinks: gl.constexpr
):
    """out, dout: `StridedRows`. statistics: `Statistics`. made: `Prepared`. shape: `RowShape`. Grid: (blocks of ROWS
    rows of the padded length, query heads of the batch)."""
    layout: gl.constexpr = row_layout(config.padded)
    lane: gl.constexpr = gl.SliceLayout(1, layout)
    head = gl.program_id(1)
    b = head // shape.heads_q
    h = head - b * shape.heads_q
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, lane)
    col = gl.arange(0, config.padded, gl.SliceLayout(0, layout))
    there = row < shape.seq_q
    inside = there[:, None] & (col < config.dim_v)[None, :]
    o = gl.load(strided_rows(out, b, h, row, col), mask=inside, other=0.0).to(gl.float32)
    do = gl.load(strided_rows(dout, b, h, row, col), mask=inside, other=0.0).to(gl.float32)
    delta = gl.sum(o * do, 1)
    at = head.to(gl.int64) * shape.seq_q + row
    lse = gl.load(statistics.lse + at, mask=there, other=-float("inf"))
    if has_dlse:
        delta = delta - gl.load(statistics.dlse + at, mask=there, other=0.0)
    seen = lse > -float("inf")
    padded = head.to(gl.int64) * shape.padded_q + row
    gl.store(made.shift + padded, gl.where(seen, -lse * unit, -float("inf")))
    gl.store(made.delta + padded, -delta)
    if has_sinks:
        sink = gl.load(statistics.sinks + h)
        part = gl.where(seen, gl.exp2((sink - lse) * LOG2_E), 0.0) * delta
        gl.store(made.dsinks + head.to(gl.int64) * gl.num_programs(0) + gl.program_id(0), -gl.sum(part, 0))
    zero = gl.zeros([ROWS, config.padded], gl.float32, layout)
    inside = there[:, None] & (col < config.dim_qk)[None, :]
    gl.store(made.dq + (at * config.dim_qk)[:, None] + col[None, :], zero, mask=inside)
