"""Operations of masks and scores that have functions of their own on gfx942 and gfx950.

A comparison of two tiles is a pair of scalar registers for each element, of which a wave has 102 registers, so
quotients and remainders are corrected by bits of the numbers instead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..pieces.codegen import Arithmetic


@gluon.jit
def tanh(x):
    """Hyperbolic tangent from one exponential, as there is no instruction for it.

    1 - 2 / (e^2x + 1) is 1 and -1 where e^2x is infinite or 0; its error is a few roundings of 1.
    """
    return 1.0 - 2.0 / (gl.exp2(x * 2.8853900817779268) + 1.0)


@gluon.jit
def floor_div(a, b):
    """Quotient rounded down, as in Python (the machine's rounds towards zero)."""
    quotient = a // b
    return quotient + rounded_up(a - quotient * b, b)


@gluon.jit
def floor_mod(a, b):
    """Remainder with the sign of the divisor, as in Python."""
    rest = a % b
    return rest + (rounded_up(rest, b) & b)


@gluon.jit
def rounded_up(rest, b):
    """-1 where the machine's quotient is one too large: its rest is not 0 and has the other sign than `b`; else 0."""
    sign: gl.constexpr = rest.dtype.primitive_bitwidth - 1
    return ((rest | -rest) & (rest ^ b)) >> sign


CDNA = Arithmetic(tanh, floor_div, floor_mod)
