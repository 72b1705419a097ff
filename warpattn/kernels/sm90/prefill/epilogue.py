"""Output of one warpgroup: normalise O, store it by TMA through shared memory, write the LSE.

Under a mask, an output that is not finite may be due to a hidden value: recompute.py looks at it later.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ...pieces.combine import normalise
from ...pieces.modifiers import exponent_scale
from ...pieces.softmax import softmax_finish
from ..columns import as_matrices, rescale_columns
from .context import output_type
from .eight_bit.scales import scaled_factor
from .nonfinite import leave, nonfinite_of, report
from .packed_rows import row_heads, row_sinks, row_tokens


@gluon.jit
def store_output(ctx, o, softmax, tile, wg: gl.constexpr, left):
    """Write O [64, Dv] of `tile`, in parts, and, with `has_lse`, LSE [64]; TMA clips rows and columns past the end.
    Returns the place of the tile that the warpgroup has left to recompute.py last, before this one `left`."""
    config: gl.constexpr = ctx.config
    factor, lse = finish(ctx, softmax, tile)
    o = rescale_columns(o, scaled_factor(ctx, factor, tile))
    row = tile.row + wg * config.wg_tokens
    if ctx.has_lse:
        store_lse(ctx, lse, tile, row)
    nonfinite = None
    if recomputes(config, ctx.mods.keep, len(ctx.mods.mask_args)):
        nonfinite = nonfinite_of(o)
    return store_columns(ctx, rounded(o, output_type(config)), tile, wg, nonfinite, left)


@gluon.constexpr_function
def recomputes(config, keep, tensors):
    """Whether tiles may be left to recompute.py: where the mask `keep` reads `tensors`, and where looking costs
    nothing. A mask of indices alone hides keys from some rows that others see: too little to pay for elsewhere."""
    return (config.recomputes and tensors > 0) or (config.recomputes_freely and keep is not None)


@gluon.jit
def finish(ctx, softmax, tile):
    """(factor of O, LSE) [64, 4] of a tile's rows: with sinks and natural, or of a part of the keys, base 2."""
    c = exponent_scale(ctx)
    if ctx.config.split:
        return normalise(softmax, c)
    else:
        sink = 0.0
        if ctx.has_sinks:
            sink = row_sinks(ctx.tensors.sinks, tile, softmax.m.type.layout, ctx.config)
        return softmax_finish(softmax, c, sink, ctx.has_sinks)


@gluon.jit
def rounded(o, dtype: gl.constexpr):
    """Every part of O as `dtype`."""
    parts = ()
    for part in gl.static_range(len(o)):
        parts += (o[part].to(dtype),)
    return parts


@gluon.jit
def store_lse(ctx, lse, tile, row):
    """LSE [64, 4], equal along the second axis, to the tokens from `row` on of the tile's heads, with 64-bit
    offsets."""
    lse = gl.max(lse, 1)
    token = row + row_tokens(lse.type.layout, ctx.config)
    head = row_heads(tile, lse.type.layout, ctx.config)
    rows = ctx.work.lse_rows(ctx.tensors.lse, tile, head, token)
    gl.store(rows, lse, mask=token < ctx.work.lengths(tile).seq_q)


@gluon.jit
def store_columns(ctx, o, tile, wg: gl.constexpr, nonfinite, left):
    """O [64, Dv]: all parts at once, or where shared memory is short one block of columns after the other. Returns as
    `store_output`; `nonfinite` is None unless tiles may be left."""
    config: gl.constexpr = ctx.config
    row = tile.row + wg * config.wg_tokens
    if len(config.store_parts) == len(o) and config.store_parts[0] == config.v_parts[0]:
        left = store_block(ctx, o, tile, row, 0, wg, nonfinite, left)
    else:
        column = 0
        for part in gl.static_range(len(o)):
            blocks = column_blocks(o[part], config.store_parts[0])
            for i in gl.static_range(len(blocks)):
                if part + i == 0:
                    left = store_block(ctx, (blocks[i],), tile, row, column, wg, nonfinite, left)
                else:
                    store_block(ctx, (blocks[i],), tile, row, column, wg, None, left)
                column += config.store_parts[0]
    return left


@gluon.jit
def store_block(ctx, parts, tile, row, column, wg: gl.constexpr, nonfinite, left):
    """Some columns of O through the staging tile, after TMA has read the tile's previous contents. Returns as
    `store_columns`."""
    config: gl.constexpr = ctx.config
    smem = ctx.rings.out.index(wg)
    staging = as_matrices(smem, config.rows, config.store_parts)
    tma.store_wait(0)
    for part in gl.static_range(len(parts)):
        staging[part].store(parts[part])
    if nonfinite is not None:
        report(ctx.rings.left.index(config.consumers + wg), nonfinite, ctx.work.place(tile, config.tokens))
    fence_async_shared()
    gl.barrier()
    if nonfinite is not None:
        there = row < ctx.work.lengths(tile).seq_q
        place = ctx.work.place(tile, config.tokens)
        left = leave(left, ctx.rings.left.index(config.consumers + wg), place, there, smem[0])
    ctx.tensors.store_output(tile, row, column, smem)
    return left


@gluon.jit
def column_blocks(o, cols: gl.constexpr):
    """O [64, columns] as blocks of `cols` columns, without moving registers between threads."""
    blocks = (o,)
    for _ in gl.static_range(doublings(o.shape[1], cols)):
        halves = ()
        for i in gl.static_range(len(blocks)):
            halves += blocks[i].reshape([o.shape[0], 2, blocks[i].shape[1] // 2]).permute((0, 2, 1)).split()
        blocks = halves
    return blocks


@gluon.constexpr_function
def doublings(columns, cols):
    """How often `cols` doubles up to `columns`."""
    return (columns // cols).bit_length() - 1
