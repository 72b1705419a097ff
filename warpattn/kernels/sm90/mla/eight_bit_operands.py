"""Latents of 8 bits as left operands: how they come from shared memory to registers, and which row and column each is.

As keys a thread takes 16 bytes of a row at once, as in decode (decode/eight_bit.py), but every fourth of a block of
columns to a lane, so that the eight lanes of a quarter of a load are in eight banks of 16 bytes each:

      K [N, C]     row = key        columns of a thread  C/4 t + 0 … C/4 - 1
                                    become its  {2 t, 2 t + 1, 2 t + 8, 2 t + 9} of C / 16 × 16

As values two neighbouring columns of a key are one number of 16 bits, of which one instruction transposes 8 × 8
(ldmatrix), so that a register has both columns of two neighbouring keys. Its bytes change places once, and either half
becomes two numbers of fp16, the keys of one column:

      Vᵀ [C, N]    column = key     columns 2 (8 w + g) and the next one become rows g and g + 8 in warp w

(t = lane mod 4, g = lane div 4; with 4 warps w counts to 8 in two tiles of 64 rows.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..decode.eight_bit import doublings
from ..layouts import accumulator_layout


@gluon.constexpr_function
def accumulators(config):
    """Registers of a product [64 n, R] of the role that attends."""
    return accumulator_layout(config.rows, warps=config.attending_warps)


@gluon.constexpr_function
def operand_registers(config):
    """Registers of its left operand [64 n, columns] of fp16."""
    return gl.DotOperandLayout(0, accumulators(config), 2)


@gluon.constexpr_function
def key_bytes(keys, columns, warps):
    """Registers of keys [N, C] as they are stored."""
    own = columns // 4
    registers = [*doublings(1, 16, 1), [8, 0], *doublings(16, own, 1), *doublings(16 * warps, keys, 0)]
    lanes = doublings(own, columns, 1) + doublings(1, 8, 0)
    return gl.DistributedLinearLayout(registers, lanes, doublings(16, 16 * warps, 0), [], [keys, columns])


@gluon.constexpr_function
def value_pairs(columns, keys, warps):
    """Registers of values [C / 2, N], pairs of columns as 16 bits."""
    pairs = columns // 2
    registers = [[0, 1], *doublings(8, keys, 1), *doublings(8 * warps, pairs, 0)]
    lanes = doublings(2, 8, 1) + doublings(1, 8, 0)
    return gl.DistributedLinearLayout(registers, lanes, doublings(8, 8 * warps, 0), [], [pairs, keys])


@gluon.jit
def in_key_order(x, columns: gl.constexpr):
    """[M, D] with columns in the order that keys of so many columns have as operands."""
    rows: gl.constexpr = x.shape[0]
    x = x.reshape([rows, x.shape[1] // columns, 4, columns // 64, 4, 2, 2])
    return x.permute((0, 1, 3, 4, 5, 2, 6)).reshape([rows, x.shape[1] * columns])


@gluon.jit
def key_operand(tile, config: gl.constexpr):
    """Keys [N, C] in fp16 as the left operand."""
    columns: gl.constexpr = tile.shape[1]
    k = tile.load(key_bytes(config.block_n, columns, config.attending_warps)).to(gl.float16)
    return gl.convert_layout(in_key_order(k, columns), operand_registers(config), assert_trivial=True)


@gluon.jit
def value_operand(pairs, config: gl.constexpr):
    """Values [N, C / 2], pairs of columns as 16 bits, in fp16 as the left operand [C, N]."""
    count: gl.constexpr = pairs.shape[1]
    keys: gl.constexpr = config.block_n
    warps: gl.constexpr = config.attending_warps
    bits = pairs.permute((1, 0)).load(value_pairs(2 * count, keys, warps))
    first, second = gl.inline_asm_elementwise(
        columns_asm(config.latents.name), "=r,=r,r", [bits], (gl.float16, gl.float16), is_pure=True, pack=2
    )
    v = gl.join(first, second).reshape([count // 8, 8, keys, 2]).permute((0, 3, 1, 2)).reshape([2 * count, keys])
    return gl.convert_layout(v, operand_registers(config), assert_trivial=True)


@gluon.jit
def by_rows(o):
    """A product [C, R] with such an operand as rows [R, C] with the columns in order."""
    columns: gl.constexpr = o.shape[0]
    return o.reshape([columns // 16, 2, 8, o.shape[1]]).permute((3, 0, 2, 1)).reshape([o.shape[1], columns])


@gluon.constexpr_function
def columns_asm(element):
    """PTX for two registers of fp16, a column of two keys each, from one with the bytes of both columns."""
    kind = {"fp8e4nv": "e4m3x2", "fp8e5": "e5m2x2"}[element]
    return (
        "{ .reg .b32 x; .reg .b16 low, high; prmt.b32 x, $2, 0, 0x3120; mov.b32 {low, high}, x;"
        f" cvt.rn.f16x2.{kind} $0, low; cvt.rn.f16x2.{kind} $1, high; }}"
    )
