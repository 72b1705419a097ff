"""Output of one query tile: O from tensor memory, normalised, through the shared memory of its queries, by TMA; LSE.

The queries have been read when the last P·V is complete. O goes out in blocks of columns, a swizzle atom a row; TMA
drops the rows past the end of the sequence and the columns past the head dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mul2, tma

from ...nvidia.clipped_rows import stacked
from ...pieces.modifiers import exponent_scale, natural_scale
from ...pieces.scales import has_scale, output_scale
from ...pieces.softmax import LN_2, finish_rows
from ..exp2 import row_sum
from ..layouts import box_layout, element_type, halved_rows, query_box, row_layout
from ..sync import any_greater_of_role
from .context import row_positions

STORES_BARRIER = gl.constexpr(13)  # the first of two hardware barriers, one for each warpgroup's vote on its stores


@gluon.jit
def store_output(ctx, state, wg: gl.constexpr):
    """Write O [rows, Dv] and, where the traits say so, LSE [rows] of rows in their last softmax state."""
    rows = gl.arange(0, ctx.config.MMA_M, state.m.type.layout)
    queries, heads = row_positions(ctx, rows, wg)
    factor, denominator = finish(ctx, state.m, state.l, load_sink(ctx, heads), ctx.work.kv_head)
    if ctx.traits.has_lse:
        row = heads.to(gl.int64) * ctx.tensors.lse_stride + queries
        gl.store(ctx.tensors.lse + row, denominator.lse(), mask=queries < ctx.work.seq_q)
    store_blocks(ctx, factor, wg)


@gluon.jit
def load_sink(ctx, heads):
    """The sinks of query heads; 0 without sinks."""
    if ctx.traits.has_sinks:
        return gl.load(ctx.tensors.sinks + heads)
    else:
        return 0.0


@gluon.jit
def finish(ctx, m, l, sink, head):
    """(factor of O, `Denominator`) of rows with reference maximum `m` and sum `l` over keys of a `head`; a `sink` joins
    the sum once."""
    # `l` does not say: without a key it is above 0, since the polynomial's 2^-inf is 2^-126
    some = (m != -float("inf")) | (l != l)
    factor, denominator = finish_rows(m, l, scale_of_exponents(ctx), some, sink, ctx.traits.has_sinks)
    if has_scale(ctx.config, "v", "tensor", "head"):
        factor = factor * output_scale(ctx.scales, head, ctx.config)
    return factor, denominator


@gluon.jit
def scale_of_exponents(ctx):
    """`natural_scale`, of 16-bit products from what their loop holds: one register more would be spilled. Loops of
    8-bit products hold other numbers."""
    if ctx.config.eight_bit is None:
        return exponent_scale(ctx) * LN_2
    else:
        return natural_scale(ctx)


@gluon.jit
def store_blocks(ctx, factor, wg: gl.constexpr):
    """O times `factor` [rows] to global memory, block by block of columns."""
    config: gl.constexpr = ctx.config
    cols: gl.constexpr = config.store_columns
    slots: gl.constexpr = config.out_slots
    row = ctx.tile.row + wg * config.wg_queries
    total = no_values(ctx)
    for i in gl.static_range(config.padded_ov_depth // cols):
        values = ctx.memory.o.index(wg).slice(i * cols, cols).load()
        scale = gl.convert_layout(factor, gl.SliceLayout(1, values.type.layout), assert_trivial=True)
        values = mul2(values, scale[:, None])
        if ctx.recomputes:
            total += row_sum(values)
        values = values.to(element_type(config.written))
        if i >= slots:
            tma.store_wait(slots - 1)
            gl.barrier()
        store_block(ctx, values, output_slot(ctx, wg, i % slots), row, i * cols)
    finish_stores(ctx, total, wg)


@gluon.jit
def no_values(ctx):
    """The sum of no values of each row; one number where no tile is attended to again."""
    if ctx.recomputes:
        return gl.zeros([ctx.config.MMA_M], gl.float32, row_layout())
    else:
        return gl.to_tensor(0.0)


@gluon.jit
def finish_stores(ctx, total, wg: gl.constexpr):
    """Wait for the warpgroup's stores; `total` [rows]: sums of what it has written, which recompute.py looks at."""
    if ctx.recomputes:
        nonfinite = total - total
        ctx.memory.scales.index(wg).store(nonfinite)
        # One thread has started the stores and can wait for them, whichever warp has the rows.
        if any_greater_of_role(gl.where(nonfinite == 0.0, 0.0, 1.0), gl.zeros_like(nonfinite), STORES_BARRIER + wg):
            tma.store_wait(0, read_only=False)  # before others write the same rows
    tma.store_wait(0)


@gluon.jit
def store_block(ctx, values, slot, row, column: gl.constexpr):
    """A block of the output [rows, columns] through a slot of shared memory, by TMA."""
    slot.reshape(values.shape).store(values)
    fence_async_shared()
    gl.barrier()
    ctx.tensors.o.store(row, ctx.tile.h, column, slot)


@gluon.jit
def output_slot(ctx, wg: gl.constexpr, i: gl.constexpr):
    """Shared memory of a query tile for a block of the output, number `i`."""
    config: gl.constexpr = ctx.config
    dtype: gl.constexpr = element_type(config.written)
    box: gl.constexpr = query_box(config, config.store_columns)
    slots: gl.constexpr = config.out_slots // config.num_qk_stages
    chunk = ctx.memory.q.index(wg * config.num_qk_stages + i // slots)
    if slots == 1 and chunk.dtype == dtype:
        return chunk
    else:
        return chunk.reinterpret(dtype, stacked(slots, box), box_layout(box, dtype, halved_rows(config))).index(
            i % slots
        )
