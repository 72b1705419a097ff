"""8-bit weights P as wgmma's left operand, without moving data between threads after the softmax.

A thread holds columns 8 j + 2 t + {0, 1} of a row of scores (t = lane mod 4), but of every 32 columns of an 8-bit left
operand it must hold 16 h + 4 t + {0, 1, 2, 3}. The order of keys in the sum P·V is free as long as P and V use the same
one. So column 16 h + 4 t + 2 e + b of the operand is defined as key 8 (2 h + e) + 2 t + b, and transpose_values.py
writes V in that order.

The softmax step computes no row maximum unless it must: it keeps a row's reference, and tests sums of four weights,
which the row sum needs anyway, for one that may be too large. A reference lies `LIFT` exponents below the largest score
at its time, so that a row's small weights keep significant bits and rows of equal scores stay below the bound. Where a
mask hides keys of the first tile, rows of a causal mask have seen few of them, and the second tile has larger scores:
there the maximum is computed at once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....pieces.scales import LARGEST_IN_BYTES, lowered
from ....pieces.softmax import (
    SoftmaxState,
    as_quads,
    exponent,
    lane_max,
    lane_sum,
    quad_max,
    row_scale,
    warp_any,
    weights,
)
from ...softmax_steps import weights_first

LIFT = gl.constexpr(6.0)  # weights are at most 2^6 where their reference is made, and at least 2^-15 of a row's largest
LARGEST = gl.constexpr(448.0)  # largest finite e4m3

_PACK_E4M3 = gl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
    " mov.b32 $0, {low, high}; }"
)


@gluon.constexpr_function
def lift_of(config):
    """log2 of a row's largest weight when its reference is set."""
    return LIFT.value if config.products else 0.0


@gluon.constexpr_function
def plain_bytes(config, score):
    """Whether P has 8 bits and there is no score function, whose scores could be of any size."""
    return config.products and score is None


@gluon.constexpr_function
def packs_early(config, score):
    """Whether the softmax step returns packed weights, while the scores are still in registers."""
    return plain_bytes(config, score) or weights_first(config, score)


@gluon.jit
def pack_bytes(quads):
    """Rounds fp32 [M, N/8, 4, 2] to e4m3, four in an int32 register: [M, N/32, 2, 4]."""
    even, odd = quads.reshape([quads.shape[0], quads.shape[1] // 4, 2, 2, 4, 2]).permute((0, 1, 2, 4, 3, 5)).split()
    first, third = even.split()
    second, fourth = odd.split()
    values = [first, second, third, fourth]
    return gl.inline_asm_elementwise(_PACK_E4M3, "=r,f,f,f,f", values, gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack_bytes(packed, dtype: gl.constexpr):
    """Views packed weights [M, N/32, 2, 4] as an operand [M, N] of `dtype`; compiles to no instruction."""
    low = gl.join(packed.to(gl.int8), (packed >> 16).to(gl.int8))
    high = gl.join((packed >> 8).to(gl.int8), (packed >> 24).to(gl.int8))
    return gl.join(low, high).reshape([packed.shape[0], packed.shape[1] * 32]).to(dtype, bitcast=True)


@gluon.jit
def start_bytes(s, c):
    """`softmax_start` with a reference that is `LIFT` exponents lower. Its p is not packed."""
    quads = as_quads(s)
    m = lowered(quad_max(lane_max(quads)), c, LIFT)
    factor = row_scale(m, c, LARGEST_IN_BYTES)
    p = weights(quads, m, factor)
    return SoftmaxState(m, lane_sum(p), factor), p


@gluon.jit
def step_bytes(state, s, c, move_all):
    """`softmax_step` that returns packed e4m3 weights. With `move_all` none are computed with the old references."""
    quads = as_quads(s)
    m, factor = state.m, state.guard
    alpha = gl.full_like(m, 1.0)
    l, packed = gl.zeros_like(m), pack_bytes(gl.zeros_like(quads))
    moved = move_all
    if not move_all:
        l, most, packed = packed_weights(quads, m, factor)
        moved = warp_any(most, gl.full_like(most, LARGEST))
    if moved:
        m = gl.maximum(m, lowered(quad_max(lane_max(quads)), c, LIFT))
        factor = row_scale(m, c, LARGEST_IN_BYTES)
        alpha = gl.exp2(exponent(state.m, factor) - exponent(m, factor))
        l, _, packed = packed_weights(quads, m, factor)
    return SoftmaxState(m, state.l * alpha + l, factor), packed, moved, alpha


@gluon.jit
def packed_weights(quads, m, factor):
    """(sum, largest sum of four, packed p) of `weights`."""
    p = weights(quads, m, factor)
    l, most = sums(p)
    return l, most, pack_bytes(p)


@gluon.jit
def sums(p):
    """(sum, largest sum of four) [M, 4] of each lane's part of a row of weights [M, N/8, 4, 2]."""
    pairs = gl.sum(p, 3)
    fours = gl.sum(pairs.reshape([pairs.shape[0], pairs.shape[1] // 2, 2, 4]), 2)
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, p.type.layout))
    l = gl.convert_layout(gl.sum(fours, 1), layout, assert_trivial=True)
    return l, gl.convert_layout(gl.max(fours, 1), layout, assert_trivial=True)
