"""dQ in the attending warpgroups: their dK and dV take all registers, so no third warpgroup can add dQ (`reduce.py`).

Each computes every other part of dQ's columns from the dS of both, and adds it by TMA through a buffer of its own. The
assignment alternates with query tiles, so that an odd number of parts is shared evenly. It is the same in all CTAs: for
deterministic gradients, warpgroup 0 of each CTA adds to a tile in turns with warpgroup 0 of the others, and so does 1:

      tile 0   parts 0, 2 ─▶ attend 0   part  1    ─▶ attend 1
      tile 1   part  1    ─▶ attend 0   parts 0, 2 ─▶ attend 1
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...nvidia.backward.turns import BEHIND, pass_turn, take_turn
from ...nvidia.backward.visits import read_visit
from ..layouts import accumulator_layout


@gluon.aggregate
class Turn:
    """Of the tile that the warpgroup added to last, if gradients are deterministic."""

    counter: gl.tensor
    began: gl.tensor  # whether there is one


@gluon.jit
def no_turn(ctx):
    """The turn before the first tile."""
    return Turn(ctx.tensors.turns, gl.to_tensor(False))


@gluon.jit
def add_tile(ctx, state, turn, wg: gl.constexpr):
    """Add the warpgroup's parts of dQ of the tile whose dS is in a slot; the tile's turn."""
    config: gl.constexpr = ctx.config
    ctx.rings.ds.consumer_wait(state)
    visit = read_visit(ctx, state)
    if config.deterministic:
        pass_turn(turn.counter, turn.began)
        turn = Turn(take_turn(ctx, visit, wg), visit.row < BEHIND)
    parts: gl.constexpr = config.dq_parts
    part = (visit.row // config.block_m * parts + wg) & 1
    while part < parts:
        dq = warpgroup_mma_wait(0, deps=(start_part(ctx, state, part),))
        add_part(ctx, dq, visit, part, wg)
        part += 2
    ctx.rings.ds.consumer_release(state)
    return turn


@gluon.jit
def start_part(ctx, state, part):
    """Start dQ = dSᵀ · K [M, dq_cols] of the columns of a part."""
    config: gl.constexpr = ctx.config
    cols: gl.constexpr = config.dq_cols
    dq = gl.zeros([config.block_m, cols], gl.float32, accumulator_layout(cols))
    key_parts: gl.constexpr = config.key_parts
    for wg in gl.static_range(key_parts):
        ds = ctx.rings.ds.tile(state, wg).permute((1, 0))
        k = ctx.rings.k.smem.index(wg * config.dq_parts + part).reshape([config.rows, cols])
        dq = warpgroup_mma(ds, k, dq, use_acc=wg > 0, is_async=True)
    return dq


@gluon.jit
def add_part(ctx, dq, visit, part, wg: gl.constexpr):
    """Add a part through the warpgroup's buffer, once TMA has read what it held."""
    config: gl.constexpr = ctx.config
    smem = ctx.rings.dq.index(wg)
    tma.store_wait(0)
    smem.reshape([config.block_m, config.dq_cols]).store(dq)
    fence_async_shared()
    gl.barrier()
    at = [ctx.keys.head + visit.h, ctx.keys.row + visit.row, part * config.dq_cols]
    tma.async_atomic_add(ctx.tensors.dq, at, smem)
