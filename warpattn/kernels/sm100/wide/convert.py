"""Two warps of Blackwell's kernel for wide heads that convert 8-bit K and V to 16 bits.

      load ── TMA ──▶ [ 8 bits ] ── LDS, convert, STS ──▶ [ 16 bits ] ──▶ MMA
                      2 slots       registers             3 slots

Tiles keep their order, K0, K1, V0, K2, V1, … The scales of a tile's tokens are requested behind the conversion of the
one before it of the same operand, those of V0 behind those of K1: so between a request and its use is one of the other
operand, but for K0 and for the last values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mbarrier

from ...nvidia.pipelines import PipelineState, consumer_state, producer_state
from ...pieces.scales import OfTokens, has_token_scale
from ..prefill_2q.convert import both_scaled, finish_scales, request_scales
from ..token_scales import CHUNK, convert_exactly, convert_scaled, wait_for_scales

ROWS = gl.constexpr(16)  # rows at a time: the warps have few registers


@gluon.aggregate
class ConvertState:
    """The next slots, of 8 bits and of 16, and the requests of scales."""

    staged: PipelineState
    ring: PipelineState
    scales: OfTokens  # `NextScales`; () where tokens have none, and of values before their first request


@gluon.jit
def convert_role(ctx):
    """Converts every tile of the run."""
    config: gl.constexpr = ctx.config
    if ctx.run.total > 0:
        scales = OfTokens(first_request(ctx, "k"), ())
        state = ConvertState(consumer_state(config.staged), producer_state(config.stages), scales)
        state = convert_next(ctx, state, "k", 0)
        state = ConvertState(state.staged, state.ring, OfTokens(state.scales.k, first_request(ctx, "v")))
        others: gl.constexpr = both_scaled(config)
        for _ in range(1, ctx.run.total):
            state = convert_next(ctx, state, "k", others)
            state = convert_next(ctx, state, "v", others)
        convert_next(ctx, state, "v", 0)  # no keys follow
        finish_scales(config)


@gluon.jit
def first_request(ctx, operand: gl.constexpr):
    """The request of the scales of the first tile of "k" or "v"; () where tokens have none."""
    if has_token_scale(ctx.config, operand):
        return ctx.scales_of(operand).first()
    else:
        return ()


@gluon.jit
def convert_next(ctx, state, operand: gl.constexpr, later: gl.constexpr):
    """The next tile, of "k" or "v", into the ring, after whose scales `later` others were requested; returns the state
    after it."""
    config: gl.constexpr = ctx.config
    blocks: gl.constexpr = config.k_blocks if operand == "k" else config.v_blocks
    half: gl.constexpr = config.half
    cols: gl.constexpr = columns_at_once(config, operand)
    full = ctx.keys.producer_acquire(state.ring)
    ctx.staged.consumer_wait(state.staged)
    if has_token_scale(config, operand):
        wait_for_scales(later)
    for block in gl.static_range(blocks):
        narrow = ctx.staged.tile(state.staged, block).reshape([config.BN, config.half])
        wide = ctx.keys.tile(state.ring, block).reshape([config.BN, config.half])
        for column in gl.static_range(0, half, cols):
            convert_columns(ctx, narrow, wide, operand, block * half, column)
    fence_async_shared()
    mbarrier.arrive(full, count=1)
    ctx.staged.consumer_release(state.staged)
    return ConvertState(state.staged.step(), state.ring.step(), request_scales(ctx, state.scales, operand))


@gluon.constexpr_function
def columns_at_once(config, operand):
    """Columns that are converted at once: at most those with one scale."""
    return min(CHUNK.value, config.shared_columns(operand))


@gluon.jit
def convert_columns(ctx, narrow, wide, operand: gl.constexpr, before: gl.constexpr, column: gl.constexpr):
    """Columns of a block [BN, 256] that have one scale, from `column` on; `before`: those of the blocks before it. Past
    the head dim are zeros, for which the last scale serves."""
    config: gl.constexpr = ctx.config
    cols: gl.constexpr = columns_at_once(config, operand)
    rows: gl.constexpr = config.BN
    scaled: gl.constexpr = has_token_scale(config, operand)
    number: gl.constexpr = min((before + column) // config.shared_columns(operand), config.scale_blocks(operand) - 1)
    for first in gl.static_range(0, rows, ROWS):
        some = narrow.slice(first, ROWS).slice(column, cols, 1)
        to = wide.slice(first, ROWS).slice(column, cols, 1)
        if scaled:
            scales = ctx.token_scales.k if operand == "k" else ctx.token_scales.v
            convert_scaled(some, to, scales, number, first, 0, cols)
        else:
            convert_exactly(some, to)
