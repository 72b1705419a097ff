"""Kernels with loops that end only if something else happens."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma


@triton.jit
def flag_kernel(flag, out, setter):
    """Programs wait for a flag that the program `setter` sets."""
    p = tl.program_id(0)
    if p == setter:
        tl.atomic_xchg(flag, 1)
    while tl.load(flag, volatile=True) == 0:
        pass
    tl.store(out + p, 1)


@triton.jit
def atomic_kernel(flag, out, setter):
    """The same by an atomic addition of nothing."""
    p = tl.program_id(0)
    if p == setter:
        tl.atomic_xchg(flag, 1)
    while tl.atomic_add(flag, 0) == 0:
        pass
    tl.store(out + p, 1)


@triton.jit
def still_kernel(x, out):
    """A condition on values that the loop leaves as they are."""
    values = tl.load(x + tl.arange(0, 32))
    rounds = 0
    while tl.sum(values, 0) > 0:
        values = tl.maximum(values, 1.0)
        rounds = tl.minimum(rounds + 1, 3)
    tl.store(out, rounds)


@triton.jit
def counting_kernel(flag, out, n):
    """A loop that counts its rounds until a flag is set, and stops after n."""
    rounds = 0
    while (tl.load(flag, volatile=True) == 0) & (rounds < n):
        rounds += 1
    tl.store(out, rounds)


@triton.jit
def timed_kernel(flag, out):
    """A loop that reads the clock, for what it does between two looks at a flag."""
    while tl.load(flag, volatile=True) == 0:
        began = tl.extra.cuda.globaltimer()
        while tl.extra.cuda.globaltimer() < began + 3:
            pass
    tl.store(out, 1)


@triton.jit
def turns_kernel(turn, out, n, programs):
    """Programs take turns: each waits for its own, n times."""
    p = tl.program_id(0)
    for i in range(n):
        while tl.atomic_add(turn, 0) != i * programs + p:
            pass
        tl.atomic_add(turn, 1)
    tl.store(out + p, n)


@triton.jit
def long_kernel(x, out, n):
    """A loop of n rounds."""
    for i in range(n):
        tl.store(out + tl.program_id(0), tl.load(x + i % 8))


@gluon.jit
def _wait_for_ever(bar, flag):
    while gl.load(flag, volatile=True) == 0:
        mbarrier.wait(bar, 0)


@gluon.jit
def _wait_for_once(bar, flag):
    mbarrier.wait(bar, 1)


@gluon.jit
def barrier_kernel(flag, BOTH: gl.constexpr):
    """A role that waits in a loop for a phase that is complete; if BOTH, beside one that waits for the next."""
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.arrive(bar, count=1)
    if BOTH:
        gl.warp_specialize([(_wait_for_ever, (bar, flag)), (_wait_for_once, (bar, flag))], [4], [32])
    else:
        _wait_for_ever(bar, flag)
    mbarrier.invalidate(bar)


@gluon.jit
def copied_kernel(flag_desc, flag, out):
    """A role that sets a flag by TMA and looks at it before it has waited for the copy."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    smem = gl.allocate_shared_memory(gl.int32, [1, 32], flag_desc.layout)
    smem.store(gl.full([1, 32], 1, gl.int32, layout))
    fence_async_shared()
    tma.async_store(flag_desc, [0, 0], smem)
    while gl.load(flag, volatile=True) == 0:
        pass
    tma.store_wait(0)
    gl.store(out, 1)
