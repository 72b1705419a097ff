"""Latents of 8 bits as left operands: converted to fp16 in registers, once as keys and once as values, and written
nowhere (decode/eight_bit.py has the layouts).

      rotary part ──────────────────────────────────────▶ Sᵀ [64, 16]  + Σ block · Qᵀ × the block's scales ──▶ softmax
      latents [64, 512] of 8 bits, blocks of 128 columns ─┘                                                      │
                                     └──▶ Oᵀ of each block [128, 16] += blockᵀ · Pᵀ, weights times its scales ◀──┘

A scale of a key's block is part of the exponent of its weight, so each block has weights of its own, and references of
their own, which keep them within fp16 whatever scales are. Scales of a token or of all of them are those of four
blocks. Queries of bf16 become fractions of their row's power of two. Scales arrive with the rotary part in its slot.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...nvidia.opaque import hide_from_compiler
from ...pieces.softmax import LOWEST
from ..decode.attend_swap_ab import any_exceeds, exponents, masked_scores, powers, raised, thread_sum
from ..decode.context import in_tile, rows_of
from ..decode.eight_bit import block_scales, in_key_order, keys_product, values_product
from ..decode.load import block_keys, in_cache
from ..finite import clear_outside
from ..layouts import accumulator_layout
from .attend import write_columns
from .context import TileSlots, half_tile, rope_tile

BLOCK = gl.constexpr(128)  # columns of a scale
BLOCKS = gl.constexpr(4)


@gluon.aggregate
class NarrowLatents:
    """Loop state of one item; columns of a block of the output are in the order of `values_product`."""

    o: gl.tuple  # of each block [128, R] fp32
    most: gl.tuple  # [R] of each block: reference of its weights
    m: gl.tensor  # [R], of the sums
    l: gl.tensor  # [4, 8, R]
    power: gl.tensor  # [R], of the queries
    slots: TileSlots


@gluon.jit
def copy_latent_scales(ctx, slot, item, i, pages):
    """Start to copy the scales of key tile number `i` to a slot of rotary parts, when it is free; its barrier waits for
    them. Past the last key they are 0."""
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
    """The item's queries to shared memory, as fractions of a power of two of each row, latent columns in the order of
    the latents as operands, those of rotary parts, too, if these have 8 bits. Returns the powers [R]."""
    config: gl.constexpr = ctx.config
    latent = query_columns(ctx, item, ctx.q.latent, 0, config.dim_v)
    rope = query_columns(ctx, item, ctx.q.rope, ctx.q.rope_column, config.rope)
    top = gl.max(gl.abs(latent), 1)
    of_rope = gl.max(gl.abs(rope), 1)
    top = gl.maximum(top, gl.convert_layout(of_rope, top.type.layout))
    exponent = gl.maximum(gl.minimum((top.to(gl.int32, bitcast=True) >> 23) & 255, 253), 1)
    inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    latent = in_key_order((latent * inverse[:, None]).to(gl.float16))
    rope = rope * gl.convert_layout(inverse, of_rope.type.layout)[:, None]
    gl.barrier()  # all warps have read the queries of the item before
    ctx.rings.q.index(0).store(latent)
    if config.narrow_rope:
        ctx.rings.q_rope.index(0).store(in_key_order(rope.to(gl.float16)))
    else:
        ctx.rings.q_rope.index(0).store(rope.to(gl.bfloat16))
    fence_async_shared()
    gl.barrier()
    power = (exponent << 23).to(gl.float32, bitcast=True)
    return gl.convert_layout(power, gl.SliceLayout(0, accumulator_layout(config.rows)))


@gluon.jit
def query_columns(ctx, item, queries, column: gl.constexpr, cols: gl.constexpr):
    """Columns of the item's queries [R, cols] from `column` on, fp32; rows past the end are 0."""
    config: gl.constexpr = ctx.config
    lanes: gl.constexpr = min(cols // 8, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    row = gl.arange(0, config.rows, gl.SliceLayout(1, layout))
    col = column + gl.arange(0, cols, gl.SliceLayout(0, layout))[None, :]
    rows = rows_of(ctx, item, row)
    there = in_tile(ctx, item, row)[:, None] & (col >= 0)
    return gl.load(queries.rows(rows.b, rows.query, rows.h)[:, None] + col, mask=there, other=0.0).to(gl.float32)


@gluon.jit
def no_narrow_keys(config: gl.constexpr, slots, power):
    """State before the first key of an item."""
    layout: gl.constexpr = accumulator_layout(config.rows)
    m = gl.full([config.rows], LOWEST, gl.float32, gl.SliceLayout(0, layout))
    o = gl.zeros([BLOCK, config.rows], gl.float32, layout)
    l = thread_sum(gl.zeros([config.block_n, config.rows], gl.float32, layout))
    return NarrowLatents((o, o, o, o), (m, m, m, m), m, l, power, slots)


@gluon.jit
def attend_narrow_keys(ctx, state, item, i):
    """Key tile number `i`: scores, softmax, and their part of the output."""
    slots = state.slots
    ctx.rings.k.consumer_wait(slots.rope)
    scales = ()
    for part in gl.static_range(BLOCKS):
        scales += (block_scales(ctx, ctx.rings.scales, slots.rope, part),)
    s = narrow_scores(ctx, slots, scales) * state.power[None, :]
    ctx.rings.k.consumer_release(slots.rope)
    x = exponents(ctx, masked_scores(ctx, s, item, i))
    m, l, o, most = state.m, state.l, state.o, state.most
    beyond = x - m[None, :]
    y = ()
    for part in gl.static_range(BLOCKS):
        y += (gl.where(x == -float("inf"), x, x + gl.log2(scales[part])[:, None]),)
        beyond = gl.maximum(beyond, y[part] - most[part][None, :])
    if any_exceeds(beyond):
        m, l, _ = raised(x, m, l)
        higher = ()
        for part in gl.static_range(BLOCKS):
            higher += (gl.maximum(most[part], gl.max(y[part], 0)),)
        o = scaled_blocks(o, powers(most, higher))
        most = higher
    for part in gl.static_range(BLOCKS):
        weights = gl.exp2(y[part] - most[part][None, :])
        ctx.rings.p.index(part).permute((1, 0)).store(weights.to(gl.float16))
    l = l + thread_sum(gl.exp2(x - m[None, :]))
    fence_async_shared()
    gl.barrier()
    clear_past_end(ctx, slots, item, i)
    o = add_blocks(ctx, o, slots)
    return NarrowLatents(o, most, m, l, state.power, slots.step())


@gluon.jit
def narrow_scores(ctx, slots, scales):
    """Products [N, R] of a tile's keys with the fractions of queries, times the keys' scales."""
    config: gl.constexpr = ctx.config
    rope = rope_tile(ctx, slots.rope)
    here = hide_from_compiler(0)  # else addresses of all products are in registers
    if config.narrow_rope:
        s = keys_product(rope, ctx.rings.q_rope.index(here), config) * scales[0][:, None]
    else:
        zero = gl.zeros([config.block_n, config.rows], gl.float32, accumulator_layout(config.rows))
        s = warpgroup_mma(rope, ctx.rings.q_rope.index(here).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
    ctx.rings.v.consumer_wait(slots.left)
    for part in gl.static_range(BLOCKS):
        if part == BLOCKS // 2:
            ctx.rings.v.consumer_wait(slots.right)
        q = ctx.rings.q.index(here).slice(part * BLOCK, BLOCK, 1)
        s += keys_product(block_tile(ctx, slots, part), q, config) * scales[part][:, None]
    return s


@gluon.jit
def block_tile(ctx, slots, part: gl.constexpr):
    """Block number `part` [N, 128] of a tile's latents."""
    half = half_tile(ctx, slots.left if part < BLOCKS // 2 else slots.right)
    return half.slice(part % (BLOCKS // 2) * BLOCK, BLOCK, 1)


@gluon.jit
def clear_past_end(ctx, slots, item, i):
    """Latents past the end of the sequence become 0: a weight of 0 does not hide a NaN."""
    valid = item.row_tile.length - item.key_tile(i) * ctx.config.block_n
    if valid < ctx.config.block_n:
        clear_outside(half_tile(ctx, slots.left), 0, valid)
        clear_outside(half_tile(ctx, slots.right), 0, valid)


@gluon.jit
def add_blocks(ctx, o, slots):
    """The output with a tile's part of it, which is given back."""
    made = ()
    here = hide_from_compiler(0)
    for part in gl.static_range(BLOCKS):
        made += (values_product(block_tile(ctx, slots, part), ctx.rings.p.index(here + part), o[part], ctx.config),)
        if part == BLOCKS // 2 - 1:
            ctx.rings.v.consumer_release(slots.left)
    ctx.rings.v.consumer_release(slots.right)
    return made


@gluon.jit
def scaled_blocks(o, factors):
    """Each block [128, R] times its factors [R]."""
    made = ()
    for part in gl.static_range(BLOCKS):
        made += (o[part] * factors[part][None, :],)
    return made


@gluon.jit
def write_blocks(ctx, state, factor, lse, item):
    """Write the output's blocks times a factor [R], which a thread has four columns of in a piece."""
    rows: gl.constexpr = ctx.config.rows
    for part in gl.static_range(BLOCKS):
        o = state.o[part] * (factor * gl.exp2(state.most[part] - state.m))[None, :]
        o = o.reshape([2, 4, 2, 8, rows]).permute((4, 1, 3, 0, 2)).reshape([rows, BLOCK])
        own = gl.convert_layout(lse, gl.SliceLayout(1, o.type.layout))
        write_columns(ctx, o, own, item, part * BLOCK)
