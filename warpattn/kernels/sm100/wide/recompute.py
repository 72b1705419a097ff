"""The rows of a CTA again that met hidden values of NaN or infinity, after all roles have ended: see
sm100/recompute.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..mla.recompute import spoiled_rows
from ..recompute import KeyColumns, addressed, attend_again, power_above, runs_of


@gluon.jit
def recompute_tile(ctx, x):
    """Attend again to the rows; `x`: `KeyAddresses`."""
    config: gl.constexpr = ctx.config
    runs = gl.to_tensor(runs_of(config.dim_qk))
    columns = KeyColumns(ctx.q, addressed(x.k), 0, 0, runs, power_above(config.dim_qk), "k")
    attend_again(ctx, spoiled_rows(ctx, x, (columns,), power_above(config.dim_v)), ctx.rows.b, config.BM)
