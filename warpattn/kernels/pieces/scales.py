"""Scales inside a kernel: of 8-bit queries, keys and values, and of a row's scores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from warpattn.problem import operands

from .modifiers import folds_scale
from .softmax import LARGEST

LARGEST_LIFTED = gl.constexpr(8388608.0)  # as LARGEST, but rounded by at most a half: p stays within e4m3
LARGEST_IN_BYTES = gl.constexpr(33554432.0)  # where references are at their rows' maxima: rounded by at most 1
LEAST_SCALE = gl.constexpr(operands.LEAST_SCALE)  # of scores: with a smaller one, exponents may be 0 times infinity


@gluon.jit
def head_scale(rows, head):
    """The scale of a key head in `ScaleRows` of a tensor or of heads."""
    return gl.load(rows.scale + head * rows.head)


@gluon.jit
def block_scale(rows, b, block, head):
    """The scale of a block of tokens of a head, in batch entry `b`."""
    return gl.load(rows.scale + (b * rows.outer + block * rows.row + head * rows.head))


@gluon.jit
def softmax_scale(scale, config: gl.constexpr):
    """The softmax scale of a kernel's argument `scale`."""
    if config.eight_bit is None:
        return scale
    else:
        return scale.scores


@gluon.jit
def scores_scale(scale, head, mods, config: gl.constexpr, queries=None):
    """The softmax scale of a tile of key head `head`, times that of its keys where they have one of a tensor or a head,
    and that of its `queries` where they have one; `scale`: the kernel's argument."""
    if config.eight_bit is None:
        return scale
    else:
        scores = scale.scores
        of_keys: gl.constexpr = has_scale(config, "k", "tensor", "head")
        if of_keys:
            scores = scores * head_scale(scale.k, head)
        if queries is not None:
            scores = scores * queries
        if (of_keys or queries is not None) and folds_scale(mods.score):  # a scale of 0 or below has a score function
            scores = gl.maximum(scores, LEAST_SCALE)
        return scores


@gluon.jit
def output_scale(scale, head, config: gl.constexpr):
    """The scale of V of tensor or head for a key head, 1 if there is none."""
    if has_scale(config, "v", "tensor", "head"):
        return head_scale(scale.v, head)
    else:
        return 1.0


@gluon.constexpr_function
def by_token(config):
    """Whether scales are looked up for each token."""
    return config.eight_bit is not None and config.eight_bit.by_token


@gluon.constexpr_function
def has_scale(config, operand, *kinds):
    """Whether an operand, "k", "v" or "q", has a scale of one of these kinds."""
    return config.eight_bit is not None and getattr(config.eight_bit.scales, operand) in kinds


@gluon.constexpr_function
def has_token_scale(config, operand):
    """Whether scales of an operand, "k", "v" or "q", are looked up for each token: one, or one for each block of
    columns."""
    return config.eight_bit is not None and config.eight_bit.of_token(operand)


@gluon.constexpr_function
def has_row_scale(config, operand):
    """Whether each token has one scale in an operand: its own, or that of its block of rows."""
    return has_token_scale(config, operand) and config.eight_bit.columns(operand) == 0


@gluon.jit
def scale_row(config: gl.constexpr, operand: gl.constexpr, token):
    """The row of a token's scale, which tokens of a block of rows share."""
    shared: gl.constexpr = scaled_rows(config, operand)
    if shared > 0:
        return token // shared
    else:
        return token


@gluon.constexpr_function
def scaled_rows(config, operand):
    """Tokens of "q" or "k" that share a scale, if blocks of them do; else 0."""
    return 0 if config.eight_bit is None else config.eight_bit.rows(operand)


@gluon.aggregate
class OfTokens:
    """What belongs to scales of K's and of V's tokens; () without."""

    k: gl.base_value
    v: gl.base_value


@gluon.jit
def lowered(m, c, lift: gl.constexpr):
    """The reference for rows whose largest score is `m`: `lift` exponents below it, so that p is up to 2^lift; m itself
    where its exponent is so large that rounding would swallow the lift."""
    if lift == 0.0:
        return m
    else:
        return gl.where(gl.abs(m * c) < largest_of(lift), m - lift / c, m)


@gluon.constexpr_function
def largest_of(lift):
    """The |c * m| from which a reference is not lowered and scores of any size are subtracted first: less for 8-bit
    weights, whose range ends at 2^8.8."""
    return LARGEST.value if lift == 0.0 else LARGEST_LIFTED.value


@gluon.constexpr_function
def headroom_of(has_lse):
    """log2 of the largest p that moves no reference, where a maximum tells whether it has to."""
    return 5.0 if has_lse else 8.0
