"""Base-2 exponents of the softmax weights; the reference maximum m is kept in units of the scores.

With c = scale * log2(e), a weight is 2^(c * s - c * m), and c is a power of two where c * m is large (`row_scale`;
kernels that are not `guarded` omit it). A score function may return a number so large that c * s overflows, so kernels
with one compute c * (s - m).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..pieces.modifiers import exponent_scale
from ..pieces.softmax import exponent, row_scale


@gluon.jit
def exponents(ctx, s, m, guarded: gl.constexpr = True):
    """Base-2 exponents of scores `s` relative to references `m` (broadcast); -inf for hidden keys."""
    c = exponent_scale(ctx)
    if ctx.mods.score is None:
        x = factor_of(m, c, guarded)
        return s * x - exponent(m, x)
    else:
        return (s - m) * c


@gluon.jit
def exponent_step(ctx, m, top, guarded: gl.constexpr = True):
    """Base-2 exponents of references `m` relative to higher ones, `top`; 0 where both are `LOWEST`."""
    c = exponent_scale(ctx)
    if ctx.mods.score is None:
        x = factor_of(top, c, guarded)
        return exponent(m, x) - exponent(top, x)
    else:
        return (m - top) * c


@gluon.jit
def factor_of(m, c, guarded: gl.constexpr):
    """The factor from scores with references `m` to exponents."""
    if guarded:
        return row_scale(m, c)
    else:
        return c
