"""Register and shared-memory layouts of the Hopper kernels, derived from a config."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..pieces.element_type import element_type as element_type


@gluon.constexpr_function
def tile_layout(rows, cols, dtype):
    """Swizzled layout of a (1, rows, 1, cols) tile as TMA writes it and wgmma reads it."""
    return gl.NVMMASharedLayout.get_default_for([1, rows, 1, cols], dtype)


@gluon.constexpr_function
def accumulator_layout(cols, depth=16, warps=4):
    """Registers of a [16 n · warps, cols] wgmma accumulator; `depth`: wgmma's k, 32 bytes of elements."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, cols, depth])


@gluon.constexpr_function
def operand_layout(cols, depth=16):
    """Registers of a [64, cols] left operand; an accumulator converts to it without moving data."""
    return gl.DotOperandLayout(0, accumulator_layout(cols, depth), depth // 8)


THREADS = gl.constexpr(gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0]))  # [32, 4], one number for each of 128 threads


TURNS = gl.constexpr(12)  # first named barrier of the warpgroups' turns; the compiler uses 0 to 7


@gluon.constexpr_function
def turn_asm(action):
    """PTX of `action` ("sync" or "arrive") on the named barrier of a turn, on which two warpgroups meet; the barrier's
    number is operand $0."""
    return f"bar.{action} $0, 256;"
