"""Online softmax in base 2 over tiles of scores in MFMA accumulators.

The state of a row is its maximum `m` (unscaled scores) and the sum `l` of exp2(c * s - c * m), c = scale * log2(e). Two
(32 x 32 MFMA) or four lanes (16 x 16) hold a row, so reductions are mostly within a lane.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..pieces.softmax import exponent, finish_rows, row_scale


@gluon.aggregate
class RowState:
    m: gl.tensor  # [M] maximum, -inf while a row has seen no key
    l: gl.tensor  # [M] sum


@gluon.jit
def softmax_start(rows: gl.constexpr, layout: gl.constexpr):
    """The state before the first tile; `layout` is that of the scores."""
    m = gl.full([rows], -float("inf"), gl.float32, gl.SliceLayout(1, layout))
    return RowState(m, gl.zeros_like(m))


@gluon.jit
def softmax_step(state, s, c):
    """Next tile: (state, p, alpha); the caller multiplies its accumulator by `alpha` [M]. Hidden scores are -inf."""
    m = gl.maximum(state.m, gl.max(s, 1))
    x = row_scale(m, c)
    mc = exponent(m, x)
    alpha = gl.exp2(exponent(state.m, x) - mc)
    p = gl.exp2(s * x[:, None] - mc[:, None])
    return RowState(m, state.l * alpha + gl.sum(p, 1)), p, alpha


@gluon.jit
def softmax_finish(state, scale, sink=0.0, has_sink: gl.constexpr = False):
    """(factor [M], `Denominator` [M]) of a state, see `finish_rows`; `sink` is [M] or one number."""
    return finish_rows(state.m, state.l, scale, state.l != 0, sink, has_sink)
