"""Output of the 1Q kernel: the softmax warpgroups combine their accumulators and write columns in turn.

Each ends with an accumulator, a reference maximum and a sum of its own. They put maximum and sum where S was, read the
other's, and divide the columns of the output between them:

      m0, l0, O0 ─┐            m = max(m0, m1)     f = 2^(m - m*)
                  ├── combine  l = f0·l0 + f1·l1                      ─▶ (f0·O0 + f1·O1) / l
      m1, l1, O1 ─┘

With one key tile there is no O1 to add. A partition of a split sends the result on in fp32 with its denominator.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, fma2, mul2, tma

from ...nvidia.clipped_rows import stacked
from ...pieces.modifiers import exponent_scale
from ...pieces.softmax import LOWEST, Denominator, exponent, row_scale
from ..exp2 import row_sum
from ..layouts import box_layout, element_type, query_box, row_layout
from ..prefill_2q.context import row_positions
from ..prefill_2q.epilogue import finish, finish_stores, load_sink, no_values, store_block
from ..sync import await_signal, signal


@gluon.jit
def store_combined(ctx, state, wg: gl.constexpr):
    """Combines both warpgroups and stores this one's columns of the output; warpgroup 0 stores the LSE."""
    config: gl.constexpr = ctx.config
    if 1 - wg < writers(config):
        put_rows(row_slot(ctx, wg, 0), state.m)
        put_rows(row_slot(ctx, wg, 1), state.l)
        signal(ctx.bars.combine.index(wg))
    if wg < writers(config):
        await_signal(ctx.bars.combine.index(1 - wg), 0)
        m_other = get_rows(row_slot(ctx, 1 - wg, 0))
        l_other = get_rows(row_slot(ctx, 1 - wg, 1))
        c = exponent_scale(ctx)
        m = gl.maximum(state.m, m_other)
        x = row_scale(m, c)
        own = gl.exp2(exponent(state.m, x) - exponent(m, x))
        other = gl.exp2(exponent(m_other, x) - exponent(m, x))
        rows = gl.arange(0, config.MMA_M, row_layout())
        sink = load_sink(ctx, row_positions(ctx, rows, wg)[1])
        factor, denominator = finish(ctx, m, state.l * own + l_other * other, sink, ctx.work.kv_head)
        if wg == 0:
            store_denominator(ctx, rows, denominator)
            store_output(ctx, own * factor, other * factor, wg)
        else:
            store_output(ctx, other * factor, own * factor, wg)


@gluon.jit
def store_nothing(ctx):
    """The result of a partition without keys: a denominator of 0, and zeros. A path of its own, because LLVM spilled
    when it was joined with the other one (128 bytes of stack at head dim 128)."""
    config: gl.constexpr = ctx.config
    cols: gl.constexpr = config.store_columns
    zero = gl.zeros([config.MMA_M], gl.float32, row_layout())
    store_denominator(ctx, gl.arange(0, config.MMA_M, row_layout()), Denominator(zero + LOWEST, zero))
    slot = staging(ctx).index(0)
    layout: gl.constexpr = ctx.memory.o.index(0).slice(0, cols).get_reg_layout()
    store_block(ctx, gl.zeros([config.MMA_M, cols], element_type(config.written), layout), slot, ctx.tile.row, 0)
    for i in gl.static_range(1, config.padded_ov_depth // cols):
        ctx.tensors.o.store(ctx.tile.row, ctx.tile.h, i * cols, slot)
    tma.store_wait(0)


@gluon.jit
def store_denominator(ctx, rows, denominator):
    """Stores the LSE by head, or a part's denominator by query."""
    config: gl.constexpr = ctx.config
    if ctx.traits.has_lse:
        queries, heads = row_positions(ctx, rows, 0)
        if config.splitk_partitions > 1:
            row = queries.to(gl.int64) * ctx.work.heads_q + heads
            written = denominator.packed()
        else:
            row = heads.to(gl.int64) * ctx.tensors.lse_stride + queries
            written = denominator.lse()
        gl.store(ctx.tensors.lse + row, written, mask=queries < ctx.work.seq_q)


@gluon.jit
def store_output(ctx, f0, f1, wg: gl.constexpr):
    """Stores f0 · O0 + f1 · O1 (`f0`, `f1` [128]), in blocks of 128 bytes a row through the shared memory of Q, by TMA.

    Blocks and the slots that they pass through take turns between the warpgroups; with a single slot, warpgroup 0
    writes all blocks."""
    config: gl.constexpr = ctx.config
    cols: gl.constexpr = config.store_columns
    slots: gl.constexpr = config.out_slots
    turns: gl.constexpr = writers(config)
    total = no_values(ctx)
    for i in gl.static_range(config.padded_ov_depth // cols):
        if i % turns == wg:
            if i >= slots:
                tma.store_wait(0)
                gl.barrier()
            values = output_block(ctx, f0, f1, i, cols)
            if ctx.recomputes:
                total += row_sum(values)
            values = values.to(element_type(config.written))
            store_block(ctx, values, staging(ctx).index(i % slots), ctx.tile.row, i * cols)
    finish_stores(ctx, total, wg)


@gluon.jit
def staging(ctx):
    """The shared memory of Q as blocks of the output."""
    config: gl.constexpr = ctx.config
    box: gl.constexpr = query_box(config, config.store_columns)
    dtype: gl.constexpr = element_type(config.written)
    return ctx.memory.q.reinterpret(dtype, stacked(config.out_slots, box), box_layout(box, dtype))


@gluon.jit
def output_block(ctx, f0, f1, i: gl.constexpr, cols: gl.constexpr):
    """Columns i · cols … of the combined output [128, cols]; after a single key tile nothing is in O1."""
    layout: gl.constexpr = ctx.memory.o.index(0).slice(i * cols, cols).get_reg_layout()
    values = mul2(ctx.memory.o.index(0).slice(i * cols, cols).load(layout), column(f0, layout))
    if ctx.run.total > 1:
        values = fma2(ctx.memory.o.index(1).slice(i * cols, cols).load(layout), column(f1, layout), values)
    return values


@gluon.jit
def column(rows, layout: gl.constexpr):
    """One value a row [128] as a column of a tile."""
    return gl.convert_layout(rows, gl.SliceLayout(1, layout), assert_trivial=True)[:, None]


@gluon.jit
def row_slot(ctx, wg: gl.constexpr, which: gl.constexpr):
    """A column of tensor memory over a warpgroup's S, which is free."""
    slot = ctx.memory.s.index(wg).slice(which, 1)
    return slot.reinterpret(gl.float32, [ctx.config.MMA_M, 1], TensorMemoryLayout([128, 1], 1))


@gluon.jit
def put_rows(slot, rows):
    layout: gl.constexpr = slot.get_reg_layout()
    slot.store(column(rows, layout))


@gluon.jit
def get_rows(slot):
    values = slot.load(slot.get_reg_layout())
    return gl.convert_layout(gl.max(values, 1), row_layout(), assert_trivial=True)


@gluon.constexpr_function
def writers(config):
    """Warpgroups that store the output: one if Q's memory holds one block."""
    return 2 if config.out_slots > 1 else 1
