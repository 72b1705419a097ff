"""Computes rows again whose output is NaN because of a hidden latent; called at the end of an item.

P·V multiplies hidden latents by 0, and 0 times NaN or infinity is NaN. Only the output shows that: a hidden key's score
is always -inf, so a row whose LSE is a number has only finite scores, and a NaN in its output must come from a latent.
Testing latents in the loop over key tiles cost up to 13 % (H100, bench/notes.md 216). This tests the output once per
item and leaves the loops as they are.

The second pass reads everything from global memory again and multiplies without tensor cores, one row per warp. So it
needs no shared memory and no barrier, and works for 16 and 8 bits, pages of any size, with and without swap-AB. It is
slow, but runs only where a hidden latent is not finite:

      for W rows of queries, one a warp      for 4 keys      s = q · key,  p = exp2(s - m),  o += p · latent if seen
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...nvidia.opaque import hide_from_compiler
from ...pieces.combine import to_layout
from ...pieces.modifiers import natural_scale
from ...pieces.softmax import LOWEST, finish_rows
from ..decode.attend import visible_scores
from ..decode.context import Lens, in_tile, matrix, rows_of
from ..decode.load import in_cache, scale_place
from ..decode.output import write_columns
from ..exponents import exponent_step, exponents
from ..layouts import element_type

KEYS = gl.constexpr(4)  # keys at a time
SCALED = gl.constexpr(128)  # columns of 8-bit latents that may share a scale


@gluon.constexpr_function
def warp_rows(config, columns):
    """Registers of [W, KEYS, columns]: one query row per warp, whose lanes share the columns."""
    return gl.BlockedLayout([1, 1, columns // 32], [1, 1, 32], [config.attending_warps, 1, 1], [2, 1, 0])


@gluon.jit
def columns_of(column: gl.constexpr, cols: gl.constexpr, layout: gl.constexpr):
    """Column numbers from `column` on, hidden from the compiler. It would otherwise compute addresses before the loop
    over items, and keep them in registers or spill them across the loop over key tiles."""
    run: gl.constexpr = cols // 32
    return gl.max_contiguous(gl.multiple_of(hide_from_compiler(column) + gl.arange(0, cols, layout), run), run)


@gluon.jit
def owes_nan(marks, l):
    """Whether a row has a sum `l` that is not NaN, but `marks` (sums of 0 times its output's columns) other than 0."""
    some = (marks != 0) & (l == l)
    return gl.max(gl.max(some.to(gl.int32), 1), 0) != 0


@gluon.aggregate
class FewRows:
    """Query rows, one per warp."""

    number: gl.tensor  # [W, 1] row number in the item's tile
    latents: gl.tuple  # [W, 1, 256] of both halves, fp32
    rope: gl.tensor  # [W, 1, 64]


@gluon.aggregate
class FewOutputs:
    """The state of `FewRows`: softmax [W], and output [W, 256] for one half of the columns or both."""

    m: gl.tensor
    l: gl.tensor
    o: gl.tuple


@gluon.jit
def attend_again(ctx, item, half: gl.constexpr, halves: gl.constexpr):
    """Computes all rows of an item again and stores `halves` halves of the output's columns, from number `half` on."""
    config: gl.constexpr = ctx.config
    rows = gl.minimum(item.row_tile.tokens * ctx.work.group - item.row_tile.row, config.rows)
    for first in range(hide_from_compiler(0), rows, config.attending_warps):
        few = fetch_rows(ctx, item, first)
        state = no_keys(config, halves)
        for i in range(item.begin, item.end):
            for part in range(hide_from_compiler(0), config.block_n, KEYS):
                state = attend_keys(ctx, item, few, state, i, part, half)
        write_outputs(ctx, item, state, first, half)


@gluon.jit
def no_keys(config: gl.constexpr, halves: gl.constexpr):
    """The state before any key."""
    rows: gl.constexpr = config.attending_warps
    layout: gl.constexpr = warp_rows(config, config.half)
    l = gl.zeros([rows], gl.float32, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    o = ()
    for _ in gl.static_range(halves):
        o += (gl.zeros([rows, config.half], gl.float32, gl.SliceLayout(1, layout)),)
    return FewOutputs(gl.full_like(l, LOWEST), l, o)


@gluon.jit
def fetch_rows(ctx, item, first):
    """Loads query rows from `first` on of the item's tile."""
    config: gl.constexpr = ctx.config
    latents = ()
    for half in gl.static_range(2):
        latents += (query_columns(ctx, item, ctx.q.latent, first, half * config.half, config.half),)
    rope = query_columns(ctx, item, ctx.q.rope, first, ctx.q.rope_column, config.rope)
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, warp_rows(config, config.half)))
    return FewRows((first + gl.arange(0, config.attending_warps, layout))[:, None], latents, rope)


@gluon.jit
def query_columns(ctx, item, queries, first, column: gl.constexpr, cols: gl.constexpr):
    """Loads columns of queries [W, 1, cols] from `column` on; rows past the end are 0."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = gl.SliceLayout(1, warp_rows(config, cols))
    row = first + gl.arange(0, config.attending_warps, gl.SliceLayout(1, layout))
    col = columns_of(column, cols, gl.SliceLayout(0, layout))[None, :]
    rows = rows_of(ctx, item, row)
    there = in_tile(ctx, item, row)[:, None] & (col == col)
    at = queries.rows(rows.b, rows.query, rows.h)[:, None] + col
    return gl.load(at, mask=there, other=0.0).to(gl.float32).expand_dims(1)


@gluon.jit
def attend_keys(ctx, item, rows, state, i, part, half: gl.constexpr):
    """The state after `KEYS` more keys: those of tile number `i` from its key `part` on."""
    config: gl.constexpr = ctx.config
    first = item.key_tile(i) * config.block_n + part
    latent_rows, rotary_rows = rows_in_memory(ctx)
    latents = ()
    for each in gl.static_range(2):
        latents += (key_columns(ctx, item, latent_rows, first, each * config.half, config.half, True),)
    column: gl.constexpr = config.dim_v if config.latents is None else 0
    rope = key_columns(ctx, item, rotary_rows, first, column, config.rope, config.narrow_rope)
    s = gl.sum(rows.latents[0] * latents[0], 2) + gl.sum(rows.latents[1] * latents[1], 2)
    s += gl.convert_layout(gl.sum(rows.rope * rope, 2), s.type.layout, assert_trivial=True)
    key = part + gl.arange(0, KEYS, gl.SliceLayout(0, s.type.layout))[None, :]
    s = visible_scores(ctx, s, item, i, rows.number, key)
    m = gl.maximum(state.m, gl.max(s, 1))
    alpha = gl.exp2(exponent_step(ctx, state.m, m))
    p = gl.exp2(exponents(ctx, s, m[:, None]))
    seen = sees(ctx, item, rows.number, first - part + key)
    o = ()
    for at in gl.static_range(len(state.o)):
        weighted = gl.where(seen[:, :, None], p[:, :, None] * latents[half + at], 0.0)
        before = state.o[at]
        before = before * gl.convert_layout(alpha, gl.SliceLayout(1, before.type.layout), assert_trivial=True)[:, None]
        o += (before + gl.sum(weighted, 1),)
    return FewOutputs(m, state.l * alpha + gl.sum(p, 1), o)


@gluon.jit
def rows_in_memory(ctx):
    """(latents, rotary parts) as `StridedRows`."""
    if ctx.config.gathers:
        return ctx.keys.v, ctx.keys.k
    else:
        return ctx.keys.k.latents, ctx.keys.k.rope


@gluon.jit
def sees(ctx, item, row, key):
    """Whether rows [W, 1] of the item's tile see keys [1, N] of its sequence."""
    row_tile = item.row_tile
    rows = rows_of(ctx, item, row)
    q = rows.token + row_tile.length - row_tile.tokens
    return ctx.mods.keeps(rows, Lens(row_tile.tokens, row_tile.length), q, key, key)


@gluon.jit
def key_columns(ctx, item, source, first, column: gl.constexpr, cols: gl.constexpr, scaled: gl.constexpr):
    """Loads columns [1, KEYS, cols] of the keys from `first` on, from `column` on; 0 past the end. `scaled`: 8-bit ones
    are multiplied by their scales, and rounded as in the first pass."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = gl.SliceLayout(0, warp_rows(config, cols))
    key = first + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    col = columns_of(column, cols, gl.SliceLayout(0, layout))[None, :]
    there = (key < item.row_tile.length)[:, None] & (col == col)
    page, row = scale_place(ctx, item, key)
    page = in_cache(ctx, page)
    at = matrix(source).rows(page, row, item.part.head)[:, None] + col
    x = gl.load(at, mask=there, other=0.0).to(gl.float32)
    if config.latents is not None and scaled:
        x = gl.convert_layout(scaled_columns(ctx, item, x, page, row, column), x.type.layout, assert_trivial=True)
        if not config.swap_ab:
            x = x.to(element_type(config.element)).to(gl.float32)
    return x.expand_dims(0)


@gluon.jit
def scaled_columns(ctx, item, x, page, row, column: gl.constexpr):
    """Multiplies columns `x` [KEYS, cols] of keys, from `column` on, by their scales; `page`, `row`: [KEYS]."""
    of = ctx.keys.v
    width: gl.constexpr = min(x.shape[1], SCALED)
    blocks = x.reshape([KEYS, x.shape[1] // width, width])
    scales: gl.constexpr = gl.SliceLayout(2, blocks.type.layout)
    at = page.to(gl.int64) * of.outer + row.to(gl.int64) * of.row + item.part.head * of.head
    number = hide_from_compiler(column // SCALED) + gl.arange(0, blocks.shape[1], gl.SliceLayout(0, scales))
    at = gl.convert_layout(at, gl.SliceLayout(1, scales))[:, None] + (number * of.block)[None, :]
    return (blocks * gl.load(of.scale + at)[:, :, None]).reshape(x.shape)


@gluon.jit
def write_outputs(ctx, item, state, first, half: gl.constexpr):
    """Stores the rows from `first` on of the item's tile."""
    config: gl.constexpr = ctx.config
    factor, denominator = finish_rows(state.m, state.l, natural_scale(ctx), state.l != 0)
    rows: gl.constexpr = gl.SliceLayout(1, state.o[0].type.layout)
    factor = gl.convert_layout(factor, rows, assert_trivial=True)
    denominator = to_layout(denominator, rows, True)
    for at in gl.static_range(len(state.o)):
        write_columns(ctx, state.o[at] * factor[:, None], denominator, item, first, (half + at) * config.half)
