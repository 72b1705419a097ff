"""8-bit latents: the load warp loads them, and two warps convert them to 16 bits.

      latents   DRAM ── TMA ──▶ two tiles of 8 bits ── convert: LDS, × scale, STS ──▶ slot of the ring, 16 bits
      rotary    DRAM ── TMA ────────────────────────────────────────────────────────▶ the slot's rotary part

A tile of 8 bits has arrived when the rotary part of its slot has, too, so the slot is full when it is converted. A
rotary part of 8 bits takes the latents' way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mbarrier

from ...nvidia.pipelines import consumer_state, producer_state
from .. import tile
from ..token_scales import convert_scaled, wait_for_scales

SLOTS = gl.constexpr(tile.SCALE_SLOTS)
ROWS = gl.constexpr(16)  # rows at a time: the warps have few registers


@gluon.jit
def load_stored(ctx):
    """Every key tile of the run: latents to a tile of 8 bits, the rotary part to the slot that they become part of."""
    config: gl.constexpr = ctx.config
    state = producer_state(config.stages)
    staged = producer_state(config.staged)
    for i in range(ctx.run.total):
        full = ctx.staged.producer_acquire(staged)
        ctx.keys.producer_acquire(state)  # a slot for its rotary part
        row = ctx.run.key_tile(i) * config.BN
        mbarrier.expect(full, config.landing_bytes)
        for part in gl.static_range(2):
            ctx.v.load(row, ctx.rows.kv_head, full, ctx.staged.tile(staged, part), part * config.half)
        if config.narrow_rope:
            ctx.k.load(row, ctx.rows.kv_head, full, ctx.memory.bytes.index(staged.index))
        else:
            ctx.k.load(row, ctx.rows.kv_head, full, ctx.memory.rope.index(state.index))
        state = state.step()
        staged = staged.step()


@gluon.jit
def convert_role(ctx):
    """Converts every tile of latents into the ring, times scales."""
    config: gl.constexpr = ctx.config
    if ctx.run.total > 0:
        state = producer_state(config.stages)
        staged = consumer_state(config.staged)
        scales = ctx.scales_of("v")
        following = scales.request(scales.first())
        for i in range(ctx.run.total):
            ctx.staged.consumer_wait(staged)  # the load warp has waited for the slot before
            wait_for_scales(SLOTS - 1)
            for part in gl.static_range(2):
                narrow = ctx.staged.tile(staged, part).reshape([config.BN, config.half])
                wide = ctx.keys.tile(state, part).reshape([config.BN, config.half])
                convert_half(ctx, narrow, wide, scales.slot(i), part)
            if config.narrow_rope:
                narrow = ctx.memory.bytes.index(staged.index).reshape([config.BN, config.rope])
                wide = ctx.memory.rope.index(state.index).reshape([config.BN, config.rope])
                convert_half(ctx, narrow, wide, scales.slot(i), 0)
            fence_async_shared()
            mbarrier.arrive(ctx.keys.full(state.index), count=1)
            ctx.staged.consumer_release(staged)
            following = scales.request(following)
            state = state.step()
            staged = staged.step()
        wait_for_scales(0)


@gluon.jit
def convert_half(ctx, narrow, wide, slot, part: gl.constexpr):
    """One half [BN, 256] of the columns of a tile, or a rotary part, whose scales are from row `slot` on."""
    config: gl.constexpr = ctx.config
    shared: gl.constexpr = config.dim_v // config.scale_blocks("v")
    rows: gl.constexpr = config.BN
    for first in gl.static_range(0, rows, ROWS):
        some, to = narrow.slice(first, ROWS), wide.slice(first, ROWS)
        convert_scaled(some, to, ctx.token_scales.v, slot, first, part * config.half, shared)
