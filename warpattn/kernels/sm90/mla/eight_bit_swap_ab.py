"""Swap-AB with 8-bit latents: the consumer loads them to registers, once as keys and once as values, and converts them
there to fp16 left operands (eight_bit_operands.py has the layouts).

      rotary part ───────────────────────────────────────▶ Sᵀ [128, 16]  + Σ block · Qᵀ × the block's scales ──▶ softmax
      latents [128, 512] of 8 bits, blocks of 128 columns ─┘                                                       │
                                      └──▶ Oᵀ of each block [128, 16] += blockᵀ · Pᵀ, weights times its scales ◀──┘

Two warpgroups form one role. In scores each has 64 keys of a tile, in the output half of every block's columns, so they
add up nothing together; weights go through shared memory anyway. A block is converted while the product of the previous
one runs.

As values, a block's scale is added to its weight's exponent, so each block has its own weights, and a reference of its
own that keeps them within fp16 whatever the scales. A scale per token, or one for all, counts as four equal ones. bf16
queries are divided by a power of two per row. Scales are loaded with the rotary part and share its barrier.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...nvidia.opaque import hide_from_compiler
from ...pieces.combine import to_layout
from ...pieces.softmax import LOWEST
from ..decode.attend_swap_ab import (
    exponents_within,
    masked_scores,
    powers,
    thread_sum,
    with_scale,
)
from ..decode.context import in_tile, rows_of
from ..decode.eight_bit import scaled_blocks
from ..decode.load import block_keys, in_cache
from ..decode.output import write_columns
from .context import TileSlots, half_tile, half_words, rope_tile
from .eight_bit_operands import accumulators, by_rows, in_key_order, key_operand, value_operand
from .recompute import attend_again, owes_nan

BLOCK = gl.constexpr(128)  # columns that share a scale
BLOCKS = gl.constexpr(4)


@gluon.aggregate
class NarrowLatents:
    """Loop state of one item."""

    o: gl.tuple  # each block's output [128, R] fp32, rows in the order of `value_operand`
    most: gl.tuple  # [R] each block's reference of weights, in exponents above m
    m: gl.tensor  # [R] reference maximum of scores
    l: gl.tensor  # [warps, 8, R] this thread's part of the row sums
    power: gl.tensor  # [R] power of two by which each query was divided
    slots: TileSlots


@gluon.jit
def copy_latent_scales(ctx, slot, item, i, pages):
    """Waits for a slot of rotary parts and starts copying the scales of key tile number `i` beside it; the slot's full
    barrier waits for them. Scales past the last key are 0."""
    config: gl.constexpr = ctx.config
    rows = ctx.keys.v
    full = ctx.rings.k.producer_acquire(slot)
    to = ctx.rings.scales.index(slot.index)
    for block in gl.static_range(config.block_n // 32):
        key = block_keys(ctx, item, i, block)
        page = in_cache(ctx, pages[block]).to(gl.int64)
        row = (key % ctx.work.page_size).to(gl.int64)
        at = rows.scale + page * rows.outer + row * rows.row + item.part.head * rows.head
        for part in gl.static_range(BLOCKS):
            into = to.slice(part * config.block_n + block * 32, 32, 0)
            async_copy.async_load(into, at + part * rows.block, mask=key < item.row_tile.length)
    async_copy.mbarrier_arrive(full)


@gluon.jit
def fetch_fractions(ctx, item):
    """Copies queries to shared memory, divided by a power of two per row; returns the powers [R]. Columns
    are permuted as the latents' (`in_key_order`), rotary ones only if keys' rotary parts have 8 bits."""
    config: gl.constexpr = ctx.config
    latent = query_columns(ctx, item, ctx.q.latent, 0, config.dim_v)
    rope = query_columns(ctx, item, ctx.q.rope, ctx.q.rope_column, config.rope)
    top = gl.max(gl.abs(latent), 1)
    of_rope = gl.max(gl.abs(rope), 1)
    top = gl.maximum(top, gl.convert_layout(of_rope, top.type.layout))
    exponent = gl.maximum(gl.minimum((top.to(gl.int32, bitcast=True) >> 23) & 255, 253), 1)
    inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    latent = in_key_order((latent * inverse[:, None]).to(gl.float16), BLOCK)
    rope = rope * gl.convert_layout(inverse, of_rope.type.layout)[:, None]
    gl.barrier()  # all warps have read the previous item's queries
    ctx.rings.q.index(0).store(latent)
    if config.narrow_rope:
        ctx.rings.q_rope.index(0).store(in_key_order(rope.to(gl.float16), config.rope))
    else:
        ctx.rings.q_rope.index(0).store(rope.to(gl.bfloat16))
    fence_async_shared()
    gl.barrier()
    power = (exponent << 23).to(gl.float32, bitcast=True)
    return gl.convert_layout(power, gl.SliceLayout(0, accumulators(config)))


@gluon.jit
def query_columns(ctx, item, queries, column: gl.constexpr, cols: gl.constexpr):
    """Loads columns of the item's queries [R, cols] from `column` on, as fp32; rows past the end are 0."""
    config: gl.constexpr = ctx.config
    lanes: gl.constexpr = min(cols // 8, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [config.attending_warps, 1], [1, 0])
    row = gl.arange(0, config.rows, gl.SliceLayout(1, layout))
    col = column + gl.arange(0, cols, gl.SliceLayout(0, layout))[None, :]
    rows = rows_of(ctx, item, row)
    there = in_tile(ctx, item, row)[:, None] & (col >= 0)
    return gl.load(queries.rows(rows.b, rows.query, rows.h)[:, None] + col, mask=there, other=0.0).to(gl.float32)


@gluon.jit
def no_narrow_keys(config: gl.constexpr, slots, power):
    """The state before an item's first key."""
    layout: gl.constexpr = accumulators(config)
    m = gl.full([config.rows], LOWEST, gl.float32, gl.SliceLayout(0, layout))
    o = gl.zeros([BLOCK, config.rows], gl.float32, layout)
    l = thread_sum(no_scores(config))
    above = gl.zeros_like(m)
    return NarrowLatents((o, o, o, o), (above, above, above, above), m, l, power, slots)


@gluon.jit
def attend_narrow_keys(ctx, state, item, i):
    """Does key tile number `i`: scores, softmax, and P·V."""
    slots = state.slots
    ctx.rings.k.consumer_wait(slots.rope)
    scales = ()
    v_exponents = ()
    for part in gl.static_range(BLOCKS):
        scales += (block_scales(ctx, slots, part),)
        v_exponents += (gl.log2(scales[part]),)
    s = narrow_scores(ctx, slots, scales) * state.power[None, :]
    ctx.rings.k.consumer_release(slots.rope)
    s = masked_scores(ctx, s, item, i)
    x, most, m, l, o = exponents_within(ctx, s, v_exponents, state.most, state.m, state.l, state.o, scaled_blocks)
    for part in gl.static_range(BLOCKS):
        weights = gl.exp2(with_scale(x, v_exponents[part]) - most[part][None, :])
        ctx.rings.p.index(part).permute((1, 0)).store(weights.to(gl.float16))
    l = l + thread_sum(gl.exp2(x))
    fence_async_shared()
    gl.barrier()
    clear_past_end(ctx, slots, item, i)
    o = add_blocks(ctx, o, slots)
    return NarrowLatents(o, most, m, l, state.power, slots.step())


@gluon.jit
def block_scales(ctx, slots, part: gl.constexpr):
    """Loads the scales [N] of block `part` of a tile's columns."""
    keys: gl.constexpr = ctx.config.block_n
    layout: gl.constexpr = gl.SliceLayout(1, accumulators(ctx.config))
    return ctx.rings.scales.index(slots.rope.index).slice(part * keys, keys, 0).load(layout)


@gluon.jit
def narrow_scores(ctx, slots, scales):
    """K·Qᵀ [N, R] of a tile with the divided queries, times the keys' scales. Registers hold two left operands beside
    the one being loaded; each wait synchronises both warpgroups."""
    here = hide_from_compiler(0)  # else the compiler keeps the addresses of all products in registers
    rotary = start_rotary(ctx, slots, here)
    ctx.rings.v.consumer_wait(slots.left)
    first = start_scores(ctx, slots, here, 0)
    second = start_scores(ctx, slots, here, 1)
    first = warpgroup_mma_wait(1, deps=first + rotary)
    s = first[2] * scales[0][:, None] if ctx.config.narrow_rope else first[2]
    s += first[0] * scales[0][:, None]
    ctx.rings.v.consumer_wait(slots.right)
    third = start_scores(ctx, slots, here, 2)
    s += warpgroup_mma_wait(1, deps=second)[0] * scales[1][:, None]
    last = warpgroup_mma_wait(0, deps=third + start_scores(ctx, slots, here, 3))
    return s + last[0] * scales[2][:, None] + last[2] * scales[3][:, None]


@gluon.jit
def start_scores(ctx, slots, here, part: gl.constexpr):
    """Starts K·Qᵀ of block `part` of a tile's latents. Returns (the product [N, R], its left operand)."""
    config: gl.constexpr = ctx.config
    k = key_operand(block_tile(ctx, slots, part), config)
    q = ctx.rings.q.index(here).slice(part * BLOCK, BLOCK, 1).permute((1, 0))
    return warpgroup_mma(k, q, no_scores(config), use_acc=False, is_async=True), k


@gluon.jit
def start_rotary(ctx, slots, here):
    """Starts K·Qᵀ of a tile's rotary part; returns as `start_scores`, but of 16 bits only the product."""
    config: gl.constexpr = ctx.config
    rope = rope_tile(ctx, slots.rope)
    q = ctx.rings.q_rope.index(here).permute((1, 0))
    if config.narrow_rope:
        k = key_operand(rope, config)
        return warpgroup_mma(k, q, no_scores(config), use_acc=False, is_async=True), k
    else:
        return (warpgroup_mma(rope, q, no_scores(config), use_acc=False, is_async=True),)


@gluon.jit
def no_scores(config: gl.constexpr):
    """A zero accumulator of scores [N, R]."""
    return gl.zeros([config.block_n, config.rows], gl.float32, accumulators(config))


@gluon.jit
def block_tile(ctx, slots, part: gl.constexpr):
    """Block `part` [N, 128] of a tile's latents."""
    half = half_tile(ctx, slots.left if part < BLOCKS // 2 else slots.right)
    return half.slice(part % (BLOCKS // 2) * BLOCK, BLOCK, 1)


@gluon.jit
def clear_past_end(ctx, slots, item, i):
    """Zeroes latents past the end of the sequence, because a weight of 0 times NaN is NaN."""
    valid = item.row_tile.length - item.key_tile(i) * ctx.config.block_n
    if valid < ctx.config.block_n:
        clear_half(ctx, slots.left, valid)
        clear_half(ctx, slots.right, valid)
        fence_async_shared()
        gl.barrier()


@gluon.jit
def clear_half(ctx, slot, valid):
    """Zeroes the rows of a half from `valid` on."""
    warps: gl.constexpr = ctx.config.attending_warps
    words = half_words(ctx, slot, gl.int32)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [warps, 1], [1, 0])
    row = gl.arange(0, words.shape[0], gl.SliceLayout(1, layout))[:, None]
    words.store(gl.where(row < valid, words.load(layout), 0))


@gluon.jit
def add_blocks(ctx, o, slots):
    """Adds Vᵀ·P of a tile to the output; releases each half of the latents once it is in registers."""
    here = hide_from_compiler(0)
    first = start_values(ctx, o, slots, here, 0)
    second = start_values(ctx, o, slots, here, 1)
    ctx.rings.v.consumer_release(slots.left)
    first = warpgroup_mma_wait(1, deps=first)
    third = start_values(ctx, o, slots, here, 2)
    second = warpgroup_mma_wait(1, deps=second)
    last = start_values(ctx, o, slots, here, 3)
    ctx.rings.v.consumer_release(slots.right)
    last = warpgroup_mma_wait(0, deps=third + last)
    return first[0], second[0], last[0], last[2]


@gluon.jit
def start_values(ctx, o, slots, here, part: gl.constexpr):
    """Starts adding Vᵀ·P to block `part` of the output. Returns (the accumulator, the left operand)."""
    half = half_words(ctx, slots.left if part < BLOCKS // 2 else slots.right, gl.int16)
    v = value_operand(half.slice(part % (BLOCKS // 2) * (BLOCK // 2), BLOCK // 2, 1), ctx.config)
    return warpgroup_mma(v, ctx.rings.p.index(here + part).permute((1, 0)), o[part], is_async=True), v


@gluon.jit
def finish_blocks(ctx, state, factor, denominator, item):
    """Stores an item's output times `factor` [R], or computes it again if a row has NaN from a latent."""
    config: gl.constexpr = ctx.config
    if config.recomputes:
        marks = (state.o[0] + state.o[1] + state.o[2] + state.o[3]) * 0.0
        if owes_nan(marks, denominator.l[None, :]):
            attend_again(ctx, item, 0, 2)
        else:
            write_blocks(ctx, state, factor, denominator, item)
    else:
        write_blocks(ctx, state, factor, denominator, item)


@gluon.jit
def write_blocks(ctx, state, factor, denominator, item):
    """Stores the blocks of an item's output times `factor` [R]."""
    scaled = scaled_blocks(state.o, powers(state.most))
    for part in gl.static_range(BLOCKS):
        o = by_rows(scaled[part] * factor[None, :])
        own = to_layout(denominator, gl.SliceLayout(1, o.type.layout))
        write_columns(ctx, o, own, item, gl.to_tensor(0), part * BLOCK)
