"""A number that the compiler does not know: so it shares no address with other code, and keeps none across a loop."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def hide_from_compiler(x):
    """An int32, hidden from the compiler."""
    return gl.inline_asm("mov.u32 $0, $1;", "=r,r", [gl.to_tensor(x)], gl.int32)
