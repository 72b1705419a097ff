"""Load warp of two query tiles: Q0 and K0 behind one barrier, Q1, V0, then K and V of each key tile in turn.

In a pair, each CTA loads its parts of every tile and waits for its own slots to be free.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from ..global_rows import LEAST_ROWS
from .context import key_view, loader


@gluon.jit
def load_role(ctx):
    """Does nothing if the tile has no rows."""
    if ctx.run.total > 0:
        load_tiles(ctx)


@gluon.jit
def load_tiles(ctx):
    """Both query tiles, and the run's keys in its order."""
    config: gl.constexpr = ctx.config
    ring = loader(ctx)
    state = ring.start()
    key_tile = ctx.run.key_tile(0)
    state = load_k(ctx, ring, state, key_tile, True)
    second = ctx.bars.q1.index(0)
    mbarrier.expect(second, config.q_bytes)
    chunks: gl.constexpr = ctx.config.num_qk_stages
    for c in gl.static_range(chunks):
        load_q(ctx, 1, c, second)
    for i in range(1, ctx.run.total):
        state = load_v(ctx, ring, state, key_tile)
        key_tile = ctx.run.key_tile(i)
        state = load_k(ctx, ring, state, key_tile, False)
    load_v(ctx, ring, state, key_tile)


@gluon.jit
def load_q(ctx, wg: gl.constexpr, c: gl.constexpr, full):
    """A chunk of columns of one query tile: its rows in all heads of the group, where heads are fused."""
    config: gl.constexpr = ctx.config
    row = ctx.tile.row + wg * config.wg_queries
    ctx.tensors.q.load(row, ctx.tile.h, full, ctx.memory.q.index(wg * config.num_qk_stages + c), c * config.BK0)


@gluon.jit
def load_k(ctx, ring, state, key_tile, with_q: gl.constexpr):
    """A K tile in chunks of columns, the first tile's with those of the first query tile; returns the state after."""
    config: gl.constexpr = ctx.config
    chunks: gl.constexpr = config.num_qk_stages
    for c in gl.static_range(chunks):
        ring.acquire_k(state, c)
        full, slot = ring.get_k(state, c, expect=False)
        smem = key_view(slot, config.BK0, config)
        if with_q:
            keys = KeyTile(key_tile, c * config.BK0, config.k_load_bytes, config.q_bytes // chunks)
            expect_tile_bytes(ctx, ctx.tensors.k, keys, full, smem)
            load_q(ctx, 0, c, full)
        else:
            keys = KeyTile(key_tile, c * config.BK0, config.k_load_bytes, 0)
            expect_tile_bytes(ctx, ctx.tensors.k, keys, full, smem)
        load_keys(ctx, ctx.tensors.k, keys, full, smem)
    return ring.commit_k(state)


@gluon.jit
def load_v(ctx, ring, state, key_tile):
    """Loads a V tile; returns the next state."""
    ring.acquire_v(state)
    full, slot = ring.get_v(state, expect=False)
    smem = key_view(slot, ctx.config.padded_ov_depth, ctx.config)
    keys = KeyTile(key_tile, 0, ctx.config.v_load_bytes, 0)
    expect_tile_bytes(ctx, ctx.tensors.v, keys, full, smem)
    load_keys(ctx, ctx.tensors.v, keys, full, smem)
    return ring.commit_v(state)


@gluon.aggregate
class KeyTile:
    """What goes into a slot: BN keys of K or V from a column on, `nbytes` in this CTA, and `others` beside them."""

    number: gl.tensor
    column: gl.constexpr
    nbytes: gl.constexpr
    others: gl.constexpr


@gluon.jit
def expect_tile_bytes(ctx, rows, keys, full, smem):
    """Arrive on the full barrier of a slot and expect its bytes. Where TMA cannot load the keys they are copied first,
    and only the other bytes are expected."""
    config: gl.constexpr = ctx.config
    if config.box_rows < LEAST_ROWS:
        rows.copy(keys.number * config.BN, ctx.work.kv_head, smem, keys.column)
        if keys.others > 0:
            mbarrier.expect(full, keys.others)
        else:
            mbarrier.arrive(full, count=1)
    else:
        mbarrier.expect(full, keys.nbytes + keys.others)


@gluon.jit
def load_keys(ctx, rows, keys, full, smem):
    """Rows of K or V by TMA; `expect_tile_bytes` has copied what TMA cannot load."""
    if ctx.config.box_rows >= LEAST_ROWS:
        rows.load(keys.number * ctx.config.BN, ctx.work.kv_head, full, smem, keys.column)
