"""The tiles of a CTA that met hidden values of NaN or infinity, after all roles have ended: see sm100/recompute.py.

With two query tiles each warpgroup has looked at its own, with one at its columns of the output. No other is written
again: it has not waited for its stores to be complete.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...nvidia.opaque import hide_from_compiler
from ..layouts import row_layout
from ..prefill_1q.epilogue import writers
from ..recompute import KeyColumns, SpoiledTile, addressed, attend_again, power_above

LANES = gl.constexpr(4)  # lanes of a row


@gluon.jit
def recompute_tiles(ctx, x):
    """Computes again what each warpgroup has to; `x`: `RecomputeArgs`."""
    config: gl.constexpr = ctx.config
    looking: gl.constexpr = 2 if config.num_q == 2 else writers(config)
    if ctx.run.total > 0:
        for wg in range(looking):
            if is_spoiled(ctx, wg):
                recompute_tile(ctx, x, wg)


@gluon.jit
def is_spoiled(ctx, wg):
    """Whether no row that a warpgroup has written is finite."""
    nonfinite = ctx.memory.scales.index(wg).load(row_layout())
    return gl.max((nonfinite == 0).to(gl.int32), 0) == 0


@gluon.jit
def recompute_tile(ctx, x, wg):
    """Computes a warpgroup's rows and columns again."""
    config: gl.constexpr = ctx.config
    group: gl.constexpr = config.tile_heads
    turns: gl.constexpr = 1 if config.num_q == 2 else writers(config)
    row = hide_from_compiler(ctx.tile.row + wg * config.wg_queries)
    q, q_entry = sequence_of(ctx.tensors.q, x.q, ctx.traits)
    out, out_entry = sequence_of(ctx.tensors.o, x.out, ctx.traits)
    columns = KeyColumns(q, addressed(x.k), 0, 0, x.runs_qk, power_above(config.qk_depth), "k")
    tile = SpoiledTile(
        (columns,), addressed(x.v), out, q_entry, out_entry, ctx.tensors.k, row * group, gl.to_tensor(group),
        ctx.tile.h, ctx.work.kv_head, ctx.work, ctx.tensors.sinks, x.runs_v, power_above(config.ov_depth),
        turns, config.store_columns, wg if turns > 1 else gl.to_tensor(0), LANES,
    )  # fmt: skip
    attend_again(ctx, tile, ctx.tile.b, config.BM_q)


@gluon.jit
def sequence_of(rows, x, traits: gl.constexpr):
    """(array, batch entry in it) of the sequence whose `rows` tensor maps load or store."""
    if traits.ragged_queries:
        return addressed(x).after(rows.start), gl.to_tensor(0)
    else:
        return addressed(x), rows.b
