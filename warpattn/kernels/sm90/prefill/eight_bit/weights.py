"""Weights of 8 bits as a left operand, in the registers where the softmax leaves them.

A thread holds columns 8 j + 2 t + {0, 1} of a row of scores (t = lane mod 4), and of every 32 columns of an 8-bit left
operand 16 h + 4 t + {0, 1, 2, 3}. Which weight meets which value is free as long as both take the same order, so
nothing moves: column 16 h + 4 t + 2 e + b of the operand is key 8 (2 h + e) + 2 t + b, and values are
transposed with their keys in that order (transpose_values.py).

The step of the softmax looks for no maximum unless it has to: it takes a row's reference as it is, and sums of four
weights, which the row sum is made of anyway, say whether one may have become too large. A reference is `LIFT` below the
largest score that it was made of, so that a row's small weights have significant bits, and rows of equal scores stay
below the bound.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....pieces.softmax import SoftmaxState, as_quads, exponent, lane_max, lowered, quad_max, warp_any

LIFT = gl.constexpr(6.0)  # weights are at most 2^6 where their reference is made, and at least 2^-15 of a row's largest
LARGEST = gl.constexpr(448.0)  # finite e4m3

_PACK_E4M3 = gl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
    " mov.b32 $0, {low, high}; }"
)


@gluon.constexpr_function
def lift_of(config):
    """log2 of the weight of the score that a reference is made of."""
    return LIFT.value if config.products else 0.0


@gluon.constexpr_function
def plain_bytes(config, score):
    """Whether weights have 8 bits, and scores the size of products: those of a score function may be any numbers."""
    return config.products and score is None


@gluon.jit
def pack_bytes(quads):
    """fp32 [M, N/8, 4, 2] rounded to four e4m3 in one int32 register each: [M, N/32, 2, 4]."""
    even, odd = quads.reshape([quads.shape[0], quads.shape[1] // 4, 2, 2, 4, 2]).permute((0, 1, 2, 4, 3, 5)).split()
    first, third = even.split()
    second, fourth = odd.split()
    values = [first, second, third, fourth]
    return gl.inline_asm_elementwise(_PACK_E4M3, "=r,f,f,f,f", values, gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack_bytes(packed, dtype: gl.constexpr):
    """[M, N/32, 2, 4] packed weights as an operand [M, N] of `dtype`; it compiles to no instruction."""
    low = gl.join(packed.to(gl.int8), (packed >> 16).to(gl.int8))
    high = gl.join((packed >> 8).to(gl.int8), (packed >> 24).to(gl.int8))
    return gl.join(low, high).reshape([packed.shape[0], packed.shape[1] * 32]).to(dtype, bitcast=True)


@gluon.jit
def step_in_bytes(state, s, c):
    """`softmax_step` with packed weights."""
    quads = as_quads(s)
    m = state.m
    p = gl.exp2(quads * c - exponent(m, c)[:, None, :, None])
    l, most = sums(p)
    packed = pack_bytes(p)
    alpha = gl.full_like(m, 1.0)
    moved = warp_any(most, gl.full_like(most, LARGEST))
    if moved:
        m = gl.maximum(m, lowered(quad_max(lane_max(quads)), c, LIFT))
        mc = exponent(m, c)
        alpha = gl.exp2(state.m * c - mc)
        p = gl.exp2(quads * c - mc[:, None, :, None])
        l, most = sums(p)
        packed = pack_bytes(p)
    return SoftmaxState(m, state.l * alpha + l), packed, moved, alpha


@gluon.jit
def sums(p):
    """Weights [M, N/8, 4, 2] -> [M, 4] each: the sum of a lane's part of a row, and its largest sum of four."""
    pairs = gl.sum(p, 3)
    fours = gl.sum(pairs.reshape([pairs.shape[0], pairs.shape[1] // 2, 2, 4]), 2)
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, p.type.layout))
    l = gl.convert_layout(gl.sum(fours, 1), layout, assert_trivial=True)
    return l, gl.convert_layout(gl.max(fours, 1), layout, assert_trivial=True)
