"""Attend warpgroup of the Blackwell kernel for wide heads: queries in, S to P, O out. A tile of scores is that of
latent attention (mla/attend.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared

from ..mla.attend import attend_tile
from ..mla.context import row_positions
from ..mla.epilogue import store_rows
from ..prefill_2q.softmax import row_state
from ..sync import await_signal, signal

ROWS_AT_ONCE = gl.constexpr(64)


@gluon.jit
def attend_role(ctx):
    """The run's key tiles, then the rows' output."""
    state = row_state(ctx.config.BM, gl.SliceLayout(1, ctx.memory.s.get_reg_layout()))
    total = ctx.run.total
    if total > 0:
        fetch_queries(ctx)
        signal(ctx.bars.q)
    for i in range(total):
        state = attend_tile(ctx, state, i)
    await_signal(ctx.bars.o, (total - 1) & 1, total > 0)
    store_rows(ctx, state)


@gluon.jit
def fetch_queries(ctx):
    """The rows' queries to shared memory; rows and columns past the end are 0."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    blocks: gl.constexpr = config.k_blocks
    count: gl.constexpr = config.BM
    for block in gl.static_range(blocks):
        for first in gl.static_range(0, count, ROWS_AT_ONCE):
            col = block * config.half + gl.arange(0, config.half, gl.SliceLayout(0, layout))[None, :]
            row = first + gl.arange(0, ROWS_AT_ONCE, gl.SliceLayout(1, layout))[:, None]
            rows = row_positions(ctx, row)
            to = ctx.memory.q.index(block).slice(first, ROWS_AT_ONCE)
            async_copy.async_load(
                to, ctx.q.at(rows.b, rows.token, rows.h) + col, mask=rows.exists & (col < config.dim_qk)
            )
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
