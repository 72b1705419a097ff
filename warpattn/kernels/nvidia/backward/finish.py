"""The kernel after the main one: writes dQ times the scale in q's dtype, and sums the gradients of sinks."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from .rows import LANES, ROWS, lane_layout, row_block, row_head, row_layout, strided_rows


@gluon.jit
def finish_kernel(dq, sums, dsinks, cu_q, scale, shape, config: gl.constexpr, has_sinks: gl.constexpr):
    """dq: `StridedRows`, written. sums: `Added`, read. dsinks: fp32 (heads_q,). shape: `RowShape`. Grid: as for
    `prepare_kernel`."""
    gdc_wait()
    layout: gl.constexpr = row_layout(config.padded)
    rows = row_block(shape, cu_q, config)
    col = gl.arange(0, config.padded, gl.SliceLayout(0, layout))
    inside = rows.there[:, None] & (col < config.dim_qk)[None, :]
    x = load_sum(sums, rows, col, inside, 0, shape, config)
    copies: gl.constexpr = config.dq_copies
    for copy in gl.static_range(1, copies):
        x += load_sum(sums, rows, col, inside, copy, shape, config)
    gl.store(strided_rows(dq, rows, col), (x * scale).to(dq.pointer.dtype.element_ty), mask=inside)
    if has_sinks:
        if (gl.program_id(0) == 0) & (row_head() < shape.heads_q):
            sum_sink(sums, dsinks, row_head(), shape, config)


@gluon.jit
def load_sum(sums, rows, col, inside, copy: gl.constexpr, shape, config: gl.constexpr):
    """Loads sum number `copy` of dQ; zeros where no CTA has added to the tile."""
    own = rows.own
    if config.counted:
        head = row_head() + copy * gl.num_programs(1)
        blocks: gl.constexpr = config.block_m // ROWS
        first = gl.program_id(0) // blocks * blocks
        inside = inside & (gl.load(sums.turns + head * gl.num_programs(0) + first) > 0)
        own = own + gl.to_tensor(copy).to(gl.int64) * gl.num_programs(1) * shape.padded_q
    return gl.load(sums.dq + (own * config.dim_qk)[:, None] + col[None, :], mask=inside, other=0.0)


@gluon.jit
def sum_sink(sums, dsinks, h, shape, config: gl.constexpr):
    """Writes the gradient of one head's sink: the sum of its rows' parts, always in the same order."""
    total = gl.zeros([LANES], gl.float32, lane_layout())
    parts = shape.padded_q // ROWS
    entries = 1 if config.ragged else shape.batch
    for b in range(entries):
        start = (gl.to_tensor(b).to(gl.int64) * shape.heads_q + h) * parts
        for i in range(0, parts, LANES):
            part = i + gl.arange(0, LANES, lane_layout())
            total += gl.load(sums.dsinks + start + part, mask=part < parts, other=0.0)
    gl.store(dsinks + h, gl.sum(total, 0))
