"""The rows of a CTA once more that met hidden values of NaN or infinity, when they have been stored: see
sm100/recompute.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...nvidia.opaque import hide_from_compiler
from ..recompute import SpoiledTile, addressed, attend_again, power_above, runs_of

LANES = gl.constexpr(32)  # that hold a row


@gluon.jit
def attend_again_to_rows(ctx, x):
    """Attend again to the rows of the CTA; `x`: `KeyAddresses`."""
    config: gl.constexpr = ctx.config
    rows = ctx.rows
    padded: gl.constexpr = power_above(config.dim_v)
    tile = SpoiledTile(
        ctx.memory.key_columns(ctx, x), addressed(x.v), ctx.out, rows.b, ctx.out_batch, ctx.k,
        hide_from_compiler(rows.first), rows.group, rows.kv_head * rows.group, rows.kv_head, ctx.lengths, ctx.sinks,
        gl.to_tensor(runs_of(config.dim_v)), padded, 1, padded, gl.to_tensor(0), LANES,
    )  # fmt: skip
    attend_again(ctx, tile, rows.b, config.BM)
