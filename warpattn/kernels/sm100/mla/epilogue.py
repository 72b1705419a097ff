"""Output of latent attention on Blackwell: O from tensor memory, normalised, to the output or the workspace; LSE."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import add2

from ..layouts import STORE_COLUMNS
from ..prefill_2q.epilogue import finish
from .context import row_positions


@gluon.jit
def store_rows(ctx, state, sums: gl.constexpr):
    """Output and LSE of the rows; a partition of a split leaves the output in fp32 and the denominator. With
    `sums` returns each row's sum [BM]."""
    split: gl.constexpr = ctx.config.splitk_partitions > 1
    rows = row_positions(ctx, gl.arange(0, ctx.config.BM, state.m.type.layout))
    sink = 0.0
    if ctx.traits.has_sinks:
        sink = gl.load(ctx.sinks + rows.h, mask=rows.exists, other=0.0)
    factor, denominator = finish(ctx, state.m, state.l, sink, ctx.rows.kv_head)
    if ctx.traits.has_lse:
        written = denominator.packed() if split else denominator.lse()
        gl.store(ctx.lse.at(ctx.out_batch, rows.token, rows.h), written, mask=rows.exists)
    cols: gl.constexpr = ctx.config.padded_ov_depth if split else ctx.config.dim_v
    layout: gl.constexpr = ctx.memory.o.slice(0, STORE_COLUMNS).get_reg_layout()
    total = gl.zeros([ctx.config.BM, STORE_COLUMNS], gl.float32, layout)
    for col in gl.static_range(0, cols, STORE_COLUMNS):
        o = store_columns(ctx, factor, col)
        if sums:
            total = add2(total, o)
    if sums:
        return gl.convert_layout(gl.sum(total, 1), factor.type.layout)
    else:
        return None


@gluon.jit
def store_columns(ctx, factor, col: gl.constexpr):
    """Columns `col` and on of O times `factor` [64]; zeros where there was no key tile. Returns them."""
    block = ctx.memory.o.slice(col, STORE_COLUMNS)
    layout: gl.constexpr = block.get_reg_layout()
    rows = row_positions(ctx, gl.arange(0, ctx.config.BM, gl.SliceLayout(1, layout))[:, None])
    factor = gl.convert_layout(factor, gl.SliceLayout(1, layout))[:, None]
    o = gl.zeros([ctx.config.BM, STORE_COLUMNS], gl.float32, layout) + factor  # without a key 0, or NaN as its sink
    if ctx.run.total > 0:
        o = block.load() * factor
    cols = col + gl.arange(0, STORE_COLUMNS, gl.SliceLayout(0, layout))[None, :]
    at = ctx.out.at(ctx.out_batch, rows.token, rows.h) + cols
    there = rows.exists
    if ctx.config.dim_v % STORE_COLUMNS > 0 and ctx.config.splitk_partitions == 1:
        there = there & (cols < ctx.config.dim_v)
    gl.store(at, o.to(ctx.out.pointer.dtype.element_ty), mask=there)
    return o
