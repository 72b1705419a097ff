"""8-bit latents as left operands of wgmma: how they are loaded to registers, and with which order of rows and columns.

As keys, a thread loads 16 contiguous bytes of a row at a time, as in decode (decode/eight_bit.py). Here each of four
lanes has a quarter of a block's columns, so that eight lanes that load together access different banks:

      K [N, C]     row = key        columns of a thread  C/4 t + 0 … C/4 - 1
                                    become its  {2 t, 2 t + 1, 2 t + 8, 2 t + 9} of C / 16 × 16

As values, two neighbouring columns of a key are treated as one 16-bit number. ldmatrix transposes 8 × 8 of these, so
that a register holds both columns of two neighbouring keys. Its bytes are permuted once, and each half is converted to
two fp16 numbers, two keys of one column:

      Vᵀ [C, N]    column = key     columns 2 (8 w + g) and the next one become rows g and g + 8 in warp w

(t = lane mod 4, g = lane div 4; with 4 warps, w counts to 8 over two tiles of 64 rows.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..decode.eight_bit import doublings
from ..layouts import accumulator_layout


@gluon.constexpr_function
def accumulators(config):
    """Registers of a product [64 n, R] of the consumer role."""
    return accumulator_layout(config.rows, warps=config.attending_warps)


@gluon.constexpr_function
def operand_registers(config):
    """Registers of its left operand [64 n, columns] in fp16."""
    return gl.DotOperandLayout(0, accumulators(config), 2)


@gluon.constexpr_function
def key_bytes(keys, columns, warps):
    """Registers in which keys [N, C] are loaded."""
    own = columns // 4
    registers = [*doublings(1, 16, 1), [8, 0], *doublings(16, own, 1), *doublings(16 * warps, keys, 0)]
    lanes = doublings(own, columns, 1) + doublings(1, 8, 0)
    return gl.DistributedLinearLayout(registers, lanes, doublings(16, 16 * warps, 0), [], [keys, columns])


@gluon.constexpr_function
def value_pairs(columns, keys, warps):
    """Registers in which values [C / 2, N] are loaded, pairs of columns as 16 bits."""
    pairs = columns // 2
    registers = [[0, 1], *doublings(8, keys, 1), *doublings(8 * warps, pairs, 0)]
    lanes = doublings(2, 8, 1) + doublings(1, 8, 0)
    return gl.DistributedLinearLayout(registers, lanes, doublings(8, 8 * warps, 0), [], [pairs, keys])


@gluon.jit
def in_key_order(x, columns: gl.constexpr):
    """Permutes columns of [M, D] as those of keys in blocks of `columns`."""
    rows: gl.constexpr = x.shape[0]
    x = x.reshape([rows, x.shape[1] // columns, 4, columns // 64, 4, 2, 2])
    return x.permute((0, 1, 3, 4, 5, 2, 6)).reshape([rows, x.shape[1] * columns])


@gluon.jit
def key_operand(tile, config: gl.constexpr):
    """Loads keys [N, C] and converts them to an fp16 left operand."""
    columns: gl.constexpr = tile.shape[1]
    k = tile.load(key_bytes(config.block_n, columns, config.attending_warps)).to(gl.float16)
    return gl.convert_layout(in_key_order(k, columns), operand_registers(config), assert_trivial=True)


@gluon.jit
def value_operand(pairs, config: gl.constexpr):
    """Loads values [N, C / 2], pairs of columns as 16 bits, and converts them to an fp16 left operand [C, N]."""
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
    """Transposes a product [C, R] of `value_operand`, columns in original order."""
    columns: gl.constexpr = o.shape[0]
    return o.reshape([columns // 16, 2, 8, o.shape[1]]).permute((3, 0, 2, 1)).reshape([o.shape[1], columns])


@gluon.constexpr_function
def columns_asm(element):
    """PTX that makes two registers of fp16, each one column of two keys, from one with the bytes of both columns."""
    kind = {"fp8e4nv": "e4m3x2", "fp8e5": "e5m2x2"}[element]
    return (
        "{ .reg .b32 x; .reg .b16 low, high; prmt.b32 x, $2, 0, 0x3120; mov.b32 {low, high}, x;"
        f" cvt.rn.f16x2.{kind} $0, low; cvt.rn.f16x2.{kind} $1, high; }}"
    )
