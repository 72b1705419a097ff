"""Masks and scores inside a kernel: their compiled index functions, and how kernels call them.

`Modifiers` carries the functions that `codegen` generated from a mask and a score, with their captured tensors. Query
indices are positions in key coordinates (row + len_k - len_q), as everywhere in the project.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .softmax import LOG2_E


@gluon.aggregate
class Modifiers:
    keep: gl.constexpr  # keep(b, h, q, k, len_q, len_k, args) -> bool, or None: every key in range is visible
    hides_newer: gl.constexpr  # whether keep hides every key after the query's own, so all keys past the end
    span: gl.constexpr  # span(b, h, q_lo, q_hi, len_q, len_k, args) -> (first, full_lo, full_hi, last)
    score: gl.constexpr  # a ScoreFunction of (s, b, h, q, k, len_q, len_k, args), or None
    mask_args: gl.tuple
    score_args: gl.tuple

    @gluon.jit
    def key_span(self, tile, work, block_m: gl.constexpr):
        """Key interval of the `block_m` rows of a tile."""
        offset = work.seq_k - work.seq_q
        q_lo = tile.row + offset
        q_hi = gl.minimum(tile.row + block_m, work.seq_q) - 1 + offset
        return self.span(tile.b, tile.h, q_lo, q_hi, work.seq_q, work.seq_k, self.mask_args)

    @gluon.jit
    def visible_scores(self, s, scale, tile, work, q, k, masked):
        """Scores after the score function and, if `masked`, with hidden keys and those past the end at -inf."""
        if self.score is not None:
            s = self.apply_score(s, scale, tile, work, q, k)
        if masked:
            s = self.apply_mask(s, tile, work, q, k)
            s = gl.where(k < work.seq_k, s, -float("inf"))
        return s

    @gluon.jit
    def apply_score(self, s, scale, tile, work, q, k):
        """Scores after the score function, natural times 1 / `after`; `s` [M, N] unscaled products, which it returns
        if there is none."""
        if self.score.function is None:
            return s
        else:
            s = s * (scale * self.score.before)
            return self.score.function(s, tile.b, tile.h, q, k, work.seq_q, work.seq_k, self.score_args)

    @gluon.jit
    def apply_mask(self, s, tile, work, q, k):
        """Scores with hidden keys at -inf; `q` [M, 1], `k` [1, N], as `keep` takes it."""
        if self.keep is None:
            return s
        else:
            kept = self.keep(tile.b, tile.h, q, k, work.seq_q, work.seq_k, self.mask_args)
            return gl.where(kept, s, -float("inf"))

    @gluon.jit
    def keeps(self, tile, work, q, k, index):
        """Whether queries see keys, for a mask; `q` and `k` broadcast. `index` is k as `keep` takes it."""
        kept = self.keep(tile.b, tile.h, q, index, work.seq_q, work.seq_k, self.mask_args)
        return gl.to_tensor(kept) & (k < work.seq_k)


@gluon.jit
def modifiers(functions: gl.constexpr, mask_args, score_args):
    """The `Modifiers` of a `Functions` or `BackwardFunctions`, with the tensors that mask and score capture."""
    return Modifiers(
        functions.keep, functions.hides_newer, functions.span, functions.score, mask_args, score_args
    )  # fmt: skip


@gluon.constexpr_function
def folds_scale(score):
    """Whether the softmax scale is applied in the exponential, because no score function takes it."""
    return score is None or score.function is None


@gluon.jit
def exponent_scale(ctx):
    """Factor from scores to base-2 exponents, see `natural_scale`."""
    return natural_scale(ctx) * LOG2_E


@gluon.jit
def natural_scale(ctx):
    """Factor from scores to exponents of e, for a context with `mods` and `scale`; a score function has already applied
    the scale."""
    if folds_scale(ctx.mods.score):
        return ctx.scale
    else:
        after: gl.constexpr = ctx.mods.score.after
        return after
