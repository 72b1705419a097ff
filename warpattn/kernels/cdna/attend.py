"""One tile of rows against its keys: the loop over key tiles, and which scores are visible in each.

      Q in registers ─▶ S = Q·Kᵀ ─▶ score, mask ─▶ online softmax ─▶ O += P·V ─▶ O and LSE to DRAM
                          ▲ K                                          ▲ V
                          └───────────── feed: one of three kinds of buffers (feed.py) ─┘
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..pieces.modifiers import exponent_scale
from ..pieces.span import tile_span
from .epilogue import store_output
from .feed import make_feed, visit_of
from .layouts import product_layout, scores_operand
from .softmax import softmax_start, softmax_step
from .work_tile import kv_sources, load_queries, score_rows


@gluon.jit
def attend(ctx, work):
    """One tile of rows against its partition of the keys."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = product_layout(config)
    q = load_queries(ctx.tensors, ctx.shape, work, scores_operand(config, 0), config)
    keys = ctx.mods.key_span(work.rows, work.lengths, config.block_m // config.pack)
    span, end = tile_span(keys, config.block_n), gl.minimum(keys[3], work.lengths.seq_k)
    first, last = partition_of(ctx, gl.where(keys[0] < end, span.total, 0))
    k_source, v_source = kv_sources(ctx.tensors, ctx.shape, work, ctx.traits, end)
    feed = make_feed(k_source, v_source, config)
    state = softmax_start(config.block_m, layout)
    o = gl.zeros([config.block_m, config.padded_v], gl.float32, layout)
    stage = feed.start(span, first)
    for i in range(first, last):
        visit = visit_of(span, i, work.lengths.seq_k, config)
        s, stage = feed.scores(q, visit, stage)
        s = visible_scores(ctx, s, work, visit.key, i < span.masked)
        state, p, alpha = softmax_step(state, s, exponent_scale(ctx))
        o, stage = feed.values(p, o * alpha[:, None], visit, stage)
    feed.finish()
    store_output(ctx, o, state, work, exponent_scale(ctx))


@gluon.jit
def partition_of(ctx, total):
    """(first, last) of the `total` tiles that rows see of which this workgroup visits its share."""
    if ctx.traits.partial:
        each = (total + ctx.shape.partitions - 1) // ctx.shape.partitions
        first = gl.minimum(gl.program_id(1) * each, total)
        return first, gl.minimum(first + each, total)
    else:
        return gl.to_tensor(0), total


@gluon.jit
def visible_scores(ctx, s, work, key, masked):
    """Scores [M, N] from key `key` on after the score function and, in a `masked` tile, the mask and the last key."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = product_layout(config)
    k = (key + gl.arange(0, config.block_n, gl.SliceLayout(0, layout)))[None, :]
    tile, q = score_rows(ctx.shape, work, config)
    if ctx.mods.score is not None:
        s = ctx.mods.apply_score(s, ctx.scale, tile, work.lengths, q, k)
    if masked:
        s = hide(ctx, s, tile, work, q, k, key, 0)
    return s


@gluon.jit
def hide(ctx, s, tile, work, q, k, key, i: gl.constexpr):
    """Scores with -inf where condition number `i` of the mask or a later one is not met, and past the end of the keys.

    A condition is nested in the branch of the one before: paths that meet only at the end need no copies of the scores.
    """
    if i < len(ctx.keeps):
        s = hide_by(ctx, s, tile, work, q, k, i)
        if i + 1 < len(ctx.keeps) and ctx.keeps[i + 1][1] is None:
            s = hide(ctx, s, tile, work, q, k, key, i + 1)
        elif cuts(ctx, work, key, i + 1):
            s = hide(ctx, s, tile, work, q, k, key, i + 1)
        return s
    else:
        return gl.where(k < work.lengths.seq_k, s, -float("inf"))


@gluon.jit
def cuts(ctx, work, key, i: gl.constexpr):
    """Whether condition number `i` or a later one, or the last key, may hide elements of a tile."""
    if i < len(ctx.keeps):
        return cuts(ctx, work, key, i + 1) | (tile_meets(ctx, work, key, i) == 0)
    else:
        return key + ctx.config.block_n > work.lengths.seq_k


@gluon.jit
def tile_meets(ctx, work, key, i: gl.constexpr):
    """Whether all of a tile's elements meet condition number `i`."""
    lengths = work.lengths
    offset = lengths.seq_k - lengths.seq_q
    q_lo = work.rows.row + offset
    q_hi = q_lo + (ctx.config.block_m // ctx.config.pack - 1)
    k_hi = key + (ctx.config.block_n - 1)
    return ctx.keeps[i][1](work.rows.b, q_lo, q_hi, key, k_hi, lengths.seq_q, lengths.seq_k, ctx.mods.mask_args)


@gluon.jit
def hide_by(ctx, s, tile, work, q, k, i: gl.constexpr):
    """Scores with -inf where condition number `i` is not met. A condition without a branch of its own is a minimum,
    because LLVM would merge consecutive selections into one selection by all conditions."""
    lengths = work.lengths
    kept = gl.to_tensor(ctx.keeps[i][0](tile.b, tile.h, q, k, lengths.seq_q, lengths.seq_k, ctx.mods.mask_args))
    if kept.dtype == gl.int32:
        return hide_below(s, kept)
    elif ctx.keeps[i][1] is None and i + 1 < len(ctx.keeps):
        return gl.minimum(s, gl.where(kept, float("inf"), -float("inf")))
    else:
        return gl.where(kept, s, -float("inf"))


@gluon.jit
def hide_below(s, margin):
    """Scores with -inf where an int is below 0.

    Written with bits, which LLVM turns into a comparison and a selection, element by element. Written as comparisons,
    all of them come first, and their results fill the scalar registers.
    """
    below = margin >> 31
    bits = s.to(gl.int32, bitcast=True)
    return ((bits & ~below) | (below & -0x800000)).to(gl.float32, bitcast=True)
