"""After the main kernel: dQ times the scale in the dtype of q, and the gradients of sinks from their parts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import config as sizes
from .prepare import row_layout, strided_rows

ROWS = gl.constexpr(sizes.ROWS)
PARTS = gl.constexpr(sizes.SINK_PARTS)


@gluon.jit
def finish_kernel(dq, sums, dsinks, scale, shape, config: gl.constexpr, has_sinks: gl.constexpr):
    """dq: `StridedRows` to write. sums: `Added` to read. dsinks: fp32 (heads_q,). shape: `RowShape`. Grid: (blocks of
    ROWS rows, query heads of the batch)."""
    layout: gl.constexpr = row_layout(config.padded)
    head = gl.program_id(1)
    b = head // shape.heads_q
    h = head - b * shape.heads_q
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    col = gl.arange(0, config.padded, gl.SliceLayout(0, layout))
    inside = (row < shape.seq_q)[:, None] & (col < config.dim_qk)[None, :]
    at = (head.to(gl.int64) * shape.seq_q + row) * config.dim_qk
    x = gl.load(sums.dq + at[:, None] + col[None, :], mask=inside, other=0.0)
    pointers = strided_rows(dq, b, h, row, col)
    gl.store(pointers, (x * scale).to(dq.pointer.dtype.element_ty), mask=inside)
    if has_sinks:
        if (gl.program_id(0) == 0) & (b == 0):
            sum_sink(sums, dsinks, h, shape)


@gluon.jit
def sum_sink(sums, dsinks, h, shape):
    """The gradient of one head's sink: the parts of all its rows, always in the same order."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    total = gl.zeros([PARTS], gl.float32, lanes)
    parts = shape.padded_q // ROWS
    for b in range(shape.batch):
        start = (b.to(gl.int64) * shape.heads_q + h) * parts
        for i in range(0, parts, PARTS):
            part = i + gl.arange(0, PARTS, lanes)
            total += gl.load(sums.dsinks + start + part, mask=part < parts, other=0.0)
    gl.store(dsinks + h, gl.sum(total, 0))
