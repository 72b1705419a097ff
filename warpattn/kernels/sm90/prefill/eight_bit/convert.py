"""The converting warpgroup of prefill with 8-bit K and V: widens tiles to 16 bits in the slots where they arrive.

      load ── TMA ──▶ [ 8 bits | free  ] ── convert: LDS, F2FP, STS ──▶ [ 16 bits, swizzled ] ──▶ attend
                        slot of K or V        registers                    the same slot

wgmma reads its right operand from shared memory only, so the warpgroup writes the 16-bit tile back. It holds all of the
8-bit tile in registers before it writes the first 16-bit element: both forms share one slot, and rings are as deep
as with 16 bits.

Operands are fp16, which holds every e4m3 and e5m2 value and takes a quarter of the instructions that bf16 takes.
Consumer warpgroups turn bf16 queries into fp16, divided by a power of two that puts their largest finite one at 2^15 to
2^16: queries within 2^29 of it are exact, the others err by at most 2^-40 of it. scales.py multiplies the power and all
scales back in. Scales of tokens are loaded here, one key tile ahead, and stored beside the ring. Where values have such
scales, V is bf16, because a weight times a scale may exceed fp16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ....nvidia.pipelines import consumer_state
from ....pieces.scales import OfTokens, by_token, has_row_scale, scale_row
from ....pieces.softmax import pack_pairs
from ...column_slices import columns_before
from ...columns import as_matrices
from ..packed_rows import row_heads, row_tokens
from .rings import CONVERTING, first_halves
from .scales import ONE, TOPS, factors_of, fraction_exponent, largest_of_warps

INFINITY = gl.constexpr(0x7F800000)  # bits of fp32 infinity
OF_WARPS = gl.constexpr(gl.DistributedLinearLayout([], [[0]] * 5, [[1], [2]], [], [4]))  # one number in each warp


@gluon.jit
def convert_role(ctx):
    """Converts the K and V tiles of every output tile, in the order in which they are loaded."""
    config: gl.constexpr = ctx.config
    q_state = consumer_state(config.q_stages)
    k_state = consumer_state(config.kv_stages)
    v_state = consumer_state(config.kv_stages)
    tile = published(ctx, q_state)
    while tile.row >= 0:
        span = ctx.work.key_tiles(ctx.mods, tile, config)
        ctx.rings.q.consumer_release(q_state)
        if by_token(config):
            k_state, v_state = convert_scaled_keys(ctx, k_state, v_state, tile, span)
        else:
            k_state = convert(ctx, ctx.rings.k_in, k_state)
            for i in range(1, span.total):
                k_state = convert(ctx, ctx.rings.k_in, k_state)
                v_state = convert(ctx, ctx.rings.v_in, v_state)
        v_state = convert(ctx, ctx.rings.v_in, v_state)
        q_state = q_state.step()
        tile = published(ctx, q_state)


@gluon.jit
def published(ctx, q_state):
    """Waits for a slot of the Q ring and returns its tile."""
    ctx.rings.q.consumer_wait(q_state)
    return ctx.work.read(ctx.rings.tiles, q_state.index)


@gluon.jit
def convert_scaled_keys(ctx, k_state, v_state, tile, span):
    """Converts all K tiles of an output tile, with scales of tokens, and all V tiles but the last."""
    scales = load_scales(ctx, tile, span, scale_places(ctx, tile, span, 0), 0)
    at = scale_places(ctx, tile, span, 1)
    following = load_scales(ctx, tile, span, at, 1)
    at = scale_places(ctx, tile, span, 2)
    k_state = convert_scaled(ctx, k_state, scales)
    for i in range(1, span.total):
        scales = following
        following = load_scales(ctx, tile, span, at, i + 1)
        at = scale_places(ctx, tile, span, i + 2)
        k_state = convert_scaled(ctx, k_state, scales)
        v_state = convert(ctx, ctx.rings.v_in, v_state)
    return k_state, v_state


@gluon.jit
def convert_scaled(ctx, state, scales):
    """Converts the next K tile, stores scales of its keys and values; returns the next state."""
    ctx.rings.k_in.wait(state)
    store_scales(ctx, state, scales)
    return convert_arrived(ctx, ctx.rings.k_in, state)


@gluon.jit
def store_scales(ctx, state, scales):
    """Stores the scales of a tile's keys and values beside the ring, for the consumers."""
    if has_row_scale(ctx.config, "k"):
        ctx.rings.scales.k.index(state.index).store(scales.k)
    if has_row_scale(ctx.config, "v"):
        ctx.rings.scales.v.index(state.index).store(scales.v)
    if ctx.config.eight_bit.columns("k") > 0:
        store_ratios(ctx.rings.scales.k, state, scales.k)
    if ctx.config.eight_bit.columns("v") > 0:
        store_blocks(ctx.rings.scales.v, state, scales.v)


@gluon.jit
def store_ratios(slots, state, scales):
    """Stores the scales of keys that have one per block of columns: each key's largest [N] in row `state.index`, and
    all as fractions of it in rows after those of all slots. Keys times fractions fit fp16; scores get the largest."""
    top = scales[0]
    for block in gl.static_range(1, len(scales)):
        top = gl.maximum(top, scales[block])
    slots.index(state.index).store(top)
    for block in gl.static_range(len(scales)):
        slots.index(state.stages + state.index * len(scales) + block).store(scales[block] / top)


@gluon.jit
def store_blocks(slots, state, scales):
    """Stores the scales [N] of each block of columns in a slot's rows of `slots` [stages * blocks, N]."""
    for block in gl.static_range(len(scales)):
        slots.index(state.index * len(scales) + block).store(scales[block])


@gluon.jit
def convert(ctx, slots, state):
    """Waits for the next tile of a ring and converts it; returns the next state."""
    slots.wait(state)
    return convert_arrived(ctx, slots, state)


@gluon.jit
def convert_arrived(ctx, slots, state):
    """Converts and commits a tile that has arrived; returns the next state."""
    convert_columns(ctx, slots, state)
    fence_async_shared()
    slots.ring.producer_commit(state)
    return state.step()


@gluon.jit
def convert_columns(ctx, slots, state):
    """Converts each part of a tile that has arrived, in place."""
    config: gl.constexpr = slots.config
    widths: gl.constexpr = config.parts[slots.number]
    narrow = as_matrices(slots.tile(state), config.block_n, widths)
    wide = as_matrices(slots.ring.tile(state), config.block_n, widths)
    operand: gl.constexpr = "k" if slots.number == 0 else "v"
    columns: gl.constexpr = config.eight_bit.columns(operand)
    if columns > 0:
        scales = ctx.rings.scales.k if slots.number == 0 else ctx.rings.scales.v
        for part in gl.static_range(len(wide)):
            first = state.index * (columns_before(widths, len(widths)) // columns)
            first += columns_before(widths, part) // columns + (config.kv_stages if slots.number == 0 else 0)
            convert_scaled_part(narrow[part], wide[part], scales, first, columns)
    else:
        for part in gl.static_range(len(wide)):
            convert_part(narrow[part], wide[part], widths[part])


@gluon.jit
def convert_alone(ctx, slots, state, tile, span, i):
    """Converts key tile `i` of a span, which has arrived, with its scales, in the warpgroup that will read it."""
    if by_token(slots.config):
        store_scales(ctx, state, load_scales(ctx, tile, span, scale_places(ctx, tile, span, i), i))
    convert_columns(ctx, slots, state)
    fence_async_shared()
    gl.barrier()


@gluon.jit
def convert_part(narrow, wide, cols: gl.constexpr):
    """Overwrites the 8-bit elements of a part [N, columns] with 16-bit ones."""
    x = narrow.load(rows_layout(cols)).to(gl.float16)
    if wide.dtype == gl.bfloat16:
        x = x.to(gl.float32).to(gl.bfloat16)
    wide.store(x)


@gluon.jit
def convert_scaled_part(narrow, wide, scales, first: gl.constexpr, columns: gl.constexpr):
    """`convert_part` with a multiplication by scales (or fractions of them) that each block of `columns` columns has;
    those of block 0 are in row `first` of `scales`. Reads the whole part before it writes the first element."""
    blocks: gl.constexpr = narrow.shape[1] // columns
    layout: gl.constexpr = rows_layout(columns)
    found = ()
    for block in gl.static_range(blocks):
        found += (narrow.slice(block * columns, columns, 1).load(layout),)
    for block in gl.static_range(blocks):
        scale = scales.index(first + block).load(gl.SliceLayout(1, layout))
        x = found[block].to(gl.float16).to(gl.float32) * scale[:, None]
        wide.slice(block * columns, columns, 1).store(x.to(wide.dtype))


@gluon.constexpr_function
def rows_layout(cols, run=8):
    """Registers of a part's rows, `run` consecutive elements a thread."""
    return gl.BlockedLayout([1, run], [32 * run // cols, cols // run], [CONVERTING, 1], [1, 0])


@gluon.jit
def tile_keys(ctx, span, i):
    """Keys [N] of key tile number `i` of a span; of its last tile where `i` is past the end."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [CONVERTING], [0])
    first = span.key_tile(gl.minimum(i, span.total - 1)) * ctx.config.block_n
    return first + gl.arange(0, ctx.config.block_n, layout)


@gluon.jit
def scale_places(ctx, tile, span, i):
    """(batch entry or page, row) of the scales of key tile number `i`. A page number takes as long to load as the scale
    that it locates, so it is read one tile earlier."""
    key = tile_keys(ctx, span, i)
    outer, row = ctx.tensors.k.place(ctx, tile, key)
    return outer + 0 * key, row


@gluon.jit
def load_scales(ctx, tile, span, at, i):
    """Loads the scales [N] of keys and values of key tile number `i`; 1 past the end of the sequence."""
    there = tile_keys(ctx, span, i) < ctx.work.lengths(tile).seq_k
    k = ()
    v = ()
    if has_row_scale(ctx.config, "k"):
        k = token_scale(ctx, ctx.scales.k, tile, (at[0], scale_row(ctx.config, "k", at[1])), there)
    if has_row_scale(ctx.config, "v"):
        v = token_scale(ctx, ctx.scales.v, tile, at, there)
    if ctx.config.eight_bit.columns("k") > 0:
        k = block_scales(ctx, ctx.scales.k, tile, at, there, ctx.config.eight_bit.blocks("k", ctx.config.padded_qk))
    if ctx.config.eight_bit.columns("v") > 0:
        v = block_scales(ctx, ctx.scales.v, tile, at, there, ctx.config.eight_bit.blocks("v", ctx.config.padded_v))
    return OfTokens(k, v)


@gluon.jit
def block_scales(ctx, rows, tile, at, there, blocks: gl.constexpr):
    """Loads scales [N] of K or V at places `at`, for each block of columns."""
    found = ()
    for block in gl.static_range(blocks):
        found += (token_scale(ctx, rows, tile, at, there, block * rows.block),)
    return found


@gluon.jit
def token_scale(ctx, rows, tile, at, there, block=0):
    """Loads the scales [N] of K or V at places `at`, `block` elements further."""
    outer, row = at
    head = (tile.h // ctx.work.group).to(gl.int64) * rows.head
    place = outer.to(gl.int64) * rows.outer + row.to(gl.int64) * rows.row + head
    return gl.load(rows.scale + (place + block), mask=there, other=1.0)


@gluon.jit
def fp16_queries(ctx, slot, parts, tile, q_state, wg):
    """Converts a warpgroup's queries in its `slot` to fp16, in place; returns them."""
    if tile.row >= 0:
        if ctx.config.widens_queries:
            widen_queries(ctx, slot, tile, q_state, wg)
        else:
            make_fractions(ctx, parts, q_state, wg)
    return as_fp16(parts)


@gluon.jit
def make_fractions(ctx, tile, q_state, wg):
    """Overwrites a warpgroup's bf16 queries, parts of [64, D], with fp16 ones, divided by a power of two that follows
    from what it stores beside the ring."""
    tops = factors_of(ctx, q_state, wg)
    top = largest(tile, tops, False)
    if top >= INFINITY:
        top = largest(tile, tops, True)
    factor = ((269 - fraction_exponent(top)) << 23).to(gl.float32, bitcast=True)
    for part in gl.static_range(len(tile)):
        multiply(reinterpreted(tile[part], gl.int32), factor)
    fence_async_shared()
    gl.barrier()


@gluon.jit
def multiply(pairs, factor):
    """Overwrites pairs of bf16 with pairs of fp16, times `factor`; few columns at a time, because registers hold O."""
    whole: gl.constexpr = pairs.shape[1]
    cols: gl.constexpr = min(32, whole)
    for column in gl.static_range(0, whole, cols):
        block = pairs.slice(column, cols, 1)
        x = block.load(rows_layout(cols, 4))
        first, second = (x << 16).to(gl.float32, bitcast=True), (x & -0x10000).to(gl.float32, bitcast=True)
        block.store(pack_pairs(first * factor, second * factor, gl.float16))


@gluon.jit
def widen_queries(ctx, slot, tile, q_state, wg):
    """Overwrites a warpgroup's 8-bit queries, which fill the first half of each part of its slot, with fp16 ones.
    Stores the scales of its tokens beside the ring."""
    config: gl.constexpr = ctx.config
    narrow = as_matrices(first_halves(slot, config), config.rows, config.qk_parts)
    wide = as_fp16(as_matrices(slot, config.rows, config.qk_parts))
    for part in gl.static_range(len(wide)):
        wide[part].store(narrow[part].load(rows_layout(wide[part].shape[1])).to(gl.float16))
    if has_row_scale(config, "q"):
        factors_of(ctx, q_state, wg).store(query_scales(ctx, tile, wg))
    fence_async_shared()
    gl.barrier()


@gluon.jit
def query_scales(ctx, tile, wg):
    """Loads the scales [64] of a warpgroup's rows; rows past the last token get that token's."""
    config: gl.constexpr = ctx.config
    rows = ctx.scales.q
    token = tile.row + wg * config.wg_tokens + row_tokens(ONE, config)
    outer, row = ctx.work.query_place(tile, gl.minimum(token, ctx.work.lengths(tile).seq_q - 1))
    at = outer.to(gl.int64) * rows.outer + scale_row(config, "q", row).to(gl.int64) * rows.row
    return gl.load(rows.scale + at + row_heads(tile, ONE, config) * rows.head)


@gluon.jit
def largest(tile, tops, finite: gl.constexpr):
    """The largest (or largest `finite`) magnitude in a bf16 tile, as fp32 bits. Compares packed pairs: a tile of 64 x
    128 takes 128 instructions a thread.

    Each warp's goes into `tops` [4] in shared memory, which are this warpgroup's. A maximum over all warps would pass
    memory of the compiler's, which warpgroups that share this code would share, too (runtime/shared_code)."""
    top = gl.zeros([TOPS], gl.int32, OF_WARPS)
    for part in gl.static_range(len(tile)):
        bits = reinterpreted(tile[part], gl.int32)
        pairs = bits.load(rows_layout(bits.shape[1], 4))
        first = (pairs << 16) & 0x7FFFFFFF
        second = pairs & 0x7FFF0000
        if finite:
            first = gl.where(first < INFINITY, first, 0)
            second = gl.where(second < INFINITY, second, 0)
        top = gl.maximum(top, largest_in_warps(gl.maximum(first, second)))
    tops.store(top.to(gl.float32, bitcast=True))
    gl.barrier()
    return largest_of_warps(tops)


@gluon.jit
def largest_in_warps(x):
    """Each warp's largest number of a tile [64, C] in `rows_layout`."""
    rows: gl.constexpr = x.type.layout.threads_per_warp[0]
    x = x.reshape([x.shape[0] // (TOPS * rows), TOPS, rows * x.shape[1]]).permute((1, 0, 2))
    top = gl.max(x.reshape([TOPS, x.shape[1] * x.shape[2]]), 1)
    return gl.convert_layout(top, OF_WARPS, assert_trivial=True)


@gluon.jit
def as_fp16(tile):
    """The parts of a bf16 tile, reinterpreted as fp16."""
    parts = ()
    for part in gl.static_range(len(tile)):
        parts += (reinterpreted(tile[part], gl.float16),)
    return parts


@gluon.jit
def reinterpreted(x, dtype: gl.constexpr):
    """A part [rows, columns], reinterpreted as `dtype`."""
    rows: gl.constexpr = x.shape[0]
    cols: gl.constexpr = x.shape[1] * x.dtype.primitive_bitwidth // dtype.primitive_bitwidth
    return x.reinterpret(dtype, [rows, cols], gl.NVMMASharedLayout.get_default_for([rows, cols], dtype))
