"""Register and shared-memory layouts of the Hopper kernels, derived from a config."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def element_type(dtype: str):
    """Gluon's type of a config's operands."""
    return gl.bfloat16 if dtype == "bf16" else gl.float16


@gluon.constexpr_function
def tile_layout(rows, cols, dtype):
    """Swizzled layout of a (1, rows, 1, cols) tile as TMA writes it and wgmma reads it."""
    return gl.NVMMASharedLayout.get_default_for([1, rows, 1, cols], dtype)


@gluon.constexpr_function
def accumulator_layout(cols):
    """Registers of a [64, cols] wgmma accumulator in one warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, cols, 16])


@gluon.constexpr_function
def operand_layout(cols):
    """Registers of a [64, cols] two-byte left operand, converted from an accumulator without moving data."""
    return gl.DotOperandLayout(0, accumulator_layout(cols), 2)


@gluon.constexpr_function
def few_layout(rows):
    """Registers of a [64 n, rows] wgmma accumulator in one warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, rows, 16])


@gluon.constexpr_function
def turn_asm(action, wg, consumers):
    """PTX on the named barrier by which warpgroups take turns: two of them meet at it (ids 0-7 are the compiler's)."""
    return f"bar.{action} {12 + wg}, 256;"
