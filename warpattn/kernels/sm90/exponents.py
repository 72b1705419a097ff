"""Exponents of scores under a reference maximum, which is kept in units of the scores.

With c = scale * log2(e), a weight is 2^(c * s - c * m). A score function may return any number, whose product with c
may be none: its kernels take the difference first.
"""

from triton.experimental import gluon

from ..pieces.modifiers import exponent_scale
from ..pieces.softmax import exponent


@gluon.jit
def exponents(ctx, s, m):
    """Base-2 exponents of scores `s` under references `m`, which broadcast; of hidden ones -inf."""
    c = exponent_scale(ctx)
    if ctx.mods.score is None:
        return s * c - exponent(m, c)
    else:
        return (s - m) * c


@gluon.jit
def exponent_step(ctx, m, top):
    """Base-2 exponents of references `m` under higher ones, 0 where both are `LOWEST`."""
    c = exponent_scale(ctx)
    if ctx.mods.score is None:
        return exponent(m, c) - exponent(top, c)
    else:
        return (m - top) * c

