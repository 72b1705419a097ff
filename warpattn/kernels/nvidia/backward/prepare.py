"""The kernel before the main one: computes two numbers per query row; zeroes dQ, or the counters of its tiles.

      delta = Σ dout · out - dlse       stored as -delta: the initial accumulator of dP
      shift = -lse · unit               initial accumulator of S; unit: 1 / scale, or 1 if a score function sees S first

Rows that saw no key, and rows past the last one, get a shift of -inf, so P = 0. If delta is not finite, it is stored as
0 and the shift as NaN: P is then NaN where such a row sees a key, and 0 elsewhere. Each program also sums its part of a
sink's gradient; the kernel after the main one adds the parts in order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents

from ...pieces.softmax import LOG2_E
from .rows import ROWS, row_block, row_head, row_layout, strided_rows


@gluon.jit
def prepare_kernel(
    out, dout, statistics, made, cu_q, unit, shape,
    config: gl.constexpr, has_dlse: gl.constexpr, has_sinks: gl.constexpr,
):  # fmt: skip
    """out, dout: `StridedRows`. statistics: `Statistics`. made: `Prepared`. shape: `RowShape`. Grid: (blocks of ROWS
    padded rows, heads of the kernels' own numbers)."""
    gdc_launch_dependents()
    layout: gl.constexpr = row_layout(config.padded)
    rows = row_block(shape, cu_q, config)
    col = gl.arange(0, config.padded, gl.SliceLayout(0, layout))
    inside = rows.there[:, None] & (col < config.dim_v)[None, :]
    o = gl.load(strided_rows(out, rows, col), mask=inside, other=0.0).to(gl.float32)
    do = gl.load(strided_rows(dout, rows, col), mask=inside, other=0.0).to(gl.float32)
    delta = gl.sum(o * do, 1)
    lse = gl.load(statistics.lse + rows.given, mask=rows.there, other=-float("inf"))
    if has_dlse:
        delta = delta - gl.load(statistics.dlse + rows.given, mask=rows.there, other=0.0)
    seen = lse != -float("inf")
    finite = delta - delta == 0
    shift = gl.where(finite, -lse * unit, float("nan"))
    gl.store(made.shift + rows.own, gl.where(seen, shift, -float("inf")))
    gl.store(made.delta + rows.own, gl.where(finite, -delta, 0.0))
    if has_sinks:
        sink = gl.load(statistics.sinks + rows.h)
        part = gl.where(seen, gl.exp2((sink - lse) * LOG2_E), 0.0) * delta
        at = row_head().to(gl.int64) * gl.num_programs(0) + gl.program_id(0)
        gl.store(made.dsinks + at, -gl.sum(part, 0))
    if config.counted:
        copies: gl.constexpr = config.dq_copies
        for copy in gl.static_range(copies):
            head = row_head() + copy * gl.num_programs(1)
            gl.store(made.turns + head * gl.num_programs(0) + gl.program_id(0), 0)
    else:
        zero = gl.zeros([ROWS, config.padded], gl.float32, layout)
        at = made.dq + (rows.own * config.dim_qk)[:, None] + col[None, :]
        gl.store(at, zero, mask=(col < config.dim_qk)[None, :])
