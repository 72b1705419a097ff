"""Attention once more for a tile that met hidden values of NaN or infinity: key by key, each row what it sees.

P·V multiplies a hidden value by 0, and 0 times NaN is NaN, in every row of the tile. So the output is looked at once,
at the end; almost no tile needs it, so the code is short rather than fast. What the loop over key tiles keeps in
registers throughout, it would keep for this code, too. So the two share nothing: this one finds the workgroup's tile
anew, from arguments that are passed once more.

      O ──▶ all finite? ── yes ──▶ output
                └── no ──▶ the tile found anew ──▶ a few rows at a time, key by key ──▶ output
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..amd.kv_config import WAVE
from ..pieces.modifiers import exponent_scale
from .epilogue import store_output
from .scales import key_scale
from .softmax import RowState, softmax_step
from .visible import hide_by
from .work_tile import Tensors, find_work, keys_of, kv_sources, load_queries, score_rows, two_tensors

HELD = gl.constexpr(16)  # elements of queries, and of their output, in a lane; with 64 the code took twice the space
RUN = gl.constexpr(8)  # columns side by side in a lane


@gluon.jit
def nonfinite_rows(o, waves: gl.constexpr):
    """How many rows of O [M, Dv] hold NaN or infinity; each may be counted more than once. Every wave adds up all of
    them, a lane each: the compiler knows that a sum over all lanes is the same in each."""
    rows: gl.constexpr = o.shape[0]
    times: gl.constexpr = times_counted(rows)
    total = gl.sum(o, 1)
    spoiled = (total - total != 0).to(gl.int32)
    if times > 1:
        spoiled = (spoiled[:, None] + gl.zeros([rows, times], gl.int32, o.type.layout)).reshape([rows * times])
    return gl.sum(gl.convert_layout(spoiled, lanes_layout(rows, waves)), 0)


@gluon.constexpr_function
def times_counted(rows):
    """How often a row is counted, so that there is one for every lane."""
    return max(1, WAVE // rows)


@gluon.constexpr_function
def lanes_layout(rows, waves):
    """Rows in all lanes of each wave."""
    return gl.BlockedLayout([max(1, rows // WAVE)], [WAVE], [waves], [0])


@gluon.jit
def attend_again(ctx, spoiled):
    """The output of this workgroup's tile, with `nonfinite_rows`."""
    config: gl.constexpr = ctx.config
    zero = spoiled >> 16  # which the compiler does not know: so it keeps nothing of the workgroup's work
    ctx = apart(ctx, zero)
    work = find_work(ctx.tensors.indices, ctx.shape, gl.program_id(0) + zero, config, ctx.traits)
    count: gl.constexpr = rows_at_once(config)
    for first in range(0, gl.minimum(config.block_m, (work.lengths.seq_q - work.rows.row) * config.pack), count):
        attend_rows(ctx, work, first, count)


@gluon.jit
def apart(ctx, zero):
    """The context with the arguments that are passed once more, and with those of the mask plus `zero`."""
    again = ctx.again
    q, q_rope = two_tensors(again.q, ctx.traits.own_rope)
    k, k_rope = two_tensors(again.k, ctx.config.rope is not None)
    tensors = Tensors(q, k, again.v, again.o, again.lse, again.sinks, again.indices, again.strides, q_rope, k_rope)
    mods = gl.aggregate_replace(ctx.mods, mask_args=each_plus(ctx.mods.mask_args, zero))
    return gl.aggregate_replace(ctx, tensors=tensors, shape=again.shape, mods=mods)


@gluon.jit
def each_plus(args, zero):
    """Pointers, sizes and strides of captured tensors, each plus `zero`: what both the loop and this code computed from
    them would be kept in between."""
    found = ()
    for i in gl.static_range(len(args)):
        found += (args[i] + zero,)
    return found


@gluon.constexpr_function
def rows_at_once(config):
    """Rows of a tile that are in registers with their output."""
    return min(config.block_m, HELD.value * config.waves * WAVE // max(config.padded_qk, config.padded_v))


@gluon.constexpr_function
def rows_layout(config):
    """Registers of rows of Q and of O: a row in lanes of one wave."""
    lanes = min(WAVE, min(config.padded_qk, config.padded_v) // RUN.value)
    return gl.BlockedLayout([1, RUN.value], [WAVE // lanes, lanes], [config.waves, 1], [1, 0])


@gluon.jit
def attend_rows(ctx, work, first, count: gl.constexpr):
    """The output of `count` rows from row number `first` of a tile on."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = rows_layout(config)
    r = first + gl.arange(0, count, gl.SliceLayout(1, layout))
    q = load_queries(ctx.tensors, ctx.shape, work, r, config, ctx.traits)
    span, begin, end, keys = keys_of(ctx, work)
    sources = kv_sources(ctx.tensors, ctx.shape, work, ctx.scales, keys, config, ctx.traits)
    m = gl.full([count], -float("inf"), gl.float32, gl.SliceLayout(1, layout))
    state = RowState(m, gl.zeros_like(m))
    o = gl.zeros([count, config.padded_v], gl.float32, layout)
    columns = gl.arange(0, config.padded_v, gl.SliceLayout(0, layout))
    for i in range(begin, end):
        tile = span.key_tile(i) * config.block_n
        for key in range(tile, gl.minimum(tile + config.block_n, keys)):
            s, seen = score(ctx, work, r, q, sources, key)
            state, p, alpha = softmax_step(state, gl.where(seen, s, -float("inf")), exponent_scale(ctx))
            value = key_row(sources[1], key, columns, config.dim_v)
            value *= key_scale(ctx, work, sources[1], key, "v", columns)
            o = o * alpha[:, None]
            o = gl.where(seen, o + p * value[None, :], o)
    store_output(ctx, o, state, work, first)


@gluon.jit
def score(ctx, work, r, q, sources, key):
    """Scores [R, 1] of rows with a key, and whether they see it."""
    config: gl.constexpr = ctx.config
    tile, row = score_rows(ctx.shape, work, r, config)
    columns = gl.arange(0, config.padded_qk, gl.SliceLayout(0, q.type.layout))
    if config.rope is None:
        k = key_row(sources[0], key, columns, config.dim_qk)
    else:
        latent: gl.constexpr = config.dim_v
        k = key_row(sources[0], key, columns, latent)
        k += key_row(sources[2], key, columns - latent, config.dim_qk - latent)
    k *= key_scale(ctx, work, sources[0], key, "k", columns)
    s = gl.sum(q.to(gl.float32) * k[None, :], 1)[:, None]
    if ctx.mods.score is not None:
        s = ctx.mods.apply_score(s, ctx.scale, tile, work.lengths, row, key)
    mark = gl.zeros_like(s)
    for i in gl.static_range(len(ctx.keeps)):
        mark = hide_by(ctx, mark, tile, work, row, key, i)
    return s, mark == 0


@gluon.jit
def key_row(source, key, columns, dim: gl.constexpr):
    """`columns` of a key or a value, fp32; 0 for those that are not in 0 .. dim - 1."""
    base = source.base
    row = key
    if source.page_size > 0:
        base += gl.load(source.table + key // source.page_size).to(gl.int64) * source.page
        row = key % source.page_size
    inside = (columns >= 0) & (columns < dim)
    return gl.load(base + row.to(gl.int64) * source.row + columns, mask=inside, other=0.0).to(gl.float32)
