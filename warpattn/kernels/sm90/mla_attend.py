"""Consumer warpgroup of the Hopper kernel for latent attention: all scores, half of the output's columns.

      warpgroup 0   Q·K(i)         softmax  P·V(i) left             Q·K(i+1) …
      warpgroup 1           Q·K(i)          softmax  P·V(i) right            Q·K(i+1) …

Both need every probability as the left operand of their own P·V, and the scores for it are 64 × 64 a tile: computing
them twice costs a third of the products and saves an exchange through shared memory for which there is no room. They
take turns, so that the tensor core has one's products while the other is at its exponentials.

Queries lie in shared memory that both fill, each with a half of the latent columns. They meet before, since both read
all of it, and after.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..nvidia.pipelines import PipelineState, consumer_state
from ..pieces.combine import normalise
from ..pieces.softmax import SoftmaxState, as_quads, lane_max, lane_sum, pack, rescale, softmax_step, unpack
from .compute import exponent_scale, turn_pass, turn_wait
from .decode_attend import decode_scores
from .decode_context import item_at, rows_of
from .decode_output import write_rows
from .layouts import accumulator_layout, element_type, operand_layout, turn_asm


@gluon.aggregate
class MlaProgress:
    """Loop state of one item."""

    o: gl.tensor  # [64, 256] fp32
    softmax: SoftmaxState
    keys: PipelineState


@gluon.jit
def mla_attend_role(ctx, half: gl.constexpr):
    """Attend for every item of this CTA's run, columns 256 * `half` and on."""
    config: gl.constexpr = ctx.config
    keys = consumer_state(config.stages)
    place = ctx.start
    if half == config.consumers - 1:
        turn_pass(half, config)
    while place.unit < ctx.end:
        item = item_at(ctx, place)
        fetch_queries(ctx, item, half)
        o = gl.zeros([config.rows, config.half], gl.float32, accumulator_layout(config.half))
        state = MlaProgress(o, no_keys(config), keys)
        for i in range(item.begin, item.end):
            state = attend_keys(ctx, state, item, i, half)
        finish_half(ctx, state.o, state.softmax, item, half)
        keys = state.keys
        place = place.advance(item.part.count, item.room * ctx.work.heads)


@gluon.jit
def meet(half: gl.constexpr):
    """Wait for the other warpgroup: the right one comes to a named barrier that the left one waits at, which then comes
    to the one that the right one waits at; so none can come twice before the other has gone on."""
    if half == 0:
        gl.inline_asm(turn_asm("sync", 2, 2))
        gl.inline_asm(turn_asm("arrive", 3, 2))
    else:
        gl.inline_asm(turn_asm("arrive", 2, 2))
        gl.inline_asm(turn_asm("sync", 3, 2))


@gluon.jit
def fetch_queries(ctx, item, half: gl.constexpr):
    """The item's queries to shared memory; rows past the end are 0."""
    config: gl.constexpr = ctx.config
    meet(half)  # nobody reads the queries of the item before any more
    copy_queries(ctx, item, ctx.rings.q.index(half), half * config.half, config.half)
    if half == 0:
        copy_queries(ctx, item, ctx.rings.q_rope.index(0), config.dim_v, config.rope)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    meet(half)


@gluon.jit
def copy_queries(ctx, item, tile, column: gl.constexpr, cols: gl.constexpr):
    """Columns from `column` on into a tile [64, cols]."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // cols, cols // 8], [4, 1], [1, 0])
    row = gl.arange(0, config.rows, gl.SliceLayout(1, layout))
    col = column + gl.arange(0, cols, gl.SliceLayout(0, layout))[None, :]
    rows = rows_of(ctx, item, row)
    there = (item.entry.row + row < ctx.work.tokens * ctx.work.group)[:, None]
    at = ctx.q.rows(rows.b, rows.token, rows.h)[:, None] + col
    async_copy.async_load(tile, at, mask=there & (col >= 0))


@gluon.jit
def no_keys(config: gl.constexpr):
    """The softmax state before any key."""
    layout: gl.constexpr = accumulator_layout(config.block_n)
    quads = as_quads(gl.zeros([config.rows, config.block_n], gl.float32, layout))
    return SoftmaxState(lane_max(quads) - float("inf"), lane_sum(quads))


@gluon.jit
def attend_keys(ctx, state, item, i, half: gl.constexpr):
    """Key tile number `i`: scores, softmax, and its part of the output."""
    config: gl.constexpr = ctx.config
    dtype: gl.constexpr = element_type(config.dtype)
    ctx.rings.keys.consumer_wait(state.keys)
    turn_wait(half, config)
    s = start_scores(ctx, state.keys)
    turn_pass(half, config)
    s = warpgroup_mma_wait(0, deps=(s,))
    s = decode_scores(ctx, s, item, i)
    softmax, p, moved, alpha = softmax_step(state.softmax, s, exponent_scale(ctx))
    p = unpack(pack(p, dtype), dtype)
    o = state.o
    if moved:
        o = rescale(o, alpha)
    values = ctx.rings.keys.tile(state.keys, half).reshape([config.block_n, config.half])
    p = gl.convert_layout(p, operand_layout(config.half), assert_trivial=True)
    o = warpgroup_mma(p, values, o, is_async=True)
    o = warpgroup_mma_wait(0, deps=(o, p))[0]
    ctx.rings.keys.consumer_release(state.keys)
    return MlaProgress(o, softmax, state.keys.step())


@gluon.jit
def opaque(x):
    """An int32 that the compiler cannot look into. Queries at addresses it knows cost two registers for each of 36
    products, kept across key tiles, and there are not that many."""
    return gl.inline_asm("mov.u32 $0, $1;", "=r,r", [x], gl.int32)


@gluon.jit
def start_scores(ctx, keys):
    """Start S = Q·Kᵀ with the tile of a slot; the result may be read after a wait."""
    config: gl.constexpr = ctx.config
    s = gl.zeros([config.rows, config.block_n], gl.float32, accumulator_layout(config.block_n))
    here = opaque(0)
    rope = ctx.rings.rope.index(keys.index).reshape([config.block_n, config.rope]).permute((1, 0))
    s = warpgroup_mma(ctx.rings.q_rope.index(here), rope, s, use_acc=False, is_async=True)
    for part in gl.static_range(2):
        tile = ctx.rings.keys.tile(keys, part).reshape([config.block_n, config.half]).permute((1, 0))
        s = warpgroup_mma(ctx.rings.q.index(here + part), tile, s, is_async=True)
    return s


@gluon.jit
def finish_half(ctx, o, softmax, item, half: gl.constexpr):
    """Write half of the columns of an item: O [64, 256] accumulated under a softmax state."""
    config: gl.constexpr = ctx.config
    factor, lse = normalise(softmax, exponent_scale(ctx))
    o = rescale(o, factor)
    lse = gl.convert_layout(gl.max(lse, 1), gl.SliceLayout(1, accumulator_layout(config.half)))
    part = item.part
    if part.splits == 1:
        write_rows(ctx, o, lse, item, gl.to_tensor(0), half * config.half)
    else:
        number = part.number(gl.program_id(0), config.invariant)
        ctx.results.partials.store(part.slot(number, config.invariant), o, lse, half * config.half)
