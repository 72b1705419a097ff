"""Output of one query tile: O from tensor memory, normalised, through the shared memory of its queries, by TMA; LSE.

The queries have been read when the last P·V is complete. O goes out in blocks of 64 columns, one swizzle atom each; TMA
drops the rows past the end of the sequence and the columns past the head dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mul2, tma

from ...pieces.softmax import exponent, finish_rows
from ..layouts import STORE_COLUMNS, box_layout, element_type, query_box, row_layout, stacked
from .context import row_place


@gluon.jit
def store_output(ctx, m, l, c, wg: gl.constexpr):
    """Write O [128, Dv] and, if asked for, LSE [128] of rows with reference `m` and sum `l`."""
    rows = gl.arange(0, ctx.config.BM_q, row_layout())
    queries, heads = row_place(ctx, rows, wg)
    sink = 0.0
    if ctx.has_sinks:
        sink = gl.load(ctx.tensors.sinks + heads)
    factor, lse = finish(m, l, c, sink, ctx.has_sinks)
    if ctx.has_lse:
        row = heads.to(gl.int64) * ctx.tensors.lse_stride + queries
        gl.store(ctx.tensors.lse + row, lse, mask=queries < ctx.work.seq_q)
    store_blocks(ctx, factor, wg)


@gluon.jit
def finish(m, l, c, sink, has_sink: gl.constexpr):
    """(factor, lse) of each row: what O is multiplied by, and the natural log of the row's whole denominator.

    In rows without any key `l` is not 0 where `exp2_polynomial` made some of its terms.
    """
    some = m > -float("inf")
    mc = exponent(m, c)
    return finish_rows(mc, l, some, sink, has_sink, True)


@gluon.jit
def store_blocks(ctx, factor, wg: gl.constexpr):
    """O times `factor` [128] to global memory, 64 columns at a time."""
    config: gl.constexpr = ctx.config
    dtype: gl.constexpr = element_type(config.dtype)
    box: gl.constexpr = query_box(config, STORE_COLUMNS)
    slots: gl.constexpr = config.padded_qk_depth // STORE_COLUMNS
    staging = ctx.memory.q.index(wg).reinterpret(dtype, stacked(slots, box), box_layout(box, dtype))
    row = ctx.tile.row + wg * (config.BM_eff // 2)
    for i in gl.static_range(config.padded_ov_depth // STORE_COLUMNS):
        values = ctx.memory.o.index(wg).slice(i * STORE_COLUMNS, STORE_COLUMNS).load()
        scale = gl.convert_layout(factor, gl.SliceLayout(1, values.type.layout), assert_trivial=True)
        values = mul2(values, scale[:, None]).to(dtype)
        if i >= slots:
            tma.store_wait(0)
            gl.barrier()
        block = staging.index(i % slots)
        block.reshape([config.BM_q, STORE_COLUMNS]).store(values)
        fence_async_shared()
        gl.barrier()
        ctx.tensors.o.store(row, ctx.tile.h, i * STORE_COLUMNS, block)
    tma.store_wait(0)
