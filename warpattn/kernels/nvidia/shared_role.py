"""Marks the code that several warpgroups run, and where the others enter it, for runtime/shared_code."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def begin_shared():
    """Begins the shared code; returns the number of the warpgroup that runs it, which the compiler does not know."""
    return gl.inline_asm("mov.u32 $0, %shared_role;", "=r", [], gl.int32)


@gluon.jit
def end_shared():
    """Ends the shared code."""
    gl.inline_asm("shared_role.leave;", "", [])


@gluon.constexpr_function
def enter_asm(number):
    """The mark where warpgroup `number` enters."""
    return f"shared_role.enter {number};"


@gluon.jit
def run_shared(number: gl.constexpr):
    """Runs the shared code as warpgroup `number` > 0; the barrier tells the number of its warps' barrier."""
    gl.barrier()
    gl.inline_asm(enter_asm(number), "", [])
