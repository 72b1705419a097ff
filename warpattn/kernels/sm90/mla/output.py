"""Where the results of latent attention go: whole heads to the output, parts to the workspace."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..decode.output import write_rows


@gluon.jit
def write_columns(ctx, o, lse, item, first, column: gl.constexpr):
    """Write columns of an item's rows, or of its part of them: `o` [M, N] normalised, rows `first` and columns `column`
    and on; `lse` [M] base 2 in the layout of its rows."""
    config: gl.constexpr = ctx.config
    part = item.part
    if part.splits == 1:
        write_rows(ctx, o, lse, item, first, column)
    else:
        number = part.number(gl.program_id(0), config.schedule.invariant)
        ctx.results.partials.store(part.slot(number, config.schedule.invariant), o, lse, column, first)
