"""The attention kernel of gfx942 and gfx950: four waves, one tile of rows, one loop over tiles of keys.

      Q in registers ─▶ S = Q·Kᵀ ─▶ score, mask ─▶ online softmax ─▶ O += P·V ─▶ O and LSE to DRAM
                          ▲ K                                          ▲ V
                          └───────────── feed: one of three kinds of buffers (feed.py) ─┘

Prefill and decode are this kernel with different configs: 32 x 32 MFMA, waves side by side along the rows; or 16 x 16
MFMA, waves along the keys, the heads of a group packed into the rows, and the keys shared out to partitions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..pieces.modifiers import Modifiers, exponent_scale
from ..pieces.span import tile_span
from .epilogue import store_output
from .feed import make_feed, visit_of
from .layouts import product_layout, scores_operand
from .softmax import softmax_start, softmax_step
from .work_tile import Shape, Tensors, element_rows, find_place, kv_sources, load_queries


@gluon.aggregate
class Context:
    """What every step of a workgroup can see."""

    tensors: Tensors
    shape: Shape
    mods: Modifiers  # its `keep` is None: see `keeps`
    scale: gl.tensor  # softmax scale, fp32
    keeps: gl.tuple  # (condition of an element, of a tile or None) of the mask, see `build.keep_functions`
    config: gl.constexpr
    traits: gl.constexpr


@gluon.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    indices,
    scale,
    strides,
    shape,
    mask_args,
    score_args,
    sinks_ptr,
    o_ptr,
    lse_ptr,
    config: gl.constexpr,
    functions: gl.constexpr,
    traits: gl.constexpr,
):
    """Attention forward. `strides`: see `Tensors`; `shape`: see `Shape`; `functions` is
    (conditions of the mask, span, score), see `build.keep_functions`.

    Grid: (tiles, partitions). With `traits.partial`, o and lse are workspace: [partitions * tiles, M, padded Dv] and
    [partitions * tiles, M], fp32.

    What is used after the loop comes last: the first arguments (14 scalars on gfx942, 8 on gfx950) are loaded before
    the kernel begins and held until their last use, all others are loaded where they are used.
    """
    tensors = Tensors(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, sinks_ptr, indices, strides)
    sizes = Shape(shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6])
    mods = Modifiers(None, functions[1], functions[2], mask_args, score_args)
    ctx = Context(tensors, sizes, mods, scale, functions[0], config, traits)
    place = find_place(tensors, sizes, config, traits)
    if place.rows.row < place.lengths.seq_q:
        attend(ctx, place)


@gluon.jit
def attend(ctx, place):
    """One tile of rows against its share of the keys."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = product_layout(config)
    q = load_queries(ctx.tensors, ctx.shape, place, scores_operand(config, 0), config)
    span = tile_span(ctx.mods.key_span(place.rows, place.lengths, config.block_m // config.pack), config.block_n)
    first, last = share_of_tiles(ctx, place, span.total)
    k_source, v_source = kv_sources(ctx.tensors, ctx.shape, place, ctx.traits)
    feed = make_feed(k_source, v_source, config)
    state = softmax_start(config.block_m, layout)
    o = gl.zeros([config.block_m, config.padded_v], gl.float32, layout)
    stage = feed.start(span, first)
    for i in range(first, last):
        visit = visit_of(span, i, place.lengths.seq_k, config)
        s, stage = feed.scores(q, visit, stage)
        s = visible_scores(ctx, s, place, visit.key, i < span.masked)
        state, p, alpha = softmax_step(state, s, exponent_scale(ctx))
        o, stage = feed.values(p, o * alpha[:, None], visit, stage)
    feed.finish()
    store_output(ctx, o, state, place, exponent_scale(ctx))


@gluon.jit
def share_of_tiles(ctx, place, total):
    """(first, last) of the tiles in a span that this workgroup visits; none without keys."""
    total = gl.where(place.lengths.seq_k > 0, total, 0)
    if ctx.traits.partial:
        each = (total + ctx.shape.partitions - 1) // ctx.shape.partitions
        first = gl.minimum(gl.program_id(1) * each, total)
        return first, gl.minimum(first + each, total)
    else:
        return gl.to_tensor(0), total


@gluon.jit
def visible_scores(ctx, s, place, key, masked):
    """Score function on the scores [M, N] from key `key` on and, if the tile is `masked`, the mask and the last key."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = product_layout(config)
    k = (key + gl.arange(0, config.block_n, gl.SliceLayout(0, layout)))[None, :]
    tile, q = element_rows(ctx.shape, place, config)
    if ctx.mods.score is not None:
        s = ctx.mods.apply_score(s, ctx.scale, tile, place.lengths, q, k)
    if masked:
        s = hide(ctx, s, tile, place, q, k, key, 0)
    return s


@gluon.jit
def hide(ctx, s, tile, place, q, k, key, i: gl.constexpr):
    """Scores with -inf where condition number `i` of the mask or a later one is not met, or no key is.

    A condition comes in the branch of the one before: paths that meet only at the end need no copies of the scores.
    """
    if i < len(ctx.keeps):
        s = hide_by(ctx, s, tile, place, q, k, i)
        if i + 1 < len(ctx.keeps) and ctx.keeps[i + 1][1] is None:
            s = hide(ctx, s, tile, place, q, k, key, i + 1)
        elif cuts(ctx, place, key, i + 1):
            s = hide(ctx, s, tile, place, q, k, key, i + 1)
        return s
    else:
        return gl.where(k < place.lengths.seq_k, s, -float("inf"))


@gluon.jit
def cuts(ctx, place, key, i: gl.constexpr):
    """Whether condition number `i` or a later one, or the last key, may hide elements of a tile."""
    if i < len(ctx.keeps):
        return cuts(ctx, place, key, i + 1) | (tile_meets(ctx, place, key, i) == 0)
    else:
        return key + ctx.config.block_n > place.lengths.seq_k


@gluon.jit
def tile_meets(ctx, place, key, i: gl.constexpr):
    """Whether all of a tile's elements meet condition number `i`."""
    lengths = place.lengths
    offset = lengths.seq_k - lengths.seq_q
    q_lo = place.rows.row + offset
    q_hi = q_lo + (ctx.config.block_m // ctx.config.pack - 1)
    k_hi = key + (ctx.config.block_n - 1)
    return ctx.keeps[i][1](place.rows.b, q_lo, q_hi, key, k_hi, lengths.seq_q, lengths.seq_k, ctx.mods.mask_args)


@gluon.jit
def hide_by(ctx, s, tile, place, q, k, i: gl.constexpr):
    """Scores with -inf where condition number `i` is not met. Without a branch of its own it is a minimum, because
    selections in a row would become one selection by all conditions again."""
    lengths = place.lengths
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

    Written with bits, which LLVM makes a comparison and its selection, element by element; all comparisons come first
    where the source has them first, and their results fill the scalar registers.
    """
    below = margin >> 31
    bits = s.to(gl.int32, bitcast=True)
    return ((bits & ~below) | (below & -0x800000)).to(gl.float32, bitcast=True)
