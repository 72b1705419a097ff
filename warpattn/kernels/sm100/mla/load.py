"""The load warp of Blackwell's latent attention."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from ...nvidia.pipelines import producer_state
from ..global_rows import LEAST_ROWS


@gluon.jit
def load_role(ctx):
    """Loads every key tile of the run; keys past the end are zeros."""
    config: gl.constexpr = ctx.config
    state = producer_state(config.stages)
    for i in range(ctx.run.total):
        full = ctx.keys.producer_acquire(state)
        row = ctx.run.key_tile(i) * config.BN
        if config.box_rows < LEAST_ROWS:
            for part in gl.static_range(2):
                ctx.v.copy(row, ctx.rows.kv_head, ctx.keys.tile(state, part), part * config.half)
            ctx.k.copy(row, ctx.rows.kv_head, ctx.memory.rope.index(state.index), config.dim_v)
            mbarrier.arrive(full, count=1)
        else:
            mbarrier.expect(full, config.tile_bytes)
            for part in gl.static_range(2):
                ctx.v.load(row, ctx.rows.kv_head, full, ctx.keys.tile(state, part), part * config.half)
            ctx.k.load(row, ctx.rows.kv_head, full, ctx.memory.rope.index(state.index), config.dim_v)
        state = state.step()
