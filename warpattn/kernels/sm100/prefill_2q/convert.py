"""Two warps that make 16-bit tiles of 8-bit keys and values, between the load warp and the MMA warp.

      load ── TMA ──▶ [ 8 bits ] ── LDS, convert, STS ──▶ [ 16 bits ] ──▶ MMA
                      2 slots       registers             rings of K and V

K and V take slots of 8 bits in turn, in the order in which they are loaded. The first tile of keys shares its barrier
with the first query tile, so the MMA warp, which waits for the converted keys, need not wait for these queries.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mbarrier
from triton.language.core import base_value

from ...nvidia.pipelines import PipelineState, consumer_state
from ...pieces.scales import OfTokens, has_token_scale
from .context import CONVERTING, STAGED, key_view, producer
from .scales import finish_scales, first_scales, request_scales

ROWS = gl.constexpr(16)  # at a time: the warps have few registers


@gluon.aggregate
class ConvertState:
    """The next slots: of 8 bits, and of the rings of 16."""

    staged: PipelineState
    ring: base_value
    scales: OfTokens  # `NextScales`; () where tokens have none


@gluon.jit
def convert_role(ctx):
    """The tiles of two query tiles a CTA; nothing where the tile has no rows."""
    if ctx.run.total > 0:
        state = convert_k(ctx, first_state(ctx))
        for _ in range(1, ctx.run.total):
            state = convert_v(ctx, state)
            state = convert_k(ctx, state)
        convert_v(ctx, state)  # no tile follows
        finish_scales(ctx.config)


@gluon.jit
def first_state(ctx):
    """The state before the first tile."""
    scales = OfTokens(first_scales(ctx, "k"), first_scales(ctx, "v"))
    return ConvertState(consumer_state(STAGED), producer(ctx).start(), scales)


@gluon.jit
def convert_k(ctx, state):
    """The next tile, of K; returns the state after it."""
    ring = producer(ctx)
    ring.acquire_k(state.ring)
    full, slot = ring.get_k(state.ring, expect=False)
    staged = convert_tile(ctx, state.staged, slot, full, "k")
    scales = state.scales
    if has_token_scale(ctx.config, "k"):
        scales = OfTokens(request_scales(ctx, scales.k, "k"), scales.v)
    return ConvertState(staged, ring.commit_k(state.ring), scales)


@gluon.jit
def convert_v(ctx, state):
    """The next tile, of V; returns the state after it."""
    ring = producer(ctx)
    ring.acquire_v(state.ring)
    full, slot = ring.get_v(state.ring, expect=False)
    staged = convert_tile(ctx, state.staged, slot, full, "v")
    scales = state.scales
    if has_token_scale(ctx.config, "v"):
        scales = OfTokens(scales.k, request_scales(ctx, scales.v, "v"))
    return ConvertState(staged, ring.commit_v(state.ring), scales)


@gluon.jit
def convert_tile(ctx, staged, slot, full, operand: gl.constexpr):
    """A tile of "k" or "v" of a slot of 8 bits, when it has arrived, into a slot of 16, times the scales of its tokens
    if they have some; hands on both, and returns the state of the next slot of 8 bits."""
    config: gl.constexpr = ctx.config
    cols: gl.constexpr = config.padded_qk_depth if operand == "k" else config.padded_ov_depth
    scaled: gl.constexpr = has_token_scale(config, operand)
    ctx.staged.consumer_wait(staged)
    narrow = key_view(ctx.staged.tile(staged), cols, config).reshape([config.BN, cols])
    wide = key_view(slot, cols, config).reshape([config.BN, cols])
    if scaled:
        async_copy.wait_group(0)
    for i in gl.static_range(config.BN // ROWS):
        if scaled:
            scales = ctx.token_scales.k if operand == "k" else ctx.token_scales.v
            convert_scaled(narrow.slice(i * ROWS, ROWS), wide.slice(i * ROWS, ROWS), scales, i * ROWS)
        else:
            x = narrow.slice(i * ROWS, ROWS).load(rows_layout(cols)).to(gl.float16)
            if wide.dtype == gl.bfloat16:
                x = x.to(gl.float32).to(gl.bfloat16)
            wide.slice(i * ROWS, ROWS).store(x)
    fence_async_shared()
    mbarrier.arrive(full, count=1)
    ctx.staged.consumer_release(staged)
    return staged.step()


@gluon.jit
def convert_scaled(narrow, wide, scales, first: gl.constexpr):
    """Rows from `first` on of a tile, each block of columns times its scale in fp32, rounded once."""
    blocks: gl.constexpr = scales.shape[0]
    cols: gl.constexpr = narrow.shape[1] // blocks
    layout: gl.constexpr = rows_layout(cols)
    for block in gl.static_range(blocks):
        scale = scales.index(block).slice(first, narrow.shape[0]).load(gl.SliceLayout(1, layout))
        x = narrow.slice(block * cols, cols, 1).load(layout).to(gl.float16).to(gl.float32) * scale[:, None]
        wide.slice(block * cols, cols, 1).store(x.to(wide.dtype))


@gluon.constexpr_function
def rows_layout(cols):
    """Registers of some rows: 16 columns of a row in a lane."""
    return gl.BlockedLayout([1, 16], [32 * 16 // cols, cols // 16], [CONVERTING, 1], [1, 0])
