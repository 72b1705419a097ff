"""Epilogue of decode with swap-AB: transposes an item's result and stores it, to the output or as a part of a head.

The last CTA to finish delays the whole launch, so this code is kept short: it transposes once through shared memory,
keeps each row of the output in one warp, and finds the parts of a head at constant distances from one address.

      Oᵀ [Dv, R], sums of four warps, m [R]  ──▶ shared memory ──▶  o [4, Dv], l, m of rows, 4 columns a thread
      whole head ──▶ output         part ──▶ workspace, ticket + 1;  the CTA with the last ticket adds up the parts
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...pieces.combine import NO_KEY, combine_layout, parts_layout, tile_for, to_layout, unpacked
from ...pieces.modifiers import natural_scale
from ...pieces.softmax import LOG2_E, LOWEST, Denominator
from .output import combine_parts, draw_ticket, output_rows_at, publish_parts, write_at


@gluon.constexpr_function
def row_layout(cols):
    """Registers of a block of rows: each row in one warp, 4 columns a thread."""
    return gl.SliceLayout(0, combine_layout(cols))


@gluon.aggregate
class Exchange:
    """Shared memory in which an item's results are transposed, fp32."""

    o: gl.shared_memory_descriptor  # [R, Dv]
    l: gl.shared_memory_descriptor  # [4, R]: one row per warp
    m: gl.shared_memory_descriptor  # [1, R]


@gluon.jit
def make_exchange(config: gl.constexpr):
    """Allocates the `Exchange`."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    o = gl.allocate_shared_memory(gl.float32, [config.rows, config.padded_v], plain)
    l = gl.allocate_shared_memory(gl.float32, [4, config.rows], plain)
    return Exchange(o, l, gl.allocate_shared_memory(gl.float32, [1, config.rows], plain))


@gluon.jit
def finish_rows(ctx, state, item, exchange, targets):
    """Stores the result of an item; `targets`: those of `output_rows`."""
    config: gl.constexpr = ctx.config
    block: gl.constexpr = tile_for(config.padded_v).rows
    kept: gl.constexpr = config.kept_rows
    exchange.o.permute((1, 0)).store(state.o)
    exchange.l.store(gl.sum(state.l, 1))
    exchange.m.store(gl.expand_dims(state.m, 0))
    gl.barrier()
    publish_parts(ctx, item)
    if item.part.splits == 1:
        for first in gl.static_range(0, kept, block):
            o, denominator = exchanged_rows(ctx, exchange, first)
            write_at(ctx, o, denominator, targets[first // block])
    else:
        for first in gl.static_range(0, kept, block):
            o, denominator = exchanged_rows(ctx, exchange, first)
            store_part(ctx, o, denominator, item, first)
        if not config.combine.separate_kernel:
            if draw_ticket(ctx, item):
                combine_head(ctx, item, targets)


@gluon.jit
def output_rows(ctx, item):
    """The `OutputRows` of each block of an item's rows; computed early, while its keys arrive."""
    config: gl.constexpr = ctx.config
    block: gl.constexpr = tile_for(config.padded_v).rows
    kept: gl.constexpr = config.kept_rows
    row: gl.constexpr = gl.SliceLayout(1, row_layout(config.padded_v))
    targets = ()
    for first in gl.static_range(0, kept, block):
        block_rows = (output_rows_at(ctx, item, first + gl.arange(0, block, row)),)
        targets = targets + block_rows
    return targets


@gluon.jit
def exchanged_rows(ctx, exchange, first: gl.constexpr):
    """Rows from `first` on from shared memory: (normalised o [4, Dv], `Denominator` [4])."""
    config: gl.constexpr = ctx.config
    block: gl.constexpr = tile_for(config.padded_v).rows
    layout: gl.constexpr = row_layout(config.padded_v)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    l = gl.sum(exchange.l.slice(first, block, 1).load(gl.SliceLayout(2, combine_layout(config.padded_v, 4))), 0)
    m = gl.sum(exchange.m.slice(first, block, 1).load(gl.SliceLayout(2, combine_layout(config.padded_v, 1))), 0)
    l, m = gl.convert_layout(l, rows, True), gl.convert_layout(m, rows, True)
    o = exchange.o.slice(first, block, 0).load(layout)
    some = l != 0
    m = gl.where(some, m * natural_scale(ctx), LOWEST)
    return o * gl.where(some, reciprocal(l), 0.0)[:, None], Denominator(m, l)


@gluon.jit
def reciprocal(x):
    """1 / x for normal x, to within one unit in the last place."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def exp2(x):
    """2^x, approximate; subnormal results become 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def store_part(ctx, o, denominator, item, first: gl.constexpr):
    """Stores rows from `first` on of this part to its slot."""
    config: gl.constexpr = ctx.config
    partials = ctx.results.partials
    slot = item.part.slot(item.part.number()).to(gl.int64)
    row = first + gl.arange(0, o.shape[0], denominator.l.type.layout)
    col = gl.arange(0, config.padded_v, gl.SliceLayout(0, o.type.layout))
    gl.store(partials.denominators + slot * config.kept_rows + row, denominator.packed())
    at = partials.o + slot * (config.kept_rows * config.padded_v)
    gl.store(at + (row * config.padded_v)[:, None] + col[None, :], o)


@gluon.jit
def combine_head(ctx, item, targets):
    """Combines all parts of a head and stores the result."""
    config: gl.constexpr = ctx.config
    short: gl.constexpr = config.combine.short_parts
    block: gl.constexpr = tile_for(config.padded_v).rows
    kept: gl.constexpr = config.kept_rows
    if item.part.invariant or short == 0:
        combine_parts(ctx, item, 16)
    elif item.part.splits <= tile_for(config.padded_v, short).parts:  # fewer than `short` for wide values
        for first in gl.static_range(0, kept, block):
            o, denominator = combine_near(ctx, item.part, first)
            write_at(ctx, o, denominator, targets[first // block])
    else:
        combine_parts(ctx, item, 16)


@gluon.jit
def combine_near(ctx, part, first: gl.constexpr):
    """Combines all parts of a head for rows from `first` on: (o [4, Dv], `Denominator` [4]). There are at most
    `config.combine.short_parts`, all in registers at once. In a queue, slots of parts are two apart, except that the
    first part's slot is one before the second part's."""
    config: gl.constexpr = ctx.config
    partials = ctx.results.partials
    tile: gl.constexpr = tile_for(config.padded_v, config.combine.short_parts)
    layout: gl.constexpr = parts_layout(tile)
    part_layout: gl.constexpr = gl.SliceLayout(2, layout)
    split = gl.arange(0, tile.parts, gl.SliceLayout(1, part_layout))
    row = first + gl.arange(0, tile.rows, gl.SliceLayout(0, part_layout))[None, :]
    col = gl.arange(0, config.padded_v, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    count = part.queue.count
    slots = (2 * part.first_cta * count + part.queue.number).to(gl.int64) * config.kept_rows
    offset = ((2 * split + (split == 0).to(gl.int32)) * count * config.kept_rows)[:, None]
    there = (split < part.splits)[:, None]
    place = partials.denominators + slots + row + offset
    each = unpacked(gl.load(place, mask=there, other=NO_KEY, cache_modifier=".cg"))
    first_part = partials.o + slots * config.padded_v + (gl.expand_dims(row * config.padded_v, 2) + col)
    values = gl.load(
        first_part + gl.expand_dims(offset * config.padded_v, 2), mask=gl.expand_dims(there, 2), other=0.0,
        cache_modifier=".cg",
    )  # fmt: skip
    m = gl.max(each.m, 0)
    weight = exp2((each.m - m[None, :]) * LOG2_E) * each.l
    l = gl.sum(weight, 0)
    o = gl.sum(values * weight[:, :, None], 0)
    factor = gl.where(l != 0, reciprocal(l), 0.0)
    rows: gl.constexpr = row_layout(config.padded_v)
    row_of: gl.constexpr = gl.SliceLayout(1, rows)
    o = gl.convert_layout(o, rows, True) * gl.convert_layout(factor, row_of, True)[:, None]
    return o, to_layout(Denominator(m, l), row_of, True)
