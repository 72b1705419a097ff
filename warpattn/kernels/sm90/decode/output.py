"""Epilogue of Hopper's decode kernel: stores the output of whole heads, and partial outputs of split ones.

      part of a head:  partial ──▶ workspace, ticket + 1;  the CTA with the last ticket combines the parts

A ticket is an atomic add with acquire and release after all stores of the warpgroup, so the CTA with the last ticket
sees every part; it resets the ticket to 0 for the next launch. With many rows one CTA would take too long for this.
Then a second kernel (combine.py) combines the parts, a few rows per program. The CTA with a head's first part stores
how many parts there are and where, because computing that again takes longer than combining them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...pieces.combine import combine_rows, tile_for, to_layout, with_sink
from ...pieces.modifiers import natural_scale
from ...pieces.softmax import Denominator, rescale, softmax_finish
from ...pieces.stream_k import Part, Queue
from ..layouts import accumulator_layout, element_type
from .context import Rows, in_tile, rows_of
from .schedule import queue_count


@gluon.jit
def finish_item(ctx, o, softmax, item):
    """Normalises an item's O [64, Dv] by its softmax state and stores it."""
    config: gl.constexpr = ctx.config
    factor, denominator = softmax_finish(softmax, natural_scale(ctx))
    o = rescale(o, factor)
    write_item(ctx, o, by_row(denominator, accumulator_layout(config.padded_v)), item)


@gluon.jit
def by_row(denominator, layout: gl.constexpr):
    """A `Denominator` [M, 4] with equal columns as [M], in the row layout of a tensor [M, N] with `layout`."""
    each = Denominator(gl.max(denominator.m, 1), gl.max(denominator.l, 1))
    return to_layout(each, gl.SliceLayout(1, layout))


@gluon.jit
def write_item(ctx, o, denominator, item):
    """Stores an item's rows to the output, or its part of a split head to the workspace. `o` [M, Dv] is normalised,
    `denominator` [M] in its row layout."""
    config: gl.constexpr = ctx.config
    part = item.part
    publish_parts(ctx, item)
    if part.splits == 1:
        write_rows(ctx, o, denominator, item, gl.to_tensor(0))
    else:
        partials = ctx.results.partials
        partials.store(part.slot(part.number()), o, denominator)
        if not config.combine.separate_kernel:
            if draw_ticket(ctx, item):
                combine_item(ctx, item)


@gluon.jit
def publish_parts(ctx, item):
    """Stores a head's number of parts and their place in the workspace for the combining kernel, if there is one. The
    CTA with the first part does that, also for heads that are not split."""
    config: gl.constexpr = ctx.config
    if config.combine.separate_kernel:
        part = item.part
        if part.begin == 0:
            cell = ctx.results.heads + 2 * head_index(ctx, item.row_tile, part.head)
            gl.store(cell, part.splits)
            gl.store(cell + 1, part.head_start if part.invariant else part.first_cta)


@gluon.jit
def published_part(ctx, row_tile, head):
    """The first `Part` of a head, from what `publish_parts` has stored."""
    cell = ctx.results.heads + 2 * head_index(ctx, row_tile, head)
    place = gl.load(cell + 1)
    count = queue_count(ctx.work, ctx.config)
    tile = row_tile.row // ctx.config.rows
    queue = Queue(tile % count, count, place)
    splits = gl.load(cell)
    invariant: gl.constexpr = ctx.config.schedule.invariant
    return Part(head, gl.to_tensor(0), row_tile.units, place, splits, place, queue, invariant)


@gluon.jit
def draw_ticket(ctx, item):
    """Whether the stored part was its head's last: then this CTA sees all parts."""
    gl.barrier()
    ticket = ctx.results.tickets + head_index(ctx, item.row_tile, item.part.head)
    last = gl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == item.part.splits - 1
    if last:
        gl.store(ticket, 0)
    return last


@gluon.jit
def head_index(ctx, row_tile, head):
    """Index of a row tile's head in `tickets` and `heads`."""
    return (row_tile.b * ctx.work.tiles + row_tile.row // ctx.config.rows) * ctx.work.heads + head


@gluon.jit
def combine_item(ctx, item):
    """Combines all parts of a head and stores the result."""
    short: gl.constexpr = ctx.config.combine.short_parts
    if short == 0:
        combine_parts(ctx, item, 32)
    elif item.part.splits <= short:
        combine_parts(ctx, item, short)
    else:
        combine_parts(ctx, item, 32)


@gluon.jit
def combine_parts(ctx, item, most: gl.constexpr):
    """`combine_item`, reading at most `most` parts at a time."""
    config: gl.constexpr = ctx.config
    tile: gl.constexpr = tile_for(config.padded_v, most, config.attending_warps)
    rows = gl.minimum(item.row_tile.tokens * ctx.work.group - item.row_tile.row, config.rows)
    for first in range(0, rows, tile.rows):
        o, denominator = combine_rows(ctx.results.partials, item.part, first, tile, tile.rows)
        write_rows(ctx, o, denominator, item, first)


@gluon.jit
def write_rows(ctx, o, denominator, item, first, column=0):
    """Stores output and LSE of the item's rows from `first` on, see `write_at`."""
    row = first + gl.arange(0, o.shape[0], denominator.l.type.layout)
    write_at(ctx, o, denominator, output_rows_at(ctx, item, row), column)


@gluon.aggregate
class OutputRows:
    """Where rows of a tile are stored in the output."""

    rows: Rows
    there: gl.tensor  # bool [M]: whether the row is a query
    out: gl.tensor  # pointers [M] to the row's first column


@gluon.jit
def output_rows_at(ctx, item, row):
    """The `OutputRows` for row numbers `row` [M] of the item's tile."""
    rows = rows_of(ctx, item, row)
    there = in_tile(ctx, item, row)
    return OutputRows(rows, there, ctx.results.out.rows(rows.b, rows.query, rows.h))


@gluon.jit
def write_at(ctx, o, denominator, target, column=0):
    """Stores normalised `o` [M, N] to rows `target`, from `column` on, and, with column 0, the LSE of `denominator`
    [M]."""
    config: gl.constexpr = ctx.config
    rows = target.rows
    if ctx.has_sinks:
        sink = gl.load(ctx.results.sinks + rows.h, mask=target.there, other=0.0)
        factor, denominator = with_sink(denominator, sink)
        o = o * factor[:, None]
    if ctx.has_lse and column == 0:
        if config.schedule.ragged:
            row = rows.h.to(gl.int64) * ctx.work.total + rows.query
        else:
            row = (rows.b.to(gl.int64) * (ctx.work.heads * ctx.work.group) + rows.h) * ctx.work.tokens + rows.query
        gl.store(ctx.results.lse + row, denominator.lse(), mask=target.there)
    col = column + gl.arange(0, o.shape[1], gl.SliceLayout(0, o.type.layout))[None, :]
    at = target.out[:, None] + col
    gl.store(at, o.to(element_type(config.element)), mask=target.there[:, None] & (col < config.dim_v))


@gluon.jit
def write_columns(ctx, o, denominator, item, first, column: gl.constexpr):
    """Stores some columns of an item's rows to the output, or of its part to the workspace: normalised `o` [M, N], from
    row `first` and `column` on; `denominator` [M] in its row layout."""
    part = item.part
    if part.splits == 1:
        write_rows(ctx, o, denominator, item, first, column)
    else:
        ctx.results.partials.store(part.slot(part.number()), o, denominator, column, first)
