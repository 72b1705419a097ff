"""Output of one warpgroup: normalise O, store it by TMA through shared memory, write the LSE."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ...pieces.modifiers import exponent_scale
from ...pieces.softmax import rescale, softmax_finish
from ..layouts import element_type
from .packed_rows import row_heads, row_sinks, row_tokens


@gluon.jit
def store_output(ctx, o, softmax, tile, wg: gl.constexpr):
    """Write O [64, Dv] of `tile` and, with `has_lse`, LSE [64]; TMA clips rows and columns past the end."""
    config: gl.constexpr = ctx.config
    c = exponent_scale(ctx)
    sink = 0.0
    if ctx.has_sinks:
        sink = row_sinks(ctx.tensors.sinks, tile, softmax.m.type.layout, config)
    factor, lse = softmax_finish(softmax, c, sink, ctx.has_sinks)
    row = tile.row + wg * config.wg_tokens
    if ctx.has_lse:
        store_lse(ctx, lse, tile, row)
    store_columns(ctx, rescale(o, factor).to(element_type(config.element)), tile, row, wg)


@gluon.jit
def store_lse(ctx, lse, tile, row):
    """LSE [64, 4], equal along the second axis, to the tokens from `row` on of the tile's heads, with 64-bit
    offsets."""
    lse = gl.max(lse, 1)
    rows = row + row_tokens(lse.type.layout, ctx.config)
    start = ctx.work.lse_row(tile, row_heads(tile, lse.type.layout, ctx.config))
    gl.store(ctx.tensors.lse + start + rows, lse, mask=rows < ctx.work.lengths(tile).seq_q)


@gluon.jit
def store_columns(ctx, o, tile, row, wg: gl.constexpr):
    """O [64, Dv] through the staging tile, after TMA has read the tile's previous contents."""
    config: gl.constexpr = ctx.config
    smem = ctx.rings.out.index(wg)
    staging = smem.reshape([config.rows, config.store_cols])
    blocks: gl.constexpr = config.padded_v // config.store_cols
    if blocks == 1:
        tma.store_wait(0)
        staging.store(o)
        fence_async_shared()
        gl.barrier()
        ctx.tensors.store_output(tile, row, 0, smem)
    else:
        left, right = column_halves(o, config)
        tma.store_wait(0)
        staging.store(left)
        fence_async_shared()
        gl.barrier()
        ctx.tensors.store_output(tile, row, 0, smem)
        tma.store_wait(0)
        staging.store(right)
        fence_async_shared()
        gl.barrier()
        ctx.tensors.store_output(tile, row, config.store_cols, smem)


@gluon.jit
def column_halves(o, config: gl.constexpr):
    """Left and right half of the columns of O [64, Dv], without moving registers between threads."""
    halves = o.reshape([config.rows, 2, config.store_cols]).permute((0, 2, 1))
    return halves.split()
