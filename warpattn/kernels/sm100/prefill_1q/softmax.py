"""Softmax warpgroup of the 1Q kernel: the same 128 rows as the other one, over every other key tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..layouts import row_layout
from ..prefill_2q.softmax import row_state, softmax_tile
from ..sync import await_signal
from .epilogue import store_combined, store_nothing


@gluon.jit
def softmax_role(ctx, wg: gl.constexpr):
    """This warpgroup's key tiles, then its part of the output."""
    config: gl.constexpr = ctx.config
    if ctx.run.total > 0:
        mine = gl.aggregate_replace(ctx, run=ctx.run.every_other(wg))
        state = row_state(config.MMA_M, row_layout())
        for n in range(mine.run.total):
            state = softmax_tile(mine, state, n, wg)
        await_signal(ctx.bars.o_producer.index(wg), (mine.run.total - 1) & 1, mine.run.total > 0)
        store_combined(ctx, state, wg)
    else:
        if wg == 0 and config.splitk_partitions > 1:
            store_nothing(ctx)
