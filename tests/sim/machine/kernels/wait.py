"""Waits: for two groups of asynchronous work of which PENDING may go on, which is right only if that is 0; and at
hardware barriers, of which a block has sixteen."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4
from triton.experimental.gluon.language.nvidia import ampere
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

N: gl.constexpr = gl.constexpr(64)
FLAT: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
TILE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
LANES: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 1], [1, 64], [4, 1], [1, 0]))


@gluon.jit
def offsets(layout: gl.constexpr):
    rows = gl.arange(0, N, gl.SliceLayout(1, layout))[:, None]
    return rows * N + gl.arange(0, N, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def cp_async_kernel(x, out, PENDING: gl.constexpr):
    """out = the sum of two tiles of x, copied by cp.async."""
    smem = gl.allocate_shared_memory(gl.float32, [2, N, N], FLAT)
    at = offsets(TILE)
    for i in gl.static_range(2):
        ampere.async_copy.async_load(smem.index(i), x + i * N * N + at)
        ampere.async_copy.commit_group()
    ampere.async_copy.wait_group(PENDING)
    gl.store(out + at, smem.index(0).load(TILE) + smem.index(1).load(TILE))
    ampere.async_copy.wait_group(0)


@gluon.jit
def copies_on_barrier_kernel(x, out, COUNTED: gl.constexpr, ARRIVES: gl.constexpr):
    """out = a tile of x, copied by cp.async; its threads arrive on an mbarrier when it is there, whose phase counts
    them itself if COUNTED."""
    smem = gl.allocate_shared_memory(gl.float32, [N, N], FLAT)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1 if COUNTED else 129)
    at = offsets(TILE)
    ampere.async_copy.async_load(smem, x + at)
    if ARRIVES:
        ampere.async_copy.mbarrier_arrive(bar, COUNTED)
    mbarrier.arrive(bar, count=1)
    mbarrier.wait(bar, 0)
    gl.store(out + at, smem.load(TILE))
    ampere.async_copy.commit_group()
    ampere.async_copy.wait_group(0)


@gluon.jit
def lds_kernel(x, out, PENDING: gl.constexpr):
    """The same by buffer loads straight to LDS."""
    smem = gl.allocate_shared_memory(gl.float32, [2, N, N], FLAT)
    at = offsets(LANES)
    for i in gl.static_range(2):
        cdna4.async_copy.buffer_load_to_shared(smem.index(i), x, at + i * N * N)
        cdna4.async_copy.commit_group()
    cdna4.async_copy.wait_group(PENDING)
    gl.store(out + at, smem.index(0).load(LANES) + smem.index(1).load(LANES))
    cdna4.async_copy.wait_group(0)


@gluon.jit
def store_kernel(out_desc, out, PENDING: gl.constexpr, READ_ONLY: gl.constexpr):
    """Two tiles of ones by TMA stores; then their shared memory, or the tensor itself, is overwritten."""
    smem = gl.allocate_shared_memory(gl.float16, [2, N, N], out_desc.layout)
    ones = gl.full([N, N], 1, gl.float16, TILE)
    smem.index(0).store(ones)
    smem.index(1).store(ones)
    fence_async_shared()
    tma.async_store(out_desc, [0, 0], smem.index(0))
    tma.async_store(out_desc, [N, 0], smem.index(1))
    if not READ_ONLY:
        tma.store_wait(0, read_only=True)
    tma.store_wait(PENDING, read_only=READ_ONLY)
    for i in gl.static_range(2):
        if READ_ONLY:
            smem.index(i).store(ones)
        else:
            gl.store(out + i * N * N + offsets(TILE), ones)
    tma.store_wait(0, read_only=True)


@gluon.jit
def product_kernel(x, out, PENDING: gl.constexpr):
    """out = X·X + X·Xᵀ, by two products."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    smem = gl.allocate_shared_memory(gl.float16, [N, N], gl.NVMMASharedLayout.get_default_for([N, N], gl.float16))
    smem.store(gl.load(x + offsets(TILE)))
    fence_async_shared()
    zeros = gl.zeros([N, N], gl.float32, layout)
    first = warpgroup_mma(smem, smem, zeros, use_acc=False, is_async=True)
    second = warpgroup_mma(smem, smem.permute((1, 0)), zeros, use_acc=False, is_async=True)
    first, second = warpgroup_mma_wait(PENDING, deps=(first, second))
    gl.store(out + offsets(layout), first + second)
    warpgroup_mma_wait(0, deps=(first,))


@gluon.jit
def handed_over_kernel(x, out, WAY: gl.constexpr):
    """out = a tile of x, copied by cp.async, of which an mbarrier or a group tells the end; or no role waits for it."""
    smem = gl.allocate_shared_memory(gl.float32, [N, N], FLAT)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=128)
    at = offsets(TILE)
    ampere.async_copy.async_load(smem, x + at)
    if WAY == "group before":
        ampere.async_copy.commit_group()
    ampere.async_copy.mbarrier_arrive(bar, False)
    if WAY == "group behind":
        ampere.async_copy.commit_group()
        ampere.async_copy.wait_group(0)
    elif WAY != "unwaited":
        mbarrier.wait(bar, 0)
    if WAY != "unwaited":
        gl.store(out + at, smem.load(TILE))


@gluon.jit
def added_kernel(total_desc, total, count, out, FENCE: gl.constexpr):
    """Each program adds ones to `total` by atomic operations, and the last one copies the sums to out by TMA."""
    tile = gl.allocate_shared_memory(gl.float32, [N, N], total_desc.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    at = offsets(TILE)
    gl.atomic_add(total + at, gl.full([N, N], 1.0, gl.float32, TILE), sem="relaxed")
    if FENCE == "each":
        fence_async_shared()
    if gl.atomic_add(count, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        if FENCE == "last":
            fence_async_shared()
        mbarrier.expect(bar, total_desc.block_type.nbytes)
        tma.async_load(total_desc, [0, 0], bar, tile)
        mbarrier.wait(bar, 0)
        gl.store(out + at, tile.load(TILE))


@gluon.constexpr_function
def vote_asm(number, threads):
    """PTX of a vote of so many threads at a hardware barrier: whether any $1 exceeds its $2."""
    vote = f"barrier.cta.red.or.pred b, {number}, {threads}, a;"
    return "{ .reg .pred a, b; setp.gt.f32 a, $1, $2; " + vote + " selp.b32 $0, 1, 0, b; }"


@gluon.jit
def vote_role(x, out, bar, number: gl.constexpr, threads: gl.constexpr, place: gl.constexpr, IN_TURN: gl.constexpr):
    """out[place] = whether any of 128 numbers is positive, twice; in turn: the second role after the first."""
    values = gl.load(x + place * 128 + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0])))
    if IN_TURN and place == 1:
        mbarrier.wait(bar, 0)
    for _ in range(2):
        found = gl.inline_asm(vote_asm(number, threads), "=r,f,f", [values, gl.zeros_like(values)], gl.int32)
        gl.store(out + place, found)
    if IN_TURN and place == 0:
        mbarrier.arrive(bar, count=1)


@gluon.jit
def vote_kernel(x, out, FIRST: gl.constexpr, SECOND: gl.constexpr, THREADS: gl.constexpr, IN_TURN: gl.constexpr):
    """Two warpgroups, each with votes at its own hardware barrier, FIRST and SECOND."""
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    gl.warp_specialize(
        [
            (vote_role, (x, out, bar, FIRST, THREADS, 0, IN_TURN)),
            (vote_role, (x, out, bar, SECOND, THREADS, 1, IN_TURN)),
        ],
        [4],
        [24],
    )


@gluon.constexpr_function
def meeting_asm(verb, number, threads):
    """PTX of `verb` at a hardware barrier."""
    return f"bar.{verb} {number}, {threads};"


@gluon.jit
def meeting_role(number: gl.constexpr, threads: gl.constexpr, sync: gl.constexpr, times: gl.constexpr):
    for _ in range(times):
        if sync:
            gl.inline_asm(meeting_asm("sync", number, threads))
        else:
            gl.inline_asm(meeting_asm("arrive", number, threads))


@gluon.jit
def meeting_kernel(NUMBER: gl.constexpr, THREADS: gl.constexpr, SYNC: gl.constexpr, TIMES: gl.constexpr):
    """Two warpgroups meet TIMES times at a hardware barrier; the second one waits there, the first one with SYNC."""
    gl.warp_specialize(
        [(meeting_role, (NUMBER, THREADS, SYNC, TIMES)), (meeting_role, (NUMBER, THREADS, True, TIMES))], [4], [24]
    )
