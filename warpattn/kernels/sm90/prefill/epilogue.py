"""Epilogue of a consumer warpgroup: normalises O, stores it by TMA through shared memory, writes the LSE.

With a mask, an output that is not finite may come from a hidden value; recompute.py computes such tiles again.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ...pieces.modifiers import natural_scale
from ...pieces.softmax import softmax_finish
from ..column_slices import column_blocks, columns_before, parts_from
from ..columns import as_matrices, rescale_columns
from ..exact_columns import stage_parts
from ..partial_rows import in_use
from .context import output_type
from .eight_bit.scales import scaled_factor
from .nonfinite import leave, nothing_seen, seen_in
from .packed_rows import row_heads, row_sinks, row_tokens


@gluon.jit
def store_output(ctx, o, softmax, tile, wg):
    """Stores O [64, Dv] of `tile`, given in parts, and, with `has_lse`, the LSE [64], or with split keys the packed
    denominator. TMA clips rows and columns past the end."""
    config: gl.constexpr = ctx.config
    factor, denominator = finish(ctx, softmax, tile)
    o = rescale_columns(o, scaled_factor(ctx, factor, tile))
    row = tile.row + wg * config.wg_tokens
    if ctx.has_lse:
        written = denominator.packed() if ctx.config.split else denominator.lse()
        store_numbers(ctx, written, tile, row)
    store_columns(ctx, rounded(o, output_type(config)), tile, wg)


@gluon.jit
def finish(ctx, softmax, tile):
    """(factor of O, `Denominator`) of a tile's rows, each [64, 4]. The combining kernel adds sinks of split keys."""
    joins: gl.constexpr = ctx.has_sinks and not ctx.config.split
    sink = 0.0
    if joins:
        sink = row_sinks(ctx.tensors.sinks, tile, softmax.m.type.layout, ctx.config)
    return softmax_finish(softmax, natural_scale(ctx), sink, joins)


@gluon.jit
def rounded(o, dtype: gl.constexpr):
    """Rounds every part of O to `dtype`."""
    parts = ()
    for part in gl.static_range(len(o)):
        parts += (o[part].to(dtype),)
    return parts


@gluon.jit
def store_numbers(ctx, numbers, tile, row):
    """Stores one number per row, given as [64, 4] with equal columns, for the tile's heads and tokens from `row` on."""
    numbers = gl.max(numbers, 1)
    token = row + row_tokens(numbers.type.layout, ctx.config)
    head = row_heads(tile, numbers.type.layout, ctx.config)
    rows = ctx.work.lse_rows(ctx.tensors.lse, tile, head, token)
    gl.store(rows, numbers, mask=in_use(token < ctx.work.lengths(tile).seq_q, ctx.config))


@gluon.jit
def store_columns(ctx, o, tile, wg):
    """Stores O [64, Dv] at once, or where shared memory is short one block of columns after the other. The first
    columns go last, because they hold the list link of a tile that recompute.py has to do (nonfinite.py)."""
    config: gl.constexpr = ctx.config
    row = tile.row + wg * config.wg_tokens
    seen = nothing_seen()
    if config.stores_whole:
        store_block(ctx, o, tile, row, 0, wg, seen)
    else:
        cols: gl.constexpr = config.store_parts[0]
        wide: gl.constexpr = parts_from(config.o_parts, cols)
        column = columns_before(config.o_parts, wide)
        if wide < len(o):
            seen = store_block(ctx, o[wide:], tile, row, column, wg, seen, False)
        for part in gl.static_range(wide - 1, -1, -1):
            blocks = column_blocks(o[part], cols)
            for i in gl.static_range(len(blocks) - 1, -1, -1):
                column -= cols
                seen = store_block(ctx, (blocks[i],), tile, row, column, wg, seen, part + i == 0)


@gluon.jit
def store_block(ctx, parts, tile, row, column, wg, seen, first: gl.constexpr = True):
    """Stores some columns of O through the staging tile, once TMA has read what it held. `first`: they
    include column 0. Returns `seen`, updated by these columns, see nonfinite.py."""
    config: gl.constexpr = ctx.config
    smem = ctx.rings.out.index(wg)
    staging = as_matrices(smem, config.rows, config.store_parts)
    tma.store_wait(0)
    if config.exact_values:
        stage_parts(staging, config.store_parts, parts)
    else:
        for part in gl.static_range(len(parts)):
            staging[part].store(parts[part])
    if ctx.mods.keep is not None:
        for part in gl.static_range(len(staging)):
            seen = seen_in(staging[part], seen)
        if first:
            place = gl.where(row < ctx.work.lengths(tile).seq_q, ctx.work.place(tile, config.tokens), -1)
            leave(ctx.rings.left.index(wg), place, staging[0], seen)
    fence_async_shared()
    gl.barrier()
    ctx.tensors.store_output(tile, row, column, smem)
    return seen
