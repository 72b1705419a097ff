"""Numbers that the compiler cannot look into: it computes others early, for all who might need them, and where that is
too many for the registers it keeps them in local memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def first_grid_index():
    """program_id(0). Known, it would be used up long before the roles start, for all of them (head dim 128, sliding
    window: 2 stores and 9 loads of spilled registers)."""
    return gl.inline_asm("mov.u32 $0, %ctaid.x;", "=r", [], gl.int32)


@gluon.jit
def opaque(x):
    """An int32. A loop's counter that is hidden from the compiler: it would keep the address of every column that a
    mask reads across iterations (materialised mask, head dim 128: 182 stores and 189 loads)."""
    return gl.inline_asm("mov.u32 $0, $1;", "=r,r", [x], gl.int32)
