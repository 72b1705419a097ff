"""Adds up the parts of split heads after the Hopper decode kernel, a few rows a program.

For many rows a head (speculative decoding): the last CTA of a head would read all parts of 64 rows alone. The shares
are computed once more from the lengths; how many CTAs the decode kernel ran with stands behind its tickets.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..pieces.apply import Modifiers
from ..pieces.combine import Partials, combine_block, combine_layout, combine_rows
from ..pieces.split import Part, parts_of, share_out
from .decode_context import Grid, Item, Keys, Matrix, Results, block_units, describe
from .decode_output import write_rows


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
    """Arguments as in `decode_kernel`. Grid: (entries * key heads, blocks of rows)."""
    work = Grid(shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], shape[7])
    mods = Modifiers(functions[0], functions[1], functions[2], mask_args, mask_args)
    stored = Keys(keys, keys, keys[0], keys[1], keys[2])
    partials = Partials(workspace[0], workspace[1], workspace[2], config.padded_v)
    results = Results(Matrix(out[0], out[1], out[2], out[3]), lse_ptr, sinks_ptr, partials, workspace[3])
    ctx = CombineContext(results, work, config, has_sinks, has_lse)
    number = gl.program_id(0) // work.heads
    head = gl.program_id(0) - number * work.heads
    entry = describe(number, stored, work, mods, config)
    before, total = units_around(number, entry, stored, work, mods, config)
    programs = gl.load(workspace[3] + work.batch * work.tiles * work.heads)
    first = before + head * entry.room
    splits, owner = parts_of(first, entry.units, share_out(total, programs), config.invariant)
    layout: gl.constexpr = combine_layout(config.padded_v)
    block: gl.constexpr = combine_block(config.padded_v)
    row = gl.program_id(1) * block[1]
    rows = gl.minimum(work.tokens * work.group - entry.row, config.rows)
    if (splits > 1) & (row < rows):
        part = Part(head, gl.to_tensor(0), entry.units, first, splits, owner)
        o, lse = combine_rows(partials, part, row, layout, block, config.invariant)
        write_rows(ctx, o, lse, Item(entry, part, gl.to_tensor(0), entry.span.total), row)


@gluon.jit
def units_around(number, entry, keys, work, mods, config: gl.constexpr):
    """(units before entry `number`, units of all entries)."""
    entries = work.batch * work.tiles
    if config.uniform:
        units = entry.room * work.heads
        return units * number, units * entries
    else:
        before = gl.to_tensor(0)
        total = gl.to_tensor(0)
        for begin in range(0, entries, config.plan_width):
            units = block_units(begin, entries, keys, work, mods, config)
            index = begin + gl.arange(0, config.plan_width, units.type.layout)
            before += gl.sum(gl.where(index < number, units, 0), 0)
            total += gl.sum(units, 0)
        return before, total
