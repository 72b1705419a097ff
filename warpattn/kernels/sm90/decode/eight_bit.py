"""Decode's products with 8-bit K and V: loads them to registers, converts them to fp16, and uses them as left operands.

fp16 holds every e4m3 and e5m2 value, and one instruction converts two. A left operand of wgmma may be in registers, so
16-bit K and V never go to shared memory. wgmma fixes which elements a thread must hold: of every 16 columns two
neighbours, and two more 8 columns on. But the order of a sum is free, and so is the order of the result's rows. So
columns of K and rows of Vᵀ are permuted such that a thread's elements are contiguous in memory:

      K [N, D]     row = key        columns of a thread  16 t + 0 … 15 of every 64          one load of 16 bytes
                                    become its  {2 t, 2 t + 1, 2 t + 8, 2 t + 9} of 4 × 16
      Vᵀ [Dv, N]   column = key     rows of a thread     B (8 w + g) + 0 … B - 1, B = Dv / 32   a load of B bytes a key
                                    become its  {g, g + 8} of B / 2 × 64, in warp w

(t = lane mod 4, g = lane div 4.) Queries are stored with the same permutation of columns, and the output's rows are put
in order at the end of an item. fp16 does not cover the range of bf16, so bf16 queries are divided by a power of two per
row; scores are multiplied by that power, or by the scale of 8-bit queries, and by K's scale.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...pieces.scales import has_row_scale, has_scale, head_scale, scale_row
from ..layouts import accumulator_layout
from .context import query_elements


@gluon.aggregate
class Scaling:
    """Factors of an item's products."""

    scores: gl.tensor  # [R] factors of scores: K's scale times each row's power of two or query scale
    output: gl.tensor  # factor of the output: V's scale


@gluon.constexpr_function
def operand_registers(rows):
    """Registers of a left operand [64 n, columns] in fp16."""
    return gl.DotOperandLayout(0, accumulator_layout(rows), 2)


@gluon.constexpr_function
def doublings(first, end, axis):
    """Bases first, 2 first, … below `end` of a linear layout, along `axis`."""
    steps = [first << i for i in range((end // first).bit_length() - 1)]
    return [[step, 0] if axis == 0 else [0, step] for step in steps]


@gluon.constexpr_function
def key_bytes(keys, columns):
    """Registers in which a K tile [N, D] is loaded: a thread has 16 contiguous bytes at a time."""
    registers = [*doublings(1, 16, 1), [8, 0], *doublings(64, columns, 1), *doublings(64, keys, 0)]
    lanes = doublings(16, 64, 1) + doublings(1, 8, 0)
    return gl.DistributedLinearLayout(registers, lanes, doublings(16, 64, 0), [], [keys, columns])


@gluon.constexpr_function
def value_bytes(columns, keys):
    """Registers in which a Vᵀ tile [Dv, N] is loaded: a thread has Dv / 32 contiguous bytes at a time."""
    own = columns // 32
    registers = [*doublings(1, own, 0), [0, 1], [0, 8], *doublings(16, keys, 1)]
    lanes = doublings(2, 8, 1) + doublings(own, 8 * own, 0)
    return gl.DistributedLinearLayout(registers, lanes, doublings(8 * own, columns, 0), [], [columns, keys])


@gluon.jit
def in_key_order(x):
    """Permutes the columns of [M, D] to the order that K has as an operand."""
    blocks: gl.constexpr = x.shape[1] // 64
    return x.reshape([x.shape[0], blocks, 4, 4, 2, 2]).permute((0, 1, 3, 4, 2, 5)).reshape([x.shape[0], x.shape[1]])


@gluon.jit
def key_products(ctx, k_tile, k_state):
    """K·Qᵀ [N, R] of a K tile [N, D]; where blocks of columns have scales, the sum over blocks of product times scale.
    """
    config: gl.constexpr = ctx.config
    blocks: gl.constexpr = config.scale_blocks("k")
    if blocks == 1:
        return keys_product(k_tile, ctx.rings.q, config)
    else:
        columns: gl.constexpr = config.padded_qk // blocks
        s = gl.zeros([config.block_n, config.rows], gl.float32, accumulator_layout(config.rows))
        for part in gl.static_range(blocks):
            k_part, q_part = k_tile.slice(part * columns, columns, 1), ctx.rings.q.slice(part * columns, columns, 1)
            s += keys_product(k_part, q_part, config) * block_scales(ctx, ctx.rings.scales.k, k_state, part)[:, None]
        return s


@gluon.jit
def keys_product(k_tile, q_tile, config: gl.constexpr):
    """K·Qᵀ [N, R] of a K tile [N, D] and queries [R, D]."""
    k = in_key_order(k_tile.load(key_bytes(config.block_n, k_tile.shape[1])).to(gl.float16))
    k = gl.convert_layout(k, operand_registers(config.rows), assert_trivial=True)
    zero = gl.zeros([config.block_n, config.rows], gl.float32, accumulator_layout(config.rows))
    s = warpgroup_mma(k, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(s, k))[0]


@gluon.jit
def value_products(v_tile, p_tiles, o, config: gl.constexpr):
    """Adds Vᵀ·P of a V tile [N, Dv] to O [Dv, R], whose rows are permuted (see `in_order`). `p_tiles`: weights [R, N],
    one tile for each block of V's columns that has scales."""
    blocks: gl.constexpr = len(p_tiles)
    if blocks == 1:
        return values_product(v_tile, p_tiles[0], o, config)
    else:
        columns: gl.constexpr = config.padded_v // blocks
        before = row_blocks(o, blocks)
        made = ()
        for part in gl.static_range(blocks):
            v_part = v_tile.slice(part * columns, columns, 1)
            made += (values_product(v_part, p_tiles[part], before[part], config),)
        return joined(made)


@gluon.jit
def rescaled(o, factors):
    """Multiplies each block of rows of O [Dv, R] by its factors [R]."""
    blocks: gl.constexpr = len(factors)
    if blocks == 1:
        return o * factors[0][None, :]
    else:
        return joined(scaled_blocks(row_blocks(o, blocks), factors))


@gluon.jit
def scaled_blocks(o, factors):
    """Multiplies each block [M, R] of an output by its factors [R]."""
    made = ()
    for part in gl.static_range(len(o)):
        made += (o[part] * factors[part][None, :],)
    return made


@gluon.jit
def row_blocks(x, blocks: gl.constexpr):
    """Splits the rows of an accumulator [M, R] into `blocks` accumulators, a power of two of them."""
    layout: gl.constexpr = x.type.layout
    found = (x,)
    doublings: gl.constexpr = blocks.bit_length() - 1
    for _ in gl.static_range(doublings):
        halves = ()
        for i in gl.static_range(len(found)):
            each = found[i]
            first, second = each.reshape([2, each.shape[0] // 2, each.shape[1]]).permute((1, 2, 0)).split()
            halves += (gl.convert_layout(first, layout, True), gl.convert_layout(second, layout, True))
        found = halves
    return found


@gluon.jit
def joined(blocks):
    """Joins the accumulators that `row_blocks` made."""
    layout: gl.constexpr = blocks[0].type.layout
    found = blocks
    doublings: gl.constexpr = len(blocks).bit_length() - 1
    for _ in gl.static_range(doublings):
        pairs = ()
        for i in gl.static_range(0, len(found), 2):
            both = gl.join(found[i], found[i + 1]).permute((2, 0, 1))
            both = both.reshape([2 * found[i].shape[0], found[i].shape[1]])
            pairs += (gl.convert_layout(both, layout, True),)
        found = pairs
    return found[0]


@gluon.jit
def values_product(v_tile, p_tile, o, config: gl.constexpr):
    """Adds Vᵀ·P of values [N, Dv] and weights [R, N] to O [Dv, R], whose rows are permuted (see `in_order`)."""
    columns: gl.constexpr = v_tile.shape[1]
    blocks: gl.constexpr = columns // 64
    v = v_tile.permute((1, 0)).load(value_bytes(columns, config.block_n)).to(gl.float16)
    v = v.reshape([4, 8, blocks, 2, config.block_n]).permute((2, 0, 3, 1, 4))
    v = v.reshape([columns, config.block_n])
    v = gl.convert_layout(v, operand_registers(config.rows), assert_trivial=True)
    o = warpgroup_mma(v, p_tile.permute((1, 0)), o, is_async=True)
    return warpgroup_mma_wait(0, deps=(o, v))[0]


@gluon.jit
def in_order(o, config: gl.constexpr):
    """The output [Dv, R] of `value_products`, with rows in the order of V's columns."""
    own: gl.constexpr = config.scale_blocks("v")
    blocks: gl.constexpr = config.padded_v // 64 // own
    if own == 1:
        o = o.reshape([blocks, 4, 2, 8, config.rows]).permute((1, 3, 0, 2, 4))
    else:
        o = o.reshape([own, blocks, 4, 2, 8, config.rows]).permute((0, 2, 4, 1, 3, 5))
    return o.reshape([config.padded_v, config.rows])


@gluon.jit
def column_of(row, config: gl.constexpr):
    """The column of V that each `row` [Dv] of the output of `value_products` belongs to, see `in_order`."""
    own: gl.constexpr = config.padded_v // config.scale_blocks("v")
    blocks: gl.constexpr = own // 64
    column = (((row // 16 % 4) * 8 + row % 8) * blocks + row % own // 64) * 2 + row // 8 % 2
    return column + row // own * own


@gluon.jit
def load_scaled_queries(ctx, item):
    """Copies queries [R, D] to shared memory in fp16, columns permuted as K's; rows and columns past the end
    are 0. Returns the item's `Scaling`."""
    config: gl.constexpr = ctx.config
    narrow: gl.constexpr = config.eight_bit.queries
    lanes: gl.constexpr = config.padded_qk // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    at, there, rows = query_elements(ctx, item, layout)
    none = gl.zeros(at.shape, gl.int8, layout).to(at.dtype.element_ty, bitcast=True) if narrow else 0.0
    q = gl.load(at, mask=there, other=none)
    power = gl.full([config.rows], 1.0, gl.float32, gl.SliceLayout(0, accumulator_layout(config.rows)))
    if narrow:
        power = query_scales(ctx, rows, power)
    elif config.element.name == "bf16":
        q, row_power = fractions(q.to(gl.float32))
        power = gl.convert_layout(row_power, power.type.layout)
    k_scale = gl.to_tensor(1.0)
    if has_scale(config, "k", "tensor", "head"):
        k_scale = head_scale(ctx.keys.k, item.part.head)
    v_scale = gl.to_tensor(1.0)
    if has_scale(config, "v", "tensor", "head"):
        v_scale = head_scale(ctx.keys.v, item.part.head)
    gl.barrier()  # all warps have read the previous item's queries
    ctx.rings.q.store(in_key_order(q.to(gl.float16)))
    fence_async_shared()
    gl.barrier()
    return Scaling(power * k_scale, v_scale)


@gluon.jit
def query_scales(ctx, rows, ones):
    """Loads the scales [R] of 8-bit queries; `ones` without any."""
    if ctx.config.eight_bit.scales.q is None:
        return ones
    else:
        row = scale_row(ctx.config, "q", rows.query).to(gl.int64)
        at = rows.b.to(gl.int64) * ctx.q_scale.outer + row * ctx.q_scale.row
        return gl.convert_layout(gl.load(ctx.q_scale.scale + at + rows.h * ctx.q_scale.head), ones.type.layout)


@gluon.jit
def fractions(q):
    """(q [R, D] divided by a power of two per row, so that its largest magnitude is 1 to 2, or 4; the powers [R])."""
    top = gl.max(gl.abs(q), 1)
    exponent = (top.to(gl.int32, bitcast=True) >> 23) & 255
    exponent = gl.maximum(gl.minimum(exponent, 253), 1)
    inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    return q * inverse[:, None], (exponent << 23).to(gl.float32, bitcast=True)


@gluon.jit
def block_scales(ctx, scales, k_state, part: gl.constexpr):
    """Loads scales [N] of a block of columns from [stages, blocks * N]."""
    keys: gl.constexpr = ctx.config.block_n
    layout: gl.constexpr = gl.SliceLayout(1, accumulator_layout(ctx.config.rows))
    return scales.index(k_state.index).slice(part * keys, keys, 0).load(layout)


@gluon.jit
def token_scales(ctx, scales, k_state, operand: gl.constexpr):
    """Loads the scales [N] of "k" or "v" from a slot of [stages, N]; 1 where tokens have none."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = gl.SliceLayout(1, accumulator_layout(config.rows))
    if has_row_scale(config, operand):
        return scales.index(k_state.index).load(layout)
    else:
        return gl.full([config.block_n], 1.0, gl.float32, layout)
