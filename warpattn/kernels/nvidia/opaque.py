"""Hides a number from the compiler, which would otherwise hoist what is computed from it and keep that in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def hide_from_compiler(x):
    """`x` as int32, hidden from the compiler."""
    return gl.inline_asm("mov.u32 $0, $1;", "=r,r", [gl.to_tensor(x)], gl.int32)
