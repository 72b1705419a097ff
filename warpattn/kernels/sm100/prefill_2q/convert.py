"""Two warps that convert 8-bit K and V to 16 bits, between the load and MMA warps.

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
from ...pieces.scales import OfTokens, by_token, has_token_scale
from ..token_scales import convert_exactly, convert_scaled, wait_for_scales
from .context import STAGED, key_view, producer

ROWS = gl.constexpr(16)  # rows at a time: the warps have few registers


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
        state = convert_next(ctx, first_state(ctx), "k")
        for _ in range(1, ctx.run.total):
            state = convert_next(ctx, state, "v")
            state = convert_next(ctx, state, "k")
        convert_next(ctx, state, "v")  # no tile follows
        finish_scales(ctx.config)


@gluon.jit
def first_state(ctx):
    """The state before the first tile."""
    k = ()
    v = ()
    if has_token_scale(ctx.config, "k"):
        k = ctx.scales_of("k").first()
    if has_token_scale(ctx.config, "v"):
        v = ctx.scales_of("v").first()
    return ConvertState(consumer_state(STAGED), producer(ctx).start(), OfTokens(k, v))


@gluon.constexpr_function
def both_scaled(config):
    """1 where tokens of keys and of values have scales, which are requested in turn; else 0."""
    return int(has_token_scale(config, "k") and has_token_scale(config, "v"))


@gluon.jit
def finish_scales(config: gl.constexpr):
    """Waits for the requests after the last tiles, which read nothing."""
    if by_token(config):
        wait_for_scales(0)


@gluon.jit
def convert_next(ctx, state, operand: gl.constexpr, ahead: gl.constexpr = True):
    """The next tile, of "k" or "v"; returns the state after it. `ahead`: the scales of a tile of the other operand were
    requested after its."""
    ring = producer(ctx)
    later: gl.constexpr = both_scaled(ctx.config) if ahead else 0
    if operand == "k":
        ring.acquire_k(state.ring)
        full, slot = ring.get_k(state.ring, expect=False)
    else:
        ring.acquire_v(state.ring)
        full, slot = ring.get_v(state.ring, expect=False)
    staged = convert_tile(ctx, state.staged, slot, full, operand, later)
    scales = request_scales(ctx, state.scales, operand)
    following = ring.commit_k(state.ring) if operand == "k" else ring.commit_v(state.ring)
    return ConvertState(staged, following, scales)


@gluon.jit
def request_scales(ctx, scales, operand: gl.constexpr):
    """Request the next tile's scales if tokens of "k" or "v" have some; returns the state after it."""
    if not has_token_scale(ctx.config, operand):
        return scales
    elif operand == "k":
        return OfTokens(ctx.scales_of(operand).request(scales.k), scales.v)
    else:
        return OfTokens(scales.k, ctx.scales_of(operand).request(scales.v))


@gluon.jit
def convert_tile(ctx, staged, slot, full, operand: gl.constexpr, later: gl.constexpr):
    """A tile of "k" or "v" of a slot of 8 bits, when it has arrived, into a slot of 16, times the scales of its tokens
    if they have some, after which `later` others were requested; hands on both, and returns the state of the next slot
    of 8 bits."""
    config: gl.constexpr = ctx.config
    cols: gl.constexpr = config.padded_qk_depth if operand == "k" else config.padded_ov_depth
    scaled: gl.constexpr = has_token_scale(config, operand)
    shared: gl.constexpr = cols // max(1, config.scale_blocks(operand))
    ctx.staged.consumer_wait(staged)
    narrow = key_view(ctx.staged.tile(staged), cols, config).reshape([config.BN, cols])
    wide = key_view(slot, cols, config).reshape([config.BN, cols])
    if scaled:
        wait_for_scales(later)
    for i in gl.static_range(config.BN // ROWS):
        if scaled:
            scales = ctx.token_scales.k if operand == "k" else ctx.token_scales.v
            convert_scaled(narrow.slice(i * ROWS, ROWS), wide.slice(i * ROWS, ROWS), scales, 0, i * ROWS, 0, shared)
        else:
            convert_exactly(narrow.slice(i * ROWS, ROWS), wide.slice(i * ROWS, ROWS))
    fence_async_shared()
    mbarrier.arrive(full, count=1)
    ctx.staged.consumer_release(staged)
    return staged.step()
