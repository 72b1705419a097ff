"""Adds up the parts of split heads after the Hopper decode kernel, a few rows a program.

For many rows a head (speculative decoding): the last CTA of a head would read all parts of 64 rows alone. The shares
are computed once more from the lengths; how many CTAs the decode kernel ran with stands behind its tickets.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...pieces.combine import Partials, combine_block, combine_layout, combine_rows
from ...pieces.modifiers import Modifiers
from ...pieces.stream_k import Part, parts_of
from .context import (
    Grid,
    Item,
    Keys,
    Matrix,
    Results,
    block_room,
    block_units,
    describe,
    grid_of,
    share_block,
    share_blocks,
    share_uniform,
)
from .output import write_rows


@gluon.aggregate
class CombineContext:
    """What `write_rows` reads of a kernel's context."""

    results: Results
    work: Grid
    config: gl.constexpr
    has_sinks: gl.constexpr
    has_lse: gl.constexpr


@gluon.jit
def leave_programs(tickets, work):
    """Write the number of CTAs where the combining kernel finds it."""
    if gl.program_id(0) == 0:
        gl.store(tickets + work.batch * work.tiles * work.heads, gl.num_programs(0))


@gluon.jit
def decode_combine_kernel(
    out,
    keys,
    workspace,
    lse_ptr,
    sinks_ptr,
    shape,
    mask_args,
    config: gl.constexpr,
    functions: gl.constexpr,
    has_sinks: gl.constexpr,
    has_lse: gl.constexpr,
):
    """Arguments as in `decode_kernel`. Grid: (entries * key heads, blocks of rows, blocks of columns)."""
    work = grid_of(shape)
    mods = Modifiers(functions[0], functions[1], functions[2], mask_args, mask_args)
    stored = Keys(keys, keys, keys[0], keys[1], keys[2], False)
    partials = Partials(workspace[0], workspace[1], workspace[2], config.padded_v)
    results = Results(Matrix(out[0], out[1], out[2], out[3]), lse_ptr, sinks_ptr, partials, workspace[3])
    ctx = CombineContext(results, work, config, has_sinks, has_lse)
    number = gl.program_id(0) // work.heads
    head = gl.program_id(0) - number * work.heads
    entry = describe(number, stored, work, mods, config)
    programs = gl.load(workspace[3] + work.batch * work.tiles * work.heads)
    shares, before = share_before(number, programs, stored, work, mods, config)
    room = entry.units + shares.price
    first = before + head * room
    splits, owner = parts_of(first, entry.units, shares, config.invariant)
    width: gl.constexpr = config.combine_cols
    layout: gl.constexpr = combine_layout(width)
    block: gl.constexpr = combine_block(width)
    row = gl.program_id(1) * block[1]
    rows = gl.minimum(work.tokens * work.group - entry.row, config.rows)
    if (splits > 1) & (row < rows):
        part = Part(head, gl.to_tensor(0), entry.units, first, splits, owner)
        column = 0 if width == config.padded_v else gl.program_id(2) * width
        o, lse = combine_rows(partials, part, row, layout, block, config.invariant, column, width)
        write_rows(ctx, o, lse, Item(entry, part, room, gl.to_tensor(0), entry.span.total, False), row, column)


@gluon.jit
def share_before(number, programs, keys, work, mods, config: gl.constexpr):
    """(shares over `programs` CTAs, units before entry `number`)."""
    if config.uniform:
        units, shares = share_uniform(programs, keys, work, mods, config)
        return shares, (units + shares.price) * work.heads * number
    elif config.plan_once:
        units = block_units(0, keys, work, mods, config)
        shares = share_block(units, programs, work, config)
        return shares, room_before(number, gl.to_tensor(0), units, shares, work)
    else:
        shares = share_blocks(programs, keys, work, mods, config)
        before = gl.to_tensor(0)
        for begin in range(0, work.batch * work.tiles, config.plan_width):
            before += room_before(number, begin, block_units(begin, keys, work, mods, config), shares, work)
        return shares, before


@gluon.jit
def room_before(number, begin, units, shares, work):
    """Units in the line of the entries of a block from `begin` on that come before entry `number`."""
    index = begin + gl.arange(0, units.shape[0], units.type.layout)
    return gl.sum(gl.where(index < number, block_room(units, shares.price, work), 0), 0)
