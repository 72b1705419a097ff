"""TMA reductions and semaphores between programs, each right unless a constexpr takes something out."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

N: gl.constexpr = gl.constexpr(64)
TILE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def offsets():
    rows = gl.arange(0, N, gl.SliceLayout(1, TILE))[:, None]
    return rows * N + gl.arange(0, N, gl.SliceLayout(0, TILE))[None, :]


@gluon.jit
def reduce_kernel(x, out_desc, out, KIND: gl.constexpr, FAULT: gl.constexpr):
    """Every program reduces its tile of x into rows 32 to 95 of out, which has 80: the rest is dropped."""
    smem = gl.allocate_shared_memory(out_desc.dtype, [N, N], out_desc.layout)
    values = gl.load(x + gl.program_id(0) * N * N + offsets())
    smem.store(values)
    if FAULT != "no_fence":
        fence_async_shared()
    if KIND == "add":
        tma.async_atomic_add(out_desc, [32, 0], smem)
    elif KIND == "min":
        tma.async_atomic_min(out_desc, [32, 0], smem)
    elif KIND == "max":
        tma.async_atomic_max(out_desc, [32, 0], smem)
    elif KIND == "and":
        tma.async_atomic_and(out_desc, [32, 0], smem)
    elif KIND == "or":
        tma.async_atomic_or(out_desc, [32, 0], smem)
    elif KIND == "xor":
        tma.async_atomic_xor(out_desc, [32, 0], smem)
    else:
        tma.async_store(out_desc, [32, 0], smem)
    if FAULT == "overwrite":
        smem.store(values)
    if FAULT == "store_beside":
        gl.store(out + 64 * N + offsets(), values, mask=offsets() < N)
    if FAULT == "load_beside":
        gl.store(x + gl.program_id(0) * N * N + offsets(), gl.load(out + offsets() + 16 * N))
    if FAULT != "no_wait":
        tma.store_wait(0, read_only=FAULT != "whole_wait")


@gluon.jit
def turns_kernel(x, out, semaphore, POLL: gl.constexpr, ACQUIRE: gl.constexpr, RELEASE: gl.constexpr):
    """out += x, one program after the other: each waits for its turn at a semaphore, then lets the next one go on."""
    turn = gl.program_id(0)
    if POLL:
        gl.atomic_poll(semaphore, turn, sem=ACQUIRE)
    else:
        while gl.atomic_add(semaphore, 0, sem=ACQUIRE) != turn:
            pass
    gl.store(out + offsets(), gl.load(out + offsets()) + gl.load(x + turn * N * N + offsets()))
    gl.atomic_add(semaphore, 1, sem=RELEASE)


@gluon.jit
def reduced_turns_kernel(x, out_desc, semaphore, WHOLE: gl.constexpr):
    """The same with TMA reductions; the program after the last turn reads their sum, x[0] = out."""
    turn, turns = gl.program_id(0), gl.num_programs(0) - 1
    smem = gl.allocate_shared_memory(gl.float32, [N, N], out_desc.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    while gl.atomic_add(semaphore, 0, sem="acquire") != turn:
        pass
    if turn < turns:
        smem.store(gl.load(x + turn * N * N + offsets()))
        fence_async_shared()
        tma.async_atomic_add(out_desc, [0, 0], smem)
        tma.store_wait(0, read_only=not WHOLE)
        gl.atomic_add(semaphore, 1, sem="release")
    else:
        mbarrier.expect(bar, N * N * 4)
        tma.async_load(out_desc, [0, 0], bar, smem)
        mbarrier.wait(bar, 0)
        gl.store(x + offsets(), smem.load(TILE))
    mbarrier.invalidate(bar)


@gluon.jit
def last_reader_kernel(out, copy, semaphore):
    """Programs 0 and 1 add to out; program 2 has waited for program 1 alone and reads it."""
    program = gl.program_id(0)
    if program < 2:
        gl.atomic_add(out + offsets(), gl.full([N, N], 1, gl.float32, TILE), sem="relaxed")
        if program == 1:
            gl.atomic_add(semaphore, 1, sem="release")
    else:
        gl.atomic_poll(semaphore, 1, sem="acquire")
        gl.store(copy + offsets(), gl.load(out + offsets()))


@gluon.jit
def unwritten_row_kernel(out_desc):
    """Adds zeros at a row that is read from shared memory which nobody has written."""
    smem = gl.allocate_shared_memory(gl.float32, [N, N], out_desc.layout)
    slot = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    smem.store(gl.zeros([N, N], gl.float32, TILE))
    fence_async_shared()
    row = gl.max(slot.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    tma.async_atomic_add(out_desc, [row, 0], smem)
    tma.store_wait(0)
