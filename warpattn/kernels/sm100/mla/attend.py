"""Attend warpgroup of the Blackwell kernel for latent attention: queries in, S to P, O out.

      for every key tile:   S(i) ─▶ score, mask ─▶ maximum ─▶ P(i)   (O += P(i-1)·V(i-1) complete)   P ─▶ shared memory,
                                                                     O *= alpha if the maximum moved

The reference maximum is lazy (pieces/softmax.py), and all four warps go the same way, since loads and stores of tensor
memory have a barrier of the warpgroup between them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared

from ...nvidia.opaque import hide_from_compiler
from ...pieces.modifiers import exponent_scale
from ...pieces.scales import headroom_of, scores_scale
from ...pieces.softmax import exponent, row_scale
from ..layouts import STORE_COLUMNS, element_type
from ..prefill_2q.softmax import RowState, row_state
from ..recompute import SpoiledTile, addressed, attend_again, power_above, runs_of
from ..sync import any_greater_of_role, await_signal, signal
from .context import row_positions
from .epilogue import store_rows

LANES = gl.constexpr(32)  # lanes of a row that is computed again


@gluon.jit
def attend_role(ctx, again):
    """Does the run's key tiles, stores the output, and computes again what hidden values may have spoiled; `again`:
    `KeyAddresses`, or nothing where a mask hides nothing."""
    scale = scores_scale(ctx.scales, ctx.rows.kv_head, ctx.mods, ctx.config)
    ctx = gl.aggregate_replace(ctx, scale=scale)
    state = row_state(ctx.config.BM, gl.SliceLayout(1, ctx.memory.s.get_reg_layout()))
    total = ctx.run.total
    if total > 0:
        ctx.memory.copy_queries(ctx)
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        signal(ctx.bars.q)
    for i in range(total):
        state = attend_tile(ctx, state, i)
    await_signal(ctx.bars.o, (total - 1) & 1, total > 0)
    sums = store_rows(ctx, state, len(again) > 0)
    if len(again) > 0:
        finite = (sums - sums == 0).to(gl.float32)
        if not any_greater_of_role(finite, gl.zeros_like(finite)):
            attend_again_to_rows(ctx, again)


@gluon.jit
def attend_again_to_rows(ctx, x):
    """Computes rows again that met hidden NaN or infinite values, see sm100/recompute.py; `x`:
    `KeyAddresses`."""
    config: gl.constexpr = ctx.config
    rows = ctx.rows
    padded: gl.constexpr = power_above(config.dim_v)
    tile = SpoiledTile(
        ctx.memory.key_columns(ctx, x), addressed(x.v), ctx.out, rows.b, ctx.out_batch, ctx.k,
        hide_from_compiler(rows.first), rows.group, rows.kv_head * rows.group, rows.kv_head, ctx.lengths, ctx.sinks,
        gl.to_tensor(runs_of(config.dim_v)), padded, 1, padded, gl.to_tensor(0), LANES,
    )  # fmt: skip
    attend_again(ctx, tile, rows.b, config.BM)


@gluon.jit
def attend_tile(ctx, state, i):
    """Does key tile number `i`: S to P; rescales O if the reference moved."""
    c = exponent_scale(ctx)
    await_signal(ctx.bars.s, i & 1)
    s = visible_scores(ctx, ctx.memory.s.load(), i)
    top = gl.max(s, 1)
    m, l, alpha = state.m, state.l, gl.full_like(state.m, 1.0)
    x = row_scale(m, c)
    headroom: gl.constexpr = headroom_of(ctx.traits.has_lse)
    moved = any_greater_of_role(top * x, m * x + headroom)
    if moved:  # only rows that need it, so that a row's bits do not depend on others in its tile
        m = gl.where(top * x > m * x + headroom, gl.maximum(m, top), m)
        x = row_scale(m, c)
        alpha = gl.exp2(state.m * x - exponent(m, x))
    p = gl.exp2(s * x[:, None] - exponent(m, x)[:, None])
    l = l * alpha + gl.sum(p, 1)
    await_signal(ctx.bars.o, (i - 1) & 1, i > 0)
    ctx.memory.p.store(p.to(element_type(ctx.config.element)))
    if moved & (i > 0):
        rescale_output(ctx, alpha)
    fence_async_shared()
    signal(ctx.bars.p)
    return RowState(m, l)


@gluon.jit
def rescale_output(ctx, alpha):
    """O *= alpha [64], a few columns at a time."""
    cols: gl.constexpr = ctx.config.dim_v
    for col in gl.static_range(0, cols, STORE_COLUMNS):
        block = ctx.memory.o.slice(col, STORE_COLUMNS)
        o = block.load()
        block.store(o * gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout))[:, None])


@gluon.jit
def visible_scores(ctx, s, i):
    """Applies the score function to S of key tile number `i` and, if it is masked, the mask and the keys' end."""
    layout: gl.constexpr = s.type.layout
    first = ctx.run.key_tile(i) * ctx.config.BN
    k = first + gl.arange(0, ctx.config.BN, gl.SliceLayout(0, layout))[None, :]
    rows = row_positions(ctx, gl.arange(0, ctx.config.BM, gl.SliceLayout(1, layout))[:, None])
    q = rows.token + ctx.lengths.seq_k - ctx.lengths.seq_q
    return ctx.mods.visible_scores(s, ctx.scale, rows, ctx.lengths, q, k, i < ctx.run.masked)
