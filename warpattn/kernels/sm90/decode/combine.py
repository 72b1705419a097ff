"""The kernel that combines partial outputs of split heads after Hopper's decode kernel, a few rows per program.

It is for heads with many rows (speculative decoding, latent attention), where a head's last CTA would have to read
all parts of 64 rows alone. The decode kernel stores how many parts each head has and where they are, so a program whose
head was not split ends after one load. Many parts are divided among warps; with few parts, a lane has several rows; so
each lane has about 16 loads in flight. The launch overlaps the end of the preceding one (PDL).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from ...pieces.combine import combine_rows
from ...pieces.modifiers import modifiers
from .context import Results, key_cache, make_results
from .output import published_part, write_rows
from .schedule import WorkItem, row_tile_of


@gluon.aggregate
class CombineContext:
    """The fields of a `DecodeContext` that `write_rows` reads."""

    results: Results
    work: gl.tuple  # DecodeShape
    config: gl.constexpr
    has_sinks: gl.constexpr
    has_lse: gl.constexpr


@gluon.jit
def decode_combine_kernel(
    out, keys, workspace, lse_ptr, sinks_ptr, shape, mask_args,
    config: gl.constexpr, tile: gl.constexpr, functions: gl.constexpr, has_sinks: gl.constexpr, has_lse: gl.constexpr,
):  # fmt: skip
    """Arguments as in `decode_kernel`; tile: `CombineTile`. Grid: (row tiles * key
    heads, programs that share the rows of a head, blocks of columns)."""
    gdc_wait()
    mods = modifiers(functions, mask_args, mask_args)
    stored = key_cache(keys, keys, keys)
    results = make_results(out, lse_ptr, sinks_ptr, workspace, config)
    ctx = CombineContext(results, shape, config, has_sinks, has_lse)
    number = gl.program_id(0) // shape.heads
    head = gl.program_id(0) - number * shape.heads
    b, of_sequence = number, gl.to_tensor(0)
    if not config.schedule.one_row_tile:
        b = number // shape.tiles
        of_sequence = number - b * shape.tiles
    row_tile = row_tile_of(number, b, of_sequence, stored, shape, mods, config)
    part = published_part(ctx, row_tile, head)
    if (part.splits > 1) & (row_tile.units > 0):  # without units, no CTA has stored `part`
        rows = gl.minimum(row_tile.tokens * shape.group - row_tile.row, config.rows)
        item = WorkItem(row_tile, part, row_tile.units, gl.to_tensor(0), row_tile.span.total, False)
        column = 0 if tile.cols == config.padded_v else gl.program_id(2) * tile.cols
        for row in range(gl.program_id(1) * tile.rows, rows, gl.num_programs(1) * tile.rows):
            o, denominator = combine_rows(results.partials, part, row, tile, tile.rows, column)
            write_rows(ctx, o, denominator, item, row, column)
