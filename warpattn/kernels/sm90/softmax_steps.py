"""Steps of the online softmax of pieces/softmax.py that know a tile's maximum before its weights: `maximum_step` where
registers do not hold scores beside weights, and `exact_step` for scores of any size, such as a score function may
return. Their reference moves by `headroom_of`. `early_exact_step` is `exact_step` with weights first.

While |c * m| of a row is large (`largest_of`), its warp takes the branch of a moved reference, c * (s - m). With a
score function, whose c * s may overflow, every key tile is tested. Others keep the `limit` that the test gave when the
reference moved: the test took 1 to 3 % of prefill at head dim 64, factors for each row 2 to 4 % (H200).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..pieces.scales import has_row_scale, headroom_of, largest_of, lowered
from ..pieces.softmax import (
    LARGEST,
    LOWEST,
    MOST,
    MOST_WITH_LSE,
    SoftmaxState,
    as_quads,
    exponent,
    lane_max,
    lane_sum,
    pack,
    quad_max,
    softmax_start,
    summed_weights,
    warp_any,
)

WIDEST_NARROW = 128  # widest head dim whose tiles have 128 keys


@gluon.constexpr_function
def weights_first(config, score):
    """Whether the softmax step computes 16-bit weights before a maximum, and returns them packed. With a score function
    that pays where 64 keys make a tile: a soft-cap took 1/1.12 of the time at head dim 256, 1/0.89 at 64 (H200)."""
    kept = config.keeps_scores and not config.products and not has_row_scale(config, "v")
    return kept and (score is None or config.wide > WIDEST_NARROW)


@gluon.jit
def maximum_start(s, c, has_lse: gl.constexpr = False):
    """`softmax_start` of `maximum_step`."""
    state, p = softmax_start(s, c)
    large = warp_any(gl.where(is_large(state.m, c), 1.0, 0.0), gl.zeros_like(state.m))
    return SoftmaxState(state.m, state.l, limit(large, has_lse)), p


@gluon.jit
def maximum_step(state, s, c, has_lse: gl.constexpr = False):
    """`softmax_step` that returns p before it is packed. The state's guard is its `limit`."""
    headroom: gl.constexpr = headroom_of(has_lse)
    quads = as_quads(s)
    m, guard = state.m, state.guard
    mc = exponent(m, c)
    moved = warp_any(lane_bound(quads) * c, m * c + guard)
    alpha = gl.full_like(m, 1.0)
    if moved:
        top = quad_max(lane_max(quads))
        rises = (top * c > mc + headroom) | (is_large(m, c) & (top > m))
        m = gl.where(rises, gl.maximum(m, top), m)
        alpha = gl.where(rises, gl.exp2(reference_step(state.m, m, c)), 1.0)
        quads, mc, large = differences(quads, m, c, 0.0)
        guard = limit(large, has_lse)
    p = gl.exp2(quads * c - mc[:, None, :, None])
    return SoftmaxState(m, state.l * alpha + lane_sum(p), guard), p, moved, alpha


@gluon.jit
def limit(large, has_lse: gl.constexpr):
    """What a score's exponent may have above that of its reference: nothing while a row of the warp is `large`."""
    return gl.where(large, -float("inf"), headroom_of(has_lse))


@gluon.jit
def reference_step(m, top, c):
    """Base-2 exponents of references `m` relative to those that replace them, `top`."""
    exact = (gl.maximum(m, LOWEST) - gl.maximum(top, LOWEST)) * c
    return gl.where(is_large(m, c) | is_large(top, c), exact, exponent(m, c) - exponent(top, c))


@gluon.jit
def is_large(m, c, lift: gl.constexpr = 0.0):
    """Whether |c * m| is large, in rows that have seen a key."""
    return (gl.abs(exponent(m, c)) >= largest_of(lift)) & (m != -float("inf"))


@gluon.jit
def lane_bound(quads):
    """As `lane_max`, or 0 if no element is positive. Positive numbers have the order of their bits, and Hopper computes
    the larger of three integers in one instruction."""
    bits = lane_max(quads.to(gl.int32, bitcast=True))
    return gl.maximum(bits.to(gl.float32, bitcast=True), 0.0)


@gluon.jit
def exact_start(s, c, lift: gl.constexpr = 0.0):
    """`softmax_start` for scores of any size."""
    quads = as_quads(s)
    m = lowered(quad_max(lane_max(quads)), c, lift)
    quads, mc, _ = differences(quads, m, c, lift)
    p = gl.exp2(quads * c - mc[:, None, :, None])
    return SoftmaxState(m, lane_sum(p), ()), p


@gluon.jit
def exact_step(state, s, c, lift: gl.constexpr = 0.0, has_lse: gl.constexpr = False):
    """`softmax_step` for scores of any size. With a `lift` every larger score moves the reference: 8-bit weights are
    most exact if a row's largest is a power of two."""
    headroom: gl.constexpr = headroom_of(has_lse) if lift == 0.0 else lift
    quads = as_quads(s)
    top = lane_max(quads)
    mc = exponent(state.m, c)
    usual = gl.abs(mc) < largest_of(lift)
    moved = warp_any(gl.where(usual, top * c, top), gl.where(usual, mc + headroom, -float("inf")))
    m = state.m
    alpha = gl.full_like(m, 1.0)
    if moved:
        top = quad_max(top)
        rises = gl.where(usual, top * c > mc + headroom, top > m)
        m = gl.where(rises, gl.maximum(m, lowered(top, c, lift)), m)
        alpha = gl.where(rises, gl.exp2(reference_step(state.m, m, c)), 1.0)
        quads, mc, _ = differences(quads, m, c, lift)
    p = gl.exp2(quads * c - mc[:, None, :, None])
    return SoftmaxState(m, state.l * alpha + lane_sum(p), ()), p, moved, alpha


@gluon.jit
def early_exact_step(state, s, c, dtype: gl.constexpr, has_lse: gl.constexpr, move_all):
    """`exact_step` that computes weights before a maximum, and returns them packed, as `softmax_step` does."""
    most: gl.constexpr = MOST_WITH_LSE if has_lse else MOST
    quads = as_quads(s)
    m = state.m
    usual = gl.abs(exponent(m, c)) < LARGEST
    alpha = gl.full_like(m, 1.0)
    l, p = gl.zeros_like(m), pack(gl.zeros_like(quads), dtype)
    moved = move_all
    if not move_all:
        l, p = summed_weights(quads, m, gl.zeros_like(m) + c, dtype)
        moved = warp_any(gl.where(usual, l, float("inf")), gl.full_like(l, most))
    if moved:
        rises = (quad_max(l) > most) | ~usual | move_all
        m = gl.where(rises, gl.maximum(m, quad_max(lane_max(quads))), m)
        alpha = gl.exp2(reference_step(state.m, m, c))
        quads, mc, _ = differences(quads, m, c, 0.0)
        p = gl.exp2(quads * c - mc[:, None, :, None])
        l = lane_sum(p)
        p = pack(p, dtype)
    return SoftmaxState(m, state.l * alpha + l, ()), p, moved, alpha


@gluon.jit
def differences(quads, m, c, lift: gl.constexpr):
    """(scores, x, whether a row of the warp is large) with p = 2^(c * scores - x). x is c * m; in rows where that is
    large, m is subtracted from the scores instead and x is 0."""
    mc = exponent(m, c)
    rows = is_large(m, c, lift)
    large = warp_any(gl.where(rows, 1.0, 0.0), gl.zeros_like(mc))
    if large:
        quads = quads - gl.where(rows, gl.maximum(m, LOWEST), 0.0)[:, None, :, None]
        mc = gl.where(rows, 0.0, mc)
    return quads, mc, large
