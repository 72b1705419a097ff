"""The consumer warpgroups of Hopper's latent attention: one computes P of every key tile; the other two add P·V to O,
half of the output's columns each.

      tile             0                  1                  2
      scores           Q·K   softmax      Q·K   softmax      Q·K   softmax
      values, left                 P·V left           P·V left           P·V left
      values, right                P·V right          P·V right          P·V right

O [64, 512] would take 256 registers a thread of one warpgroup, so two share it, and both need all of P as the left
operand of their own P·V. They get P through shared memory: it overwrites the tile's rotary columns, which nothing reads
after the scores. Beside it are the factors that rescale O to the tile's reference maxima. An item's maxima and row sums
follow after its last tile, while the scores of the next item begin.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...nvidia.opaque import hide_from_compiler
from ...nvidia.pipelines import consumer_state, producer_state
from ...pieces.modifiers import exponent_scale, natural_scale
from ...pieces.softmax import (
    SoftmaxState,
    as_quads,
    lane_sum,
    pack,
    rescale,
    softmax_finish,
    unpack,
    warp_any,
)
from ..decode.attend import decode_scores
from ..decode.context import in_tile, rows_of
from ..decode.output import by_row, publish_parts, write_columns
from ..decode.schedule import item_at, next_item
from ..layouts import accumulator_layout, element_type
from ..softmax_steps import exact_step, limit, maximum_step
from .context import half_tile, rope_tile, tile_slots
from .recompute import attend_again, owes_nan

COLUMNS = gl.constexpr(128)  # output columns of a product: one of 256 needs more registers than 512 threads can have


@gluon.jit
def scores_role(ctx):
    """Computes P of every work item of this CTA's range, and its row maxima and sums."""
    config: gl.constexpr = ctx.config
    slots = tile_slots(config, consumer_state)
    place = producer_state(1)
    cursor = ctx.start
    while cursor.unit < ctx.end:
        item = item_at(ctx, cursor)
        fetch_queries(ctx, item)
        softmax = no_keys(ctx)
        for i in range(item.begin, item.end):
            softmax = make_probabilities(ctx, softmax, slots, item, i)
            slots = slots.step()
        place = hand_over_sums(ctx, place, softmax)
        cursor = next_item(cursor, item, ctx.work.heads)


@gluon.jit
def values_role(ctx, half: gl.constexpr):
    """Computes 256 output columns of every work item of this CTA's range."""
    config: gl.constexpr = ctx.config
    slots = tile_slots(config, consumer_state)
    place = consumer_state(1)
    cursor = ctx.start
    while cursor.unit < ctx.end:
        item = item_at(ctx, cursor)
        if half == 0:
            publish_parts(ctx, item)
        o = no_values(config)
        for _ in range(item.begin, item.end):
            o = add_values(ctx, o, slots, half)
            slots = slots.step()
        softmax = take_sums(ctx, place, o)
        place = place.step()
        finish_half(ctx, o, softmax, item, half)
        cursor = next_item(cursor, item, ctx.work.heads)


@gluon.jit
def make_probabilities(ctx, softmax, slots, item, i):
    """Writes P of key tile number `i` (in `slots`) and rescaling factors to shared memory."""
    rings = ctx.rings
    dtype: gl.constexpr = element_type(ctx.config.element)
    s = decode_scores(ctx, latent_scores(ctx, slots), item, i)
    if ctx.mods.score is not None:
        softmax, p, _, alpha = exact_step(softmax, s, exponent_scale(ctx))
    else:
        softmax, p, _, alpha = maximum_step(softmax, s, exponent_scale(ctx))
    rings.factors.tile(slots.rope).store(alpha)
    shared_p(ctx, slots.rope).store(unpack(pack(p, dtype), dtype))
    fence_async_shared()
    rings.factors.producer_commit(slots.rope)
    return softmax


@gluon.jit
def latent_scores(ctx, slots):
    """Q·Kᵀ [64, N] of a tile; multiplies each part of the tile once it has arrived."""
    config: gl.constexpr = ctx.config
    rings = ctx.rings
    here = hide_from_compiler(0)  # known addresses would take two registers for each of 36 wgmmas, and spill
    s = gl.zeros([config.rows, config.block_n], gl.float32, accumulator_layout(config.block_n))
    rings.v.consumer_wait(slots.left)
    left = half_tile(ctx, slots.left).permute((1, 0))
    s = warpgroup_mma(rings.q.index(here), left, s, use_acc=False, is_async=True)
    rings.v.consumer_wait(slots.right)
    s = warpgroup_mma(rings.q.index(here + 1), half_tile(ctx, slots.right).permute((1, 0)), s, is_async=True)
    rings.k.consumer_wait(slots.rope)
    s = warpgroup_mma(rings.q_rope.index(here), rope_tile(ctx, slots.rope).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=(s,))


@gluon.jit
def add_values(ctx, o, slots, half: gl.constexpr):
    """Adds P·V of a tile to this warpgroup's O; releases its latents."""
    rings = ctx.rings
    slot = slots.left if half == 0 else slots.right
    rings.factors.consumer_wait(slots.rope)
    rings.v.consumer_wait(slot)
    left, right = o
    alpha = row_numbers(rings.factors.tile(slots.rope), left)
    if warp_any(-alpha, gl.zeros_like(alpha) - 1.0):
        left = rescale(left, alpha)
        right = rescale(right, alpha)
    p = shared_p(ctx, slots.rope)
    v = half_tile(ctx, slot)
    left = warpgroup_mma(p, v.slice(0, COLUMNS, 1), left, is_async=True)
    right = warpgroup_mma(p, v.slice(COLUMNS, COLUMNS, 1), right, is_async=True)
    left, right = warpgroup_mma_wait(0, deps=(left, right))
    rings.v.consumer_release(slot)
    rings.k.consumer_release(slots.rope)
    return left, right


@gluon.jit
def shared_p(ctx, slot):
    """The memory of P [64, N], which was that of rotary columns."""
    config: gl.constexpr = ctx.config
    dtype: gl.constexpr = element_type(config.element)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([config.rows, config.block_n], dtype)
    return ctx.rings.k.tile(slot).reinterpret(dtype, [config.rows, config.block_n], layout)


@gluon.jit
def hand_over_sums(ctx, place, softmax):
    """Sends an item's maxima and row sums to the other warpgroups."""
    sums = ctx.rings.sums
    sums.producer_acquire(place)
    sums.tile(place, 0).store(softmax.m)
    sums.tile(place, 1).store(softmax.l)
    sums.producer_commit(place)
    return place.step()


@gluon.jit
def take_sums(ctx, place, o):
    """Receives an item's softmax state, in the layout of its output `o`."""
    sums = ctx.rings.sums
    sums.consumer_wait(place)
    m, l = row_numbers(sums.tile(place, 0), o[0]), row_numbers(sums.tile(place, 1), o[0])
    sums.consumer_release(place)
    return SoftmaxState(m, l, ())


@gluon.jit
def row_numbers(tile, o):
    """Loads four numbers per row [64, 4] into the lanes that have the row in accumulator `o`."""
    quads = as_quads(o)
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, quads.type.layout))
    return tile.load(rows)


@gluon.jit
def fetch_queries(ctx, item):
    """Copies queries to shared memory; rows past the end are 0."""
    config: gl.constexpr = ctx.config
    gl.barrier()  # all warps have read the previous item's queries
    copy_queries(ctx, item, ctx.q.rope, ctx.rings.q_rope.index(0), ctx.q.rope_column, config.rope)
    for half in gl.static_range(2):
        copy_queries(ctx, item, ctx.q.latent, ctx.rings.q.index(half), half * config.half, config.half)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    gl.barrier()


@gluon.jit
def copy_queries(ctx, item, queries, tile, column: gl.constexpr, cols: gl.constexpr):
    """Copies columns of `queries` from `column` on into a tile [64, cols]."""
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
def no_keys(ctx):
    """The softmax state before any key."""
    config: gl.constexpr = ctx.config
    scores = gl.zeros([config.rows, config.block_n], gl.float32, accumulator_layout(config.block_n))
    zero = lane_sum(as_quads(scores))
    if ctx.mods.score is not None:
        return SoftmaxState(zero - float("inf"), zero, ())
    else:
        return SoftmaxState(zero - float("inf"), zero, limit(False, False))


@gluon.jit
def no_values(config: gl.constexpr):
    """Zero accumulators of half of the output's columns, in blocks [64, 128]."""
    block = gl.zeros([config.rows, COLUMNS], gl.float32, accumulator_layout(COLUMNS))
    return block, block


@gluon.jit
def finish_half(ctx, o, softmax, item, half: gl.constexpr):
    """Normalises and stores half of an item's columns: blocks of O [64, 128] with a softmax state."""
    config: gl.constexpr = ctx.config
    factor, denominator = softmax_finish(softmax, natural_scale(ctx))
    o = rescale(o[0], factor), rescale(o[1], factor)
    if config.recomputes:
        marks = lane_sum(as_quads(o[0] * 0.0)) + lane_sum(as_quads(o[1] * 0.0))
        if owes_nan(marks, gl.convert_layout(denominator.l, marks.type.layout, assert_trivial=True)):
            attend_again(ctx, item, half, 1)
        else:
            write_half(ctx, o, denominator, item, half)
    else:
        write_half(ctx, o, denominator, item, half)


@gluon.jit
def write_half(ctx, o, denominator, item, half: gl.constexpr):
    """Stores half of an item's columns, normalised; `denominator` [64, 4]."""
    denominator = by_row(denominator, accumulator_layout(COLUMNS))
    for block in gl.static_range(2):
        write_columns(
            ctx, o[block], denominator, item, gl.to_tensor(0), half * ctx.config.half + block * COLUMNS
        )
