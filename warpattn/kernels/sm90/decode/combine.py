"""Adds up the parts of split heads after the Hopper decode kernel, a few rows a program.

For many rows a head (speculative decoding, latent attention): the last CTA of a head would read all parts of 64 rows
alone. Each program computes the partition again from the lengths; the decode kernel leaves its number of CTAs after the
tickets.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...pieces.combine import combine_block, combine_layout, combine_rows
from ...pieces.modifiers import Modifiers
from ...pieces.stream_k import Part, parts_of
from .context import Results, key_cache, make_results
from .output import write_rows
from .schedule import (
    WorkItem,
    block_units,
    padded_block,
    partition_block,
    partition_blocks,
    partition_uniform,
    row_tile_at,
)


@gluon.aggregate
class CombineContext:
    """The part of a `DecodeContext` that `write_rows` reads."""

    results: Results
    work: gl.tuple  # DecodeShape
    config: gl.constexpr
    has_sinks: gl.constexpr
    has_lse: gl.constexpr


@gluon.jit
def publish_grid(tickets, work):
    """Leave the number of CTAs for the combining kernel."""
    if gl.program_id(0) == 0:
        gl.store(tickets + work.batch * work.tiles * work.heads, gl.num_programs(0))


@gluon.jit
def decode_combine_kernel(
    out, keys, workspace, lse_ptr, sinks_ptr, shape, mask_args,
    config: gl.constexpr, functions: gl.constexpr, has_sinks: gl.constexpr, has_lse: gl.constexpr,
):  # fmt: skip
    """Arguments as in `decode_kernel`. Grid: (row tiles * key heads, blocks of rows, blocks of columns)."""
    mods = Modifiers(functions.keep, functions.span, functions.score, mask_args, mask_args)
    stored = key_cache(keys, keys, keys)
    results = make_results(out, lse_ptr, sinks_ptr, workspace, config)
    ctx = CombineContext(results, shape, config, has_sinks, has_lse)
    number = gl.program_id(0) // shape.heads
    head = gl.program_id(0) - number * shape.heads
    row_tile = row_tile_at(number, stored, shape, mods, config)
    ctas = gl.load(workspace.tickets + shape.batch * shape.tiles * shape.heads)
    stream_k, start = row_tile_start(number, ctas, stored, shape, mods, config)
    padded_units = row_tile.units + stream_k.head_overhead
    head_start = start + head * padded_units
    splits, owner = parts_of(head_start, row_tile.units, stream_k, config.schedule.invariant)
    width: gl.constexpr = config.combine_columns
    layout: gl.constexpr = combine_layout(width)
    block: gl.constexpr = combine_block(width)
    row = gl.program_id(1) * block[1]
    rows = gl.minimum(row_tile.tokens * shape.group - row_tile.row, config.rows)
    if (splits > 1) & (row < rows):
        part = Part(head, gl.to_tensor(0), row_tile.units, head_start, splits, owner)
        column = 0 if width == config.padded_v else gl.program_id(2) * width
        invariant: gl.constexpr = config.schedule.invariant
        o, lse = combine_rows(results.partials, part, row, layout, block, invariant, column, width)
        item = WorkItem(row_tile, part, padded_units, gl.to_tensor(0), row_tile.span.total, False)
        write_rows(ctx, o, lse, item, row, column)


@gluon.jit
def row_tile_start(number, ctas, keys, work, mods, config: gl.constexpr):
    """(partition over `ctas` CTAs, first unit of row tile `number`)."""
    sums: gl.constexpr = config.schedule.sums
    if sums is None:
        units, stream_k = partition_uniform(ctas, keys, work, mods, config)
        return stream_k, (units + stream_k.head_overhead) * work.heads * number
    elif sums.once:
        units = block_units(0, keys, work, mods, config)
        stream_k = partition_block(units, ctas, work, config)
        return stream_k, padded_before(number, gl.to_tensor(0), units, stream_k, work)
    else:
        stream_k = partition_blocks(ctas, keys, work, mods, config)
        start = gl.to_tensor(0)
        for begin in range(0, work.batch * work.tiles, sums.width):
            units = block_units(begin, keys, work, mods, config)
            start += padded_before(number, begin, units, stream_k, work)
        return stream_k, start


@gluon.jit
def padded_before(number, begin, units, stream_k, work):
    """Units in the queue of the row tiles of a block from `begin` on that precede row tile `number`."""
    index = begin + gl.arange(0, units.shape[0], units.type.layout)
    return gl.sum(gl.where(index < number, padded_block(units, stream_k.head_overhead, work), 0), 0)
