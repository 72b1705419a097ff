"""Adds dQ in the attending warpgroups, where their dK and dV leave no registers for a third warpgroup (`reduce.py`).

Each computes every other column part of dQ from the dS of both, and adds it to global memory by TMA through a buffer of
its own. The assignment alternates with query tiles, so that an odd number of parts is shared evenly:

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

from ...nvidia.backward.turns import add_part, others_wait, sum_head
from ...nvidia.backward.visits import STAGES, read_visit
from ...nvidia.pipelines import PipelineState
from ...pieces.scheduler import get_field
from ..layouts import accumulator_layout
from .epilogue import acquire

NO_TURN = gl.constexpr(-1)  # the warpgroup has added to no dQ tile of the key tile yet


@gluon.jit
def add_tile(ctx, state, before, wg: gl.constexpr):
    """Adds the warpgroup's parts of dQ for the query tile whose dS is in slot `state`. `before`: the CTA's turn at the
    key tile's dQ tile before, or NO_TURN. Returns the turn at this one."""
    config: gl.constexpr = ctx.config
    ctx.rings.ds.consumer_wait(state)
    visit = read_visit(ctx, state)
    turn = gl.to_tensor(0)
    if config.counted:
        say_added(ctx, state, before)
        turn = get_turn(ctx, state)
    parts: gl.constexpr = config.dq_parts
    part = (visit.row // config.block_m * parts + wg) & 1
    while part < parts:
        dq = warpgroup_mma_wait(0, deps=(start_part(ctx, state, part),))
        add_columns(ctx, dq, visit, turn, part, wg)
        part += 2
    ctx.rings.ds.consumer_release(state)
    return turn


@gluon.jit
def get_turn(ctx, state):
    """The CTA's turn at the dQ tile of slot `state`, once it has come."""
    turns = ctx.rings.ordered.turns
    turns.consumer_wait(state)
    turn = get_field(turns.tile(state, 2))
    turns.consumer_release(state)
    return turn


@gluon.jit
def say_added(ctx, state, before):
    """Tells `pass` that dQ of the tile before that of slot `state` was added to, if the key tile has one. If other CTAs
    may wait for that, it is in memory then."""
    if before != NO_TURN:
        if others_wait(before, ctx.config):
            tma.store_wait(0, read_only=False)
        earlier = PipelineState(state.index ^ 1, state.phase ^ state.index ^ 1, STAGES)
        acquire(ctx.rings.ordered.added, earlier)
        ctx.rings.ordered.added.producer_commit(earlier)


@gluon.jit
def start_part(ctx, state, part):
    """Starts dQ = dSᵀ · K [M, dq_cols] for a part of the columns."""
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
def add_columns(ctx, dq, visit, turn, part, wg: gl.constexpr):
    """Adds a part of dQ by TMA through the warpgroup's buffer, once TMA has read what it held."""
    config: gl.constexpr = ctx.config
    smem = ctx.rings.dq.index(wg)
    tma.store_wait(0)
    smem.reshape([config.block_m, config.dq_cols]).store(dq)
    fence_async_shared()
    gl.barrier()
    at = [sum_head(ctx, visit), ctx.keys.row + visit.row, part * config.dq_cols]
    add_part(ctx, at, smem, turn)
