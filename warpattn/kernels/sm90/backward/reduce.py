"""The warpgroup of Hopper's backward that computes dQ = dSᵀ · K from both attending warpgroups' dS and adds it by TMA.

Because it computes this product, the attending warpgroups never wait for each other: one multiplies while the other
computes P or dS. It computes and adds a tile in parts of 64 rows and 64 columns, one after the other, so 72 registers
a thread suffice. Two buffers let one part be computed while TMA still reads the other (H200: 5 % at head dim 64).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...nvidia.backward.visits import STAGES, at_keys, first_visit, following_visit, read_visit
from ...nvidia.pipelines import consumer_state, producer_state
from ..layouts import accumulator_layout
from .attend import held_tile


@gluon.jit
def reduce_role(ctx):
    """Adds dQ of every visited query tile of every key tile to global memory, or hands it over to `add`."""
    state = consumer_state(ctx.config.ds_stages)
    added = producer_state(ctx.config.dq_buffers)
    visit_state = consumer_state(STAGES)
    held = consumer_state(ctx.config.key_stages)
    visit = first_visit(ctx, ctx.rings.ds, state, visit_state)
    while visit.row >= 0:
        state, visit_state, added = add_tiles(at_keys(ctx, visit_state), state, visit_state, added, held)
        held = held.step()
        visit = following_visit(ctx, ctx.rings.ds, state, visit_state)
    if not ctx.config.counted:
        tma.store_wait(0)  # shared memory must outlive the last copy's reads


@gluon.jit
def add_tiles(ctx, state, visit_state, added, held):
    """Adds dQ of every visited query tile of a key tile; returns the states of the next slots."""
    config: gl.constexpr = ctx.config
    rings = ctx.rings
    rings.k.consumer_wait(held)
    more = gl.to_tensor(True)
    while more:
        rings.ds.consumer_wait(state)
        visit = read_visit(ctx, visit_state)
        parts: gl.constexpr = config.dq_parts
        for part in gl.static_range(parts):
            dq = start_query_gradients(ctx, state, held, part)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            if part == parts - 1:
                rings.ds.consumer_release(state)
            if config.counted:
                hand_over_part(ctx, dq, added, part)
            else:
                add_by_tma(ctx, dq, visit, added, part)
            added = added.step()
        more = visit.more()
        state = state.step()
        visit_state = visit_state.step()
    rings.k.consumer_release(held)
    return state, visit_state, added


@gluon.jit
def start_query_gradients(ctx, state, held, part: gl.constexpr):
    """Starts dQ = dSᵀ · K [dq_rows, dq_cols] for a part of the rows and columns."""
    config: gl.constexpr = ctx.config
    cols: gl.constexpr = part_columns(config, part)
    dq = gl.zeros([config.dq_rows, cols], gl.float32, accumulator_layout(cols))
    parts: gl.constexpr = config.key_parts
    for wg in gl.static_range(parts):
        ds = ctx.rings.ds.tile(state, wg).permute((1, 0))
        if config.dq_rows < config.block_m:
            ds = ds.slice(first_row(config, part), config.dq_rows, dim=0)
        k = held_tile(ctx.rings.k, held, state, wg).reshape([config.rows, config.padded_qk])
        if cols < config.padded_qk:
            k = k.slice(first_column(config, part), cols, dim=1)
        dq = warpgroup_mma(ds, k, dq, use_acc=wg > 0, is_async=True)
    return dq


@gluon.constexpr_function
def first_row(config, part):
    """First row of part `part` of dQ."""
    return part % config.dq_row_parts * config.dq_rows


@gluon.constexpr_function
def first_column(config, part):
    """First column of part `part` of dQ."""
    return part // config.dq_row_parts * config.dq_cols


@gluon.constexpr_function
def part_columns(config, part):
    """Number of columns of part `part` of dQ."""
    rest = sum(config.widths_qk) - first_column(config, part)
    return min(config.dq_cols, 1 << (rest - 1).bit_length())


@gluon.jit
def add_by_tma(ctx, dq, visit, state, part: gl.constexpr):
    """Adds a part of dQ by TMA through a buffer, once TMA has read what it held."""
    config: gl.constexpr = ctx.config
    smem = ctx.rings.dq.index(state.index)
    tma.store_wait(config.dq_buffers - 1)
    store_part(ctx, dq, smem, part)
    gl.barrier()
    row = ctx.keys.row + visit.row + first_row(config, part)
    at = [ctx.keys.head + visit.h, row, first_column(config, part)]
    tma.async_atomic_add(ctx.tensors.dq, at, smem)


@gluon.jit
def hand_over_part(ctx, dq, state, part: gl.constexpr):
    """Hands a part of dQ to `add`."""
    ring = ctx.rings.ordered.dq
    ring.producer_acquire(state)
    store_part(ctx, dq, ring.tile(state), part)
    ring.producer_commit(state)


@gluon.jit
def store_part(ctx, dq, smem, part: gl.constexpr):
    """Writes a part of dQ to shared memory, for TMA."""
    config: gl.constexpr = ctx.config
    tile = smem.reshape([config.dq_rows, config.dq_cols])
    cols: gl.constexpr = part_columns(config, part)
    if cols < config.dq_cols:  # TMA adds no columns past the head dim
        tile = tile.slice(0, cols, dim=1)
    tile.store(dq)
    fence_async_shared()
