"""Which scores of a tile are visible: the score function, the conditions of the mask, the end of the keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .layouts import product_layout
from .work_tile import score_rows, tile_rows


@gluon.jit
def visible_scores(ctx, s, work, key, masked):
    """Scores [M, N] from key `key` on after the score function and, in a `masked` tile, the mask and the last key."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = product_layout(config)
    k = (key + gl.arange(0, config.block_n, gl.SliceLayout(0, layout)))[None, :]
    tile, q = score_rows(ctx.shape, work, tile_rows(layout, config), config)
    return seen_scores(ctx, s, tile, work, q, k, key, masked)


@gluon.jit
def seen_scores(ctx, s, tile, work, q, k, key, masked):
    """The same of scores whose positions `q` and `k` broadcast to their shape; `key` is the first key."""
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
    all of them are computed first, and their results fill the scalar registers.
    """
    below = margin >> 31
    bits = s.to(gl.int32, bitcast=True)
    return ((bits & ~below) | (below & -0x800000)).to(gl.float32, bitcast=True)
