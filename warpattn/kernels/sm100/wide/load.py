"""Load warp of the Blackwell kernel for wide heads: K0, K1, V0, K2, V1, …, as the tensor core reads them. Tiles of 8
bits go to slots of their own."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from ...nvidia.pipelines import producer_state
from ..global_rows import LEAST_ROWS, finish_copies


@gluon.jit
def load_role(ctx):
    """Loads K of every key tile, then V of the tile before; rows past the end are zeros."""
    config: gl.constexpr = ctx.config
    state = producer_state(ring_of(ctx).stages)
    total = ctx.run.total
    if total > 0:
        state = load_tile(ctx, ctx.k, state, 0, config.k_blocks)
    for i in range(total):
        if i + 1 < total:
            state = load_tile(ctx, ctx.k, state, i + 1, config.k_blocks)
        state = load_tile(ctx, ctx.v, state, i, config.v_blocks)


@gluon.jit
def ring_of(ctx):
    """The ring that the load warp fills."""
    if ctx.config.eight_bit is None:
        return ctx.keys
    else:
        return ctx.staged


@gluon.jit
def load_tile(ctx, rows, state, i, blocks: gl.constexpr):
    """Loads key tile number `i` of `rows` into the next slot."""
    config: gl.constexpr = ctx.config
    ring = ring_of(ctx)
    full = ring.producer_acquire(state)
    row = ctx.run.key_tile(i) * config.BN
    if config.box_rows < LEAST_ROWS:
        for block in gl.static_range(blocks):
            rows.start_copy(row, ctx.rows.kv_head, ring.tile(state, block), block * config.half)
        finish_copies()
        mbarrier.arrive(full, count=1)
    else:
        mbarrier.expect(full, blocks * config.block_bytes)
        for block in gl.static_range(blocks):
            rows.load(row, ctx.rows.kv_head, full, ring.tile(state, block), block * config.half)
    return state.step()
