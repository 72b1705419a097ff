"""P and dS of a tile, whichever side its rows are."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...pieces.modifiers import exponent_scale
from ..feed import rounded
from ..layouts import output_operand, product_layout
from ..visible import seen_scores


@gluon.jit
def positions(ctx, work, key):
    """(queries in key coordinates, keys) of a tile, which broadcast to the shape of S."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = product_layout(config)
    first = work.rows.row + work.lengths.seq_k - work.lengths.seq_q
    if config.side == "queries":
        q = first + gl.arange(0, config.block_m, gl.SliceLayout(1, layout))
        k = key + gl.arange(0, config.block_n, gl.SliceLayout(0, layout))
        return q[:, None], k[None, :]
    else:
        q = first + gl.arange(0, config.block_m, gl.SliceLayout(0, layout))
        k = key + gl.arange(0, config.block_n, gl.SliceLayout(1, layout))
        return q[None, :], k[:, None]


@gluon.jit
def weigh(ctx, s, dp, work, key, top, masked):
    """(P, dS) of S and dP - delta; `top`, the number of each row, broadcasts to their shape.

    Where P is 0 dS is, too, whatever dP is: a hidden value may be NaN.
    """
    q, k = positions(ctx, work, key)
    x = seen_scores(ctx, s, work.rows, work, q, k, key, masked)
    if ctx.config.side == "keys" and masked:  # rows past the end are summed over
        x = gl.where(q < work.lengths.seq_k, x, -float("inf"))
    p = gl.exp2(x * exponent_scale(ctx) - top)
    ds = p * dp
    if ctx.slope is not None:
        lengths = work.lengths
        args = ctx.mods.score_args
        ds *= ctx.slope(s * ctx.scale, work.rows.b, work.rows.h, q, k, lengths.seq_q, lengths.seq_k, args)
    return p, gl.where(p == 0, 0.0, ds)


@gluon.jit
def as_operand(x, config: gl.constexpr):
    """P or dS as the left operand of a gradient's product."""
    return gl.convert_layout(rounded(x, config), output_operand(config, 0))
