"""Base-2 exponentials without the exponential unit, and sums of rows: packed arithmetic, two fp32 an instruction.

2^x = 2^n * 2^f with n the nearest integer, |f| <= 1/2. Adding 1.5 * 2^23 rounds x to n and leaves n in the low bits of
the sum; 2^f is a cubic; n is added to the exponent field. The cubic is the one of least relative error on that
interval: 7.5e-5, where rounding P makes 2.4e-4 in fp16 and 2.0e-3 in bf16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import add2, fma2, sub2
from triton.language.core import PropagateNan

from .layouts import row_layout

_ALL = gl.constexpr(PropagateNan.ALL)
_ROUNDER = gl.constexpr(12582912.0)  # 1.5 * 2^23
_C0 = gl.constexpr(0.9999280735394012)
_C1 = gl.constexpr(0.6932609854606555)
_C2 = gl.constexpr(0.24261112219321604)
_C3 = gl.constexpr(0.05517166905792496)


@gluon.jit
def exp2_polynomial(x):
    """2^x of x [128, W] <= 127; below -126, also at -inf, it is 2^-126."""
    x = gl.maximum(x, -126.0, propagate_nan=_ALL)
    shifted = add2(x, _ROUNDER)
    f = sub2(x, sub2(shifted, _ROUNDER))
    p = fma2(f, _C3, _C2)
    p = fma2(p, f, _C1)
    p = fma2(p, f, _C0)
    bits = p.to(gl.int32, bitcast=True) + (shifted.to(gl.int32, bitcast=True) << 23)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def row_sum(p):
    """[128, W] -> [128], all of it in one thread, in halves until one column is left."""
    width: gl.constexpr = p.shape[1]
    if width > 2:
        left, right = p.reshape([p.shape[0], 2, width // 2]).permute((0, 2, 1)).split()
        return row_sum(add2(left, right))
    else:
        left, right = p.split()
        return gl.convert_layout(left + right, row_layout(), assert_trivial=True)
