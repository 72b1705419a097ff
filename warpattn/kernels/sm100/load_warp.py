"""Load warp of the Blackwell kernel: Q0 and K0 behind one barrier, Q1, V0, then K and V of each key tile in turn."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier, tma

from ..nvidia.pipelines import producer_state
from .context import first_value_slot, next_slot


@gluon.jit
def load_role(ctx):
    """Feed the keys of the tile's span, in its order; nothing where the tile has no rows."""
    config: gl.constexpr = ctx.config
    if ctx.tiles > 0:
        k_state = producer_state(config.num_kv_stages)
        v_state = first_value_slot(k_state, config)
        key_tile = ctx.span.key_tile(0)
        full = ctx.rings.k.producer_acquire(k_state)
        mbarrier.expect(full, config.q_bytes + config.k_chunk_bytes)
        load_q(ctx, 0, full)
        load_k(ctx, key_tile, full, k_state)
        second = ctx.bars.q_producer.index(1)
        mbarrier.expect(second, config.q_bytes)
        load_q(ctx, 1, second)
        for i in range(1, ctx.tiles):
            v_state = load_v(ctx, key_tile, v_state)
            k_state = next_slot(k_state, config)
            key_tile = ctx.span.key_tile(i)
            full = ctx.rings.k.producer_acquire(k_state)
            mbarrier.expect(full, config.k_chunk_bytes)
            load_k(ctx, key_tile, full, k_state)
        load_v(ctx, key_tile, v_state)


@gluon.jit
def load_q(ctx, wg: gl.constexpr, full):
    """One query tile: its rows in all heads of the group, where heads are fused."""
    row = ctx.tile.row + wg * (ctx.config.BM_eff // 2)
    tma.async_load(ctx.tensors.q, [ctx.tile.b, row, ctx.tile.h, 0], full, ctx.memory.q.index(wg))


@gluon.jit
def load_k(ctx, key_tile, full, state):
    coord = [ctx.tile.b, key_tile * ctx.config.BN, ctx.work.kv_head, 0]
    tma.async_load(ctx.tensors.k, coord, full, ctx.rings.k.tile(state))


@gluon.jit
def load_v(ctx, key_tile, state):
    """The values of a key tile; returns the slot of the next one."""
    full = ctx.rings.v.producer_acquire(state)
    mbarrier.expect(full, ctx.config.v_bytes)
    coord = [ctx.tile.b, key_tile * ctx.config.BN, ctx.work.kv_head, 0]
    tma.async_load(ctx.tensors.v, coord, full, ctx.rings.v.tile(state))
    return next_slot(state, ctx.config)
