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

from ...nvidia.backward.turns import add_part, sum_head
from ...nvidia.backward.visits import STAGES, read_visit
from ...nvidia.pipelines import PipelineState
from ..layouts import accumulator_layout


@gluon.aggregate
class Added:
    """The dQ tile that the warpgroup added to last (`sum_head` and row), if gradients are deterministic."""

    head: gl.tensor
    row: gl.tensor  # -1: none


@gluon.jit
def nothing_added():
    """`Added` before the first tile."""
    return Added(gl.to_tensor(0), gl.to_tensor(-1))


@gluon.jit
def add_tile(ctx, state, added, wg: gl.constexpr):
    """Adds the warpgroup's parts of dQ for the query tile whose dS is in slot `state`; returns the tile as `Added`."""
    config: gl.constexpr = ctx.config
    ctx.rings.ds.consumer_wait(state)
    visit = read_visit(ctx, state)
    if config.deterministic:
        say_added(ctx, state, added, wg)
        added = Added(sum_head(ctx, visit), ctx.keys.row + visit.row)
        ctx.rings.ordered.turns.consumer_wait(state)
        ctx.rings.ordered.turns.consumer_release(state)
    parts: gl.constexpr = config.dq_parts
    part = (visit.row // config.block_m * parts + wg) & 1
    while part < parts:
        dq = warpgroup_mma_wait(0, deps=(start_part(ctx, state, part),))
        add_columns(ctx, dq, visit, part, wg)
        part += 2
    ctx.rings.ds.consumer_release(state)
    return added


@gluon.jit
def say_added(ctx, state, added, wg: gl.constexpr):
    """Waits until the warpgroup's additions to the tile before that of slot `state` are in memory, and tells `pass`."""
    if added.row >= 0:
        tma.store_wait(0, read_only=False)
        put_added(ctx, PipelineState(state.index ^ 1, state.phase ^ state.index ^ 1, STAGES), added, wg)


@gluon.jit
def end_additions(ctx, state, added, wg: gl.constexpr):
    """`say_added` for the last tile, whose slot precedes `state`; then tells `pass` that no tile follows."""
    say_added(ctx, state, added, wg)
    put_added(ctx, state, nothing_added(), wg)


@gluon.jit
def put_added(ctx, state, added, wg: gl.constexpr):
    """Sends a tile to `pass`; the first warpgroup writes the slot, both fill it."""
    ring = ctx.rings.ordered.added
    ring.producer_acquire(PipelineState(state.index, state.phase ^ 1, STAGES))
    if wg == 0:
        put_by_group(ring.tile(state, 0), added.head)
        put_by_group(ring.tile(state, 1), added.row)
    ring.producer_commit(state)


@gluon.jit
def put_by_group(slot, value):
    """Writes one field; called by four warps."""
    slot.store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))


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
def add_columns(ctx, dq, visit, part, wg: gl.constexpr):
    """Adds a part of dQ by TMA through the warpgroup's buffer, once TMA has read what it held."""
    config: gl.constexpr = ctx.config
    smem = ctx.rings.dq.index(wg)
    tma.store_wait(0)
    smem.reshape([config.block_m, config.dq_cols]).store(dq)
    fence_async_shared()
    gl.barrier()
    at = [sum_head(ctx, visit), ctx.keys.row + visit.row, part * config.dq_cols]
    add_part(ctx, at, smem, visit.turn)
