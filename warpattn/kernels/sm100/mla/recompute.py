"""The rows of a CTA again that met hidden values of NaN or infinity, after all roles have ended: see
sm100/recompute.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...nvidia.opaque import hide_from_compiler
from ..recompute import KeyColumns, SpoiledTile, addressed, attend_again, runs_of


@gluon.jit
def recompute_latents(ctx, x):
    """Attend again to the rows; latents are keys and values, rotary columns are beside them in a key, or in a tensor of
    their own. `x`: `KeyAddresses`."""
    config: gl.constexpr = ctx.config
    before: gl.constexpr = config.dim_v if config.eight_bit is None else 0
    of_rope: gl.constexpr = "v" if config.narrow_rope else None
    latents = KeyColumns(ctx.q.latent, addressed(x.v), 0, 0, gl.to_tensor(runs_of(config.dim_v)), config.dim_v, "v")
    cols: gl.constexpr = config.rope
    rope = KeyColumns(ctx.q.rope, addressed(x.k), ctx.q.rope_column, before, gl.to_tensor(runs_of(cols)), cols, of_rope)
    attend_again(ctx, spoiled_rows(ctx, x, (latents, rope), config.dim_v), ctx.rows.b, config.BM)


@gluon.jit
def spoiled_rows(ctx, x, columns, padded: gl.constexpr):
    """The `SpoiledTile` of the rows; padded: columns of their output up to a power of two."""
    rows = ctx.rows
    return SpoiledTile(
        columns, addressed(x.v), ctx.out, rows.b, ctx.out_batch, ctx.k, hide_from_compiler(rows.first), rows.group,
        rows.kv_head * rows.group, rows.kv_head, ctx.lengths, ctx.sinks, gl.to_tensor(runs_of(ctx.config.dim_v)),
        padded, 1, padded, gl.to_tensor(0),
    )  # fmt: skip
