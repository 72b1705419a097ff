"""Two warps that make 16-bit tiles of 8-bit keys and values, between the load warp and the MMA warp.

      load ── TMA ──▶ [ 8 bits ] ── LDS, convert, STS ──▶ [ 16 bits ] ──▶ MMA
                      2 slots       registers             rings of K and V

K and V take slots of 8 bits in turn, in the order in which they are loaded. The first tile of keys shares its barrier
with the first query tile, so the MMA warp, which waits for the converted keys, need not wait for these queries.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mbarrier
from triton.language.core import base_value

from ...nvidia.pipelines import PipelineState, consumer_state
from .context import CONVERTING, STAGED, key_view, producer

ROWS = gl.constexpr(16)  # at a time: the warps have few registers


@gluon.aggregate
class ConvertState:
    """The next slots: of 8 bits, and of the rings of 16."""

    staged: PipelineState
    ring: base_value


@gluon.jit
def convert_role(ctx):
    """The tiles of two query tiles a CTA; nothing where the tile has no rows."""
    if ctx.run.total > 0:
        state = convert_k(ctx, first_state(ctx))
        for _ in range(1, ctx.run.total):
            state = convert_v(ctx, state)
            state = convert_k(ctx, state)
        convert_v(ctx, state)  # no tile follows


@gluon.jit
def first_state(ctx):
    """The state before the first tile."""
    return ConvertState(consumer_state(STAGED), producer(ctx).start())


@gluon.jit
def convert_k(ctx, state):
    """The next tile, of K; returns the state after it."""
    ring = producer(ctx)
    ring.acquire_k(state.ring)
    full, slot = ring.get_k(state.ring, expect=False)
    staged = convert_tile(ctx, state.staged, slot, full, ctx.config.padded_qk_depth)
    return ConvertState(staged, ring.commit_k(state.ring))


@gluon.jit
def convert_v(ctx, state):
    """The next tile, of V; returns the state after it."""
    ring = producer(ctx)
    ring.acquire_v(state.ring)
    full, slot = ring.get_v(state.ring, expect=False)
    staged = convert_tile(ctx, state.staged, slot, full, ctx.config.padded_ov_depth)
    return ConvertState(staged, ring.commit_v(state.ring))


@gluon.jit
def convert_tile(ctx, staged, slot, full, cols: gl.constexpr):
    """A tile [BN, cols] of a slot of 8 bits, when it has arrived, into a slot of 16; hands on both, and returns the
    state of the next slot of 8 bits."""
    config: gl.constexpr = ctx.config
    ctx.staged.consumer_wait(staged)
    narrow = key_view(ctx.staged.tile(staged), cols, config).reshape([config.BN, cols])
    wide = key_view(slot, cols, config).reshape([config.BN, cols])
    for i in gl.static_range(config.BN // ROWS):
        x = narrow.slice(i * ROWS, ROWS).load(rows_layout(cols)).to(gl.float16)
        if wide.dtype == gl.bfloat16:
            x = x.to(gl.float32).to(gl.bfloat16)
        wide.slice(i * ROWS, ROWS).store(x)
    fence_async_shared()
    mbarrier.arrive(full, count=1)
    ctx.staged.consumer_release(staged)
    return staged.step()


@gluon.constexpr_function
def rows_layout(cols):
    """Registers of some rows: 16 columns of a row in a lane."""
    return gl.BlockedLayout([1, 16], [32 * 16 // cols, cols // 16], [CONVERTING, 1], [1, 0])
