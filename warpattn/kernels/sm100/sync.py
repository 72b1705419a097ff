"""How a warp of the Blackwell kernel tells another role that it is done, how warps agree, and values that the compiler
cannot look into: it computes others early, for all who might need them, and where that is too many for the registers it
keeps them in local memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier


@gluon.jit
def signal(bar, pred=True):
    """One arrival of every warp of the role, after its own accesses to shared and tensor memory.

    Per warp, because an arrival of the whole warpgroup costs a barrier among its warps first, and a warp that need not
    rescale then would wait for one that has to.
    """
    gl.inline_asm(_WARP_SIGNAL, "r,r,~{memory}", [bar, gl.to_tensor(pred).to(gl.int32)])


@gluon.jit
def await_signal(bar, phase, pred=True):
    """Wait for a phase of a barrier, before accesses to tensor memory that it orders. Nothing without `pred`."""
    mbarrier.wait(bar, phase, pred=pred)
    gl.inline_asm("tcgen05.fence::after_thread_sync;")


@gluon.jit
def any_greater_of_role(x, bound):
    """Whether any x of the role's four warps exceeds its bound: all of them go the same way, as they must where the
    compiler puts a barrier among them (it does between loads and stores of the same tensor memory)."""
    return gl.inline_asm(_ROLE_VOTE, "=r,f,f", [x, bound], gl.int32) != 0


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


_WARP_SIGNAL = gl.constexpr(
    "{ .reg .pred e, p; setp.ne.b32 p, $1, 0; tcgen05.fence::before_thread_sync; bar.warp.sync 0xffffffff;"
    " elect.sync _|e, 0xffffffff; and.pred e, e, p; @e mbarrier.arrive.release.cta.shared::cta.b64 _, [$0]; }"
)
# Hardware barrier 15 of the block (0 to 7 are the compiler's) with 128 threads.
_ROLE_VOTE = gl.constexpr(
    "{ .reg .pred a, b; setp.gt.f32 a, $1, $2; barrier.cta.red.or.pred b, 15, 128, a; selp.b32 $0, 1, 0, b; }"
)
