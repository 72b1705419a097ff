"""Signals between roles of Blackwell's kernels, votes among warps, and values hidden from LLVM,
which would compute their uses early and spill them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier


@gluon.jit
def make_signal(topology: gl.constexpr, name: gl.constexpr):
    """The barriers of a signal [number, 1], initialised; a single one is [1]."""
    if number_of(topology, name) == 1:
        bars = mbarrier.allocate_mbarrier()
        mbarrier.init(bars, count=arrivals_of(topology, name, 0))
    else:
        bars = mbarrier.allocate_mbarrier(batch=number_of(topology, name))
        init_signal(bars, topology, name)
    return bars


@gluon.jit
def init_signal(bars, topology: gl.constexpr, name: gl.constexpr):
    """Initialises the barriers of a signal."""
    number: gl.constexpr = number_of(topology, name)
    for i in gl.static_range(number):
        mbarrier.init(bars.index(i), count=arrivals_of(topology, name, i))


@gluon.constexpr_function
def number_of(topology, name):
    """Barriers of a signal."""
    return topology.signal(name).number


@gluon.constexpr_function
def arrivals_of(topology, name, number):
    """Arrivals that complete a barrier of a signal."""
    return topology.arrivals(name, number)


@gluon.jit
def signal(bar, pred=True):
    """One arrival of every warp of the role, after its own accesses to shared and tensor memory.

    Per warp, because an arrival of the whole warpgroup costs a barrier among its warps first, and a warp that need not
    rescale then would wait for one that has to.
    """
    gl.inline_asm(_WARP_SIGNAL, "r,r,~{memory}", [bar, gl.to_tensor(pred).to(gl.int32)])


@gluon.jit
def notify(ctx, bar, pred=True):
    """The arrivals of this role on a barrier of the context, after its own accesses to tensor memory: one of every
    warp, or of the whole warpgroup in a pair, where the barrier may be in the other CTA."""
    if ctx.config.pair_cta:
        gl.inline_asm("tcgen05.fence::before_thread_sync;")
        mbarrier.arrive(bar, count=1, pred=pred)
    else:
        signal(bar, pred)


@gluon.jit
def await_signal(bar, phase, pred=True):
    """Wait for a phase of a barrier, before accesses to tensor memory that it orders. Nothing without `pred`."""
    mbarrier.wait(bar, phase, pred=pred)
    gl.inline_asm("tcgen05.fence::after_thread_sync;")


@gluon.jit
def any_greater_of_role(x, bound, barrier: gl.constexpr = 15):
    """Whether any x of the role's four warps exceeds its bound: all of them go the same way, as they must where the
    compiler puts a barrier among them (it does between loads and stores of the same tensor memory), or where one of
    them waits for what it has started. `barrier`: of the block's hardware barriers, the one that only this role uses;
    0 to 7 are the compiler's."""
    return gl.inline_asm(_role_vote(barrier), "=r,f,f", [x, bound], gl.int32) != 0


@gluon.constexpr_function
def _role_vote(barrier):
    """The vote of 128 threads."""
    vote = f"barrier.cta.red.or.pred b, {barrier}, 128, a;"
    return "{ .reg .pred a, b; setp.gt.f32 a, $1, $2; " + vote + " selp.b32 $0, 1, 0, b; }"


@gluon.jit
def first_grid_index():
    """program_id(0), hidden from the compiler: it would use a known one up long before the roles start, for all of them
    (head dim 128, sliding window: 2 stores and 9 loads of spilled registers)."""
    return gl.inline_asm("mov.u32 $0, %ctaid.x;", "=r", [], gl.int32)


_WARP_SIGNAL = gl.constexpr(
    "{ .reg .pred e, p; setp.ne.b32 p, $1, 0; tcgen05.fence::before_thread_sync; bar.warp.sync 0xffffffff;"
    " elect.sync _|e, 0xffffffff; and.pred e, e, p; @e mbarrier.arrive.release.cta.shared::cta.b64 _, [$0]; }"
)
