"""Consumer warpgroups of the Hopper kernel for latent attention: scores of every other key tile, half of the output's
columns.

      tile          0                      1                      2
      warpgroup 0   Q·K  softmax  P·V left       Q·K   P(1)·V left   softmax  P·V left
      warpgroup 1         Q·K   P(0)·V right   softmax  P·V right         Q·K  P(2)·V right …

Both need every probability as the left operand of their own P·V. The warpgroup that makes them writes them to shared
memory over the tile's rotary columns, which nothing reads after the scores, and with them a mark: their reference
maximum, and the factor that rescales earlier results to it. The next tile's maker goes on from that mark, so all tiles
of an item share one reference, and only the sums stay separate until the end. A maker overwrites its mark two tiles
later, when it has the other's next mark, which the other makes after it has read this one.

A warpgroup's products of scores run together with those of the other one's probabilities, and its softmax beside the
latter. Both fill the queries' shared memory, each with half of the latent columns. They meet before, since both read
all of it, and after.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...nvidia.opaque import hide_from_compiler
from ...nvidia.pipelines import PipelineState
from ...pieces.modifiers import exponent_scale, natural_scale
from ...pieces.softmax import (
    SoftmaxState,
    as_quads,
    lane_max,
    lane_sum,
    pack,
    rescale,
    softmax_finish,
    softmax_step,
    unpack,
    warp_any,
)
from ..decode.attend import decode_scores
from ..decode.context import in_tile, rows_of
from ..decode.output import by_row, publish_parts, write_columns
from ..decode.schedule import item_at, next_item
from ..exact_softmax import exact_step
from ..layouts import accumulator_layout, element_type, operand_layout, turn_asm
from .recompute import attend_again, owes_nan


@gluon.aggregate
class MlaProgress:
    """Loop state of one item."""

    o: gl.tensor  # [64, 256] fp32
    softmax: SoftmaxState  # the common reference; sums over this warpgroup's tiles


@gluon.jit
def attend_role(ctx, half: gl.constexpr):
    """Attend for every item of this CTA's range, columns 256 * `half` and on."""
    config: gl.constexpr = ctx.config
    done = gl.to_tensor(0)
    cursor = ctx.start
    while cursor.unit < ctx.end:
        item = item_at(ctx, cursor)
        if half == 0:
            publish_parts(ctx, item)
        fetch_queries(ctx, item, half)
        o = gl.zeros([config.rows, config.half], gl.float32, accumulator_layout(config.half))
        state = MlaProgress(o, no_keys(config))
        own = item.begin + ((done + half) & 1)
        if own == item.begin:
            state = attend_own(ctx, state, item, own, hide_from_compiler(done), half, False)
            own += 2
        for i in range(own, item.end, 2):
            state = attend_own(ctx, state, item, i, hide_from_compiler(done + i - item.begin), half, True)
        done += item.end - item.begin
        if ((done + half) & 1) == 0:
            state = attend_last(ctx, state, done - 1, half)
        finish_half(ctx, state.o, whole_sums(ctx, state.softmax, half), item, half)
        cursor = next_item(cursor, item, ctx.work.heads)


@gluon.jit
def slot_of(number, config: gl.constexpr):
    """The slot and phase of tile `number` of this CTA."""
    return PipelineState(number % config.stages, (number // config.stages) & 1, config.stages)


@gluon.jit
def attend_own(ctx, state, item, i, number, half: gl.constexpr, follows: gl.constexpr):
    """Key tile number `i` of the item, `number` of the CTA, whose probabilities this warpgroup makes; and, if it
    `follows` one, the other warpgroup's tile before it."""
    config: gl.constexpr = ctx.config
    dtype: gl.constexpr = element_type(config.element)
    keys = slot_of(number, config)
    ctx.rings.keys.consumer_wait(keys)
    s = start_scores(ctx, keys)
    before = slot_of(number - 1, config)
    o = state.o
    softmax = state.softmax
    if follows:
        o, softmax = take_mark(ctx, state, number - 1, half)
        o = start_values(ctx, o, shared_p(ctx, before), before, half)
        s = warpgroup_mma_wait(1, deps=(s,))
        o = warpgroup_mma_wait(0, deps=(o,))
        ctx.rings.keys.consumer_release(before)
    else:
        s = warpgroup_mma_wait(0, deps=(s,))
    s = decode_scores(ctx, s, item, i)
    if ctx.mods.score is not None:
        softmax, p, moved, alpha = exact_step(softmax, s, exponent_scale(ctx))
    else:
        softmax, p, moved, alpha = softmax_step(softmax, s, exponent_scale(ctx))
    p = unpack(pack(p, dtype), dtype)
    ctx.rings.marks.index(2 * half).store(softmax.m)
    ctx.rings.marks.index(2 * half + 1).store(alpha)
    shared_p(ctx, keys).store(p)
    fence_async_shared()
    mbarrier.arrive(ctx.rings.ready.index(half), count=1)
    if moved:
        o = rescale(o, alpha)
    p = gl.convert_layout(p, operand_layout(config.half), assert_trivial=True)
    o = start_values(ctx, o, p, keys, half)
    o = warpgroup_mma_wait(0, deps=(o, p))[0]
    ctx.rings.keys.consumer_release(keys)
    return MlaProgress(o, softmax)


@gluon.jit
def attend_last(ctx, state, number, half: gl.constexpr):
    """An item's last tile, if it is the other warpgroup's."""
    keys = slot_of(number, ctx.config)
    o, softmax = take_mark(ctx, state, number, half)
    o = start_values(ctx, o, shared_p(ctx, keys), keys, half)
    o = warpgroup_mma_wait(0, deps=(o,))
    ctx.rings.keys.consumer_release(keys)
    return MlaProgress(o, softmax)


@gluon.jit
def take_mark(ctx, state, number, half: gl.constexpr):
    """(O, softmax state) under the reference of the other warpgroup's tile `number`, after its probabilities."""
    keys = slot_of(number, ctx.config)
    mbarrier.wait(ctx.rings.ready.index(1 - half), (number >> 1) & 1)
    ctx.rings.keys.consumer_wait(keys)
    layout: gl.constexpr = state.softmax.m.type.layout
    m = ctx.rings.marks.index(2 * (1 - half)).load(layout)
    alpha = ctx.rings.marks.index(2 * (1 - half) + 1).load(layout)
    o = state.o
    if warp_any(-alpha, gl.zeros_like(alpha) - 1.0):
        o = rescale(o, alpha)
    return o, SoftmaxState(m, state.softmax.l * alpha)


@gluon.jit
def shared_p(ctx, keys):
    """The probabilities [64, N] of the tile in a slot, over its rotary columns."""
    config: gl.constexpr = ctx.config
    dtype: gl.constexpr = element_type(config.element)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([config.rows, config.block_n], dtype)
    return ctx.rings.rope.index(keys.index).reinterpret(dtype, [config.rows, config.block_n], layout)


@gluon.jit
def start_values(ctx, o, p, keys, half: gl.constexpr):
    """Start O += P·V with this warpgroup's columns of the tile in a slot."""
    config: gl.constexpr = ctx.config
    values = ctx.rings.keys.tile(keys, half).reshape([config.block_n, config.half])
    return warpgroup_mma(p, values, o, is_async=True)


@gluon.jit
def whole_sums(ctx, softmax, half: gl.constexpr):
    """The state with the sums of both warpgroups."""
    ctx.rings.sums.index(half).store(softmax.l)
    meet(half)
    return SoftmaxState(softmax.m, softmax.l + ctx.rings.sums.index(1 - half).load(softmax.l.type.layout))


@gluon.jit
def meet(half: gl.constexpr):
    """Wait for the other warpgroup: the right one arrives at a named barrier where the left one waits, which then
    arrives at the one where the right one waits; so neither can arrive twice before the other has gone on."""
    if half == 0:
        gl.inline_asm(turn_asm("sync", 2))
        gl.inline_asm(turn_asm("arrive", 3))
    else:
        gl.inline_asm(turn_asm("arrive", 2))
        gl.inline_asm(turn_asm("sync", 3))


@gluon.jit
def fetch_queries(ctx, item, half: gl.constexpr):
    """The item's queries to shared memory; rows past the end are 0."""
    config: gl.constexpr = ctx.config
    meet(half)  # both have read the queries of the item before
    copy_queries(ctx, item, ctx.q.latent, ctx.rings.q.index(half), half * config.half, config.half)
    if half == 0:
        copy_queries(ctx, item, ctx.q.rope, ctx.rings.q_rope.index(0), ctx.q.rope_column, config.rope)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    meet(half)


@gluon.jit
def copy_queries(ctx, item, queries, tile, column: gl.constexpr, cols: gl.constexpr):
    """Columns of a matrix from `column` on into a tile [64, cols]."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // cols, cols // 8], [4, 1], [1, 0])
    row = gl.arange(0, config.rows, gl.SliceLayout(1, layout))
    col = column + gl.arange(0, cols, gl.SliceLayout(0, layout))[None, :]
    rows = rows_of(ctx, item, row)
    there = in_tile(ctx, item, row)[:, None]
    token = rows.token
    if config.schedule.ragged:
        token = rows.query
    at = queries.rows(rows.b, token, rows.h)[:, None] + col
    async_copy.async_load(tile, at, mask=there & (col >= 0))


@gluon.jit
def no_keys(config: gl.constexpr):
    """The softmax state before any key."""
    layout: gl.constexpr = accumulator_layout(config.block_n)
    quads = as_quads(gl.zeros([config.rows, config.block_n], gl.float32, layout))
    return SoftmaxState(lane_max(quads) - float("inf"), lane_sum(quads))


@gluon.jit
def start_scores(ctx, keys):
    """Start S = Q·Kᵀ with the tile of a slot; the result may be read after a wait."""
    config: gl.constexpr = ctx.config
    s = gl.zeros([config.rows, config.block_n], gl.float32, accumulator_layout(config.block_n))
    here = hide_from_compiler(0)  # known addresses would cost two registers for each of 36 products, and spill
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
    factor, denominator = softmax_finish(softmax, natural_scale(ctx))
    o = rescale(o, factor)
    if config.recomputes:
        marks = lane_sum(as_quads(o * 0.0))
        if owes_nan(marks, gl.convert_layout(denominator.l, marks.type.layout, assert_trivial=True)):
            attend_again(ctx, item, half, 1)
        else:
            write_half(ctx, o, denominator, item, half)
    else:
        write_half(ctx, o, denominator, item, half)


@gluon.jit
def write_half(ctx, o, denominator, item, half: gl.constexpr):
    """Write half of the columns of an item [64, 256], normalised; `denominator` [64, 4]."""
    config: gl.constexpr = ctx.config
    denominator = by_row(denominator, accumulator_layout(config.half))
    write_columns(ctx, o, denominator, item, gl.to_tensor(0), half * config.half)
