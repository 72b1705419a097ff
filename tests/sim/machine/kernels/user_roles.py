"""More kernels of the kinds that users write: parts added by TMA, chains of roles, two readers of one ring, scratch
memory, copies that arrive on barriers; each with faults that a constexpr switches on ("": right)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3, cdna4
from triton.experimental.gluon.language.nvidia import ampere
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

N: gl.constexpr = gl.constexpr(64)
TILE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
MMA: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
WAVES: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [64], [4], [0]))
WARP: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))
ACC: gl.constexpr = gl.constexpr(TensorMemoryLayout([64, 64], col_stride=1))


@gluon.jit
def tile_places(layout: gl.constexpr):
    rows = gl.arange(0, N, gl.SliceLayout(1, layout))[:, None]
    return rows * N + gl.arange(0, N, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def reduced_kernel(a_desc, b_desc, total_desc, total, done, out, FAULT: gl.constexpr):
    """out = A·B: each program adds its part of the inner dimension to `total` by TMA, the last one copies it to out."""
    a = gl.allocate_shared_memory(gl.float16, [N, N], a_desc.layout)
    b = gl.allocate_shared_memory(gl.float16, [N, N], b_desc.layout)
    part = gl.allocate_shared_memory(gl.float32, [N, N], total_desc.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    k = gl.program_id(0) * N
    nbytes: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    mbarrier.expect(bar, nbytes - 2048 if FAULT == "short_expect" else nbytes)
    tma.async_load(a_desc, [0, k], bar, a)
    tma.async_load(b_desc, [k, 0], bar, b)
    mbarrier.wait(bar, 1 if FAULT == "parity" else 0)
    value = warpgroup_mma(a, b, gl.zeros([N, N], gl.float32, MMA), is_async=True)
    part.store(warpgroup_mma_wait(0, deps=(value,)))
    fence_async_shared()
    if FAULT == "stored":
        tma.async_store(total_desc, [0, 0], part)
    else:
        tma.async_atomic_add(total_desc, [0, 0], part)
    if FAULT != "no_store_wait":
        tma.store_wait(0, read_only=FAULT == "read_only")
    gl.inline_asm("fence.proxy.async;")
    if gl.atomic_add(done, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        gl.store(out + tile_places(TILE), gl.load(total + tile_places(TILE)))


@gluon.jit
def scratch_kernel(x_desc, scratch_desc, out, FAULT: gl.constexpr):
    """out = 2x, by way of memory that the program itself writes and reads by TMA."""
    tile = gl.allocate_shared_memory(gl.float16, [N, N], x_desc.layout)
    back = gl.allocate_shared_memory(gl.float16, [N, N], x_desc.layout)
    bars = mbarrier.allocate_mbarrier(batch=2)
    mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    mbarrier.expect(bars.index(0), x_desc.block_type.nbytes)
    tma.async_load(x_desc, [0, 0], bars.index(0), tile)
    mbarrier.wait(bars.index(0), 0)
    value = tile.load(TILE)
    tile.store(value + value)
    fence_async_shared()
    tma.async_store(scratch_desc, [0, 0], tile)
    if FAULT != "no_store_wait":
        tma.store_wait(0, read_only=FAULT == "read_only")
    mbarrier.expect(bars.index(1), x_desc.block_type.nbytes)
    other: gl.constexpr = 0 if FAULT == "wrong_barrier" else 1
    tma.async_load(scratch_desc, [0, 0], bars.index(other), back)
    mbarrier.wait(bars.index(1), 0)
    gl.store(out + tile_places(TILE), back.load(TILE))
    tma.store_wait(0)


@gluon.jit
def score_role(x_desc, tile, full, empty, steps, FAULT: gl.constexpr):
    for i in range(steps):
        slot = i % 2
        mbarrier.wait(empty.index(slot), ((i // 2) & 1) ^ 1)
        mbarrier.expect(full.index(slot), x_desc.block_type.nbytes)
        tma.async_load(x_desc, [(0 if FAULT == "same_tile" else i) * N, 0], full.index(slot), tile.index(slot))


@gluon.jit
def softmax_role(tile, top, full, empty, ready, taken, steps, FAULT: gl.constexpr):
    """The largest value of each row, handed to the next role with the tile."""
    for i in range(steps):
        slot = i % 2
        mbarrier.wait(full.index(slot), (i // 2) & 1)
        largest = gl.max(tile.index(slot).load(TILE), 1)
        if FAULT != "no_taken_wait":
            mbarrier.wait(taken, (i & 1) ^ 1)
        top.store(largest)
        mbarrier.arrive(ready, count=1)
        if FAULT == "double_arrive":
            mbarrier.arrive(ready, count=1)
        if FAULT == "both_release":
            mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def divide_role(out, tile, top, empty, ready, taken, steps, FAULT: gl.constexpr):
    for i in range(steps):
        slot = i % 2
        if FAULT == "early_take":
            mbarrier.arrive(taken, count=1)
        if FAULT != "no_ready_wait":
            mbarrier.wait(ready, (i & 1) ^ (1 if FAULT == "ready_parity" else 0))
        value = tile.index(slot).load(TILE) - top.load(gl.SliceLayout(1, TILE))[:, None]
        gl.store(out + i * N * N + tile_places(TILE), value)
        mbarrier.arrive(empty.index(slot), count=1)
        if FAULT != "early_take":
            mbarrier.arrive(taken, count=1)


@gluon.jit
def chain_kernel(x_desc, out, steps, FAULT: gl.constexpr):
    """out = x less the largest of its row: one role copies, one finds the largest, one subtracts and gives back."""
    tile = gl.allocate_shared_memory(gl.float32, [2, N, N], x_desc.layout)
    top = gl.allocate_shared_memory(gl.float32, [N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = mbarrier.allocate_mbarrier(batch=2)
    empty = mbarrier.allocate_mbarrier(batch=2)
    ready = mbarrier.allocate_mbarrier()
    taken = mbarrier.allocate_mbarrier()
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(ready, count=1)
    mbarrier.init(taken, count=1)
    gl.warp_specialize(
        [
            (divide_role, (out, tile, top, empty, ready, taken, steps, FAULT)),
            (softmax_role, (tile, top, full, empty, ready, taken, steps, FAULT)),
            (score_role, (x_desc, tile, full, empty, steps, FAULT)),
        ],
        [4, 1],
        [64, 24],
    )


@gluon.jit
def reader(out, tile, full, empty, steps, WHICH: gl.constexpr, FAULT: gl.constexpr):
    """Adds up the tiles, or their squares."""
    total = gl.zeros([N, N], gl.float32, TILE)
    for i in range(steps):
        slot = i % 2
        mbarrier.wait(full.index(slot), (i // 2) & 1)
        value = tile.index(slot).load(TILE)
        total += value if WHICH == 0 else value * value
        silent: gl.constexpr = FAULT == "one_forgets" and WHICH == 1
        if not silent:
            mbarrier.arrive(empty.index(slot), count=1)
        if FAULT == "one_twice" and WHICH == 0:
            mbarrier.arrive(empty.index(slot), count=1)
    if FAULT == "same_output":
        gl.store(out + tile_places(TILE), total)
    else:
        gl.store(out + WHICH * N * N + tile_places(TILE), total)


@gluon.jit
def two_readers_kernel(x_desc, out, steps, FAULT: gl.constexpr):
    """Two roles read each tile; it goes back when both have."""
    tile = gl.allocate_shared_memory(gl.float32, [2, N, N], x_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=2)
    empty = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1 if FAULT == "count" else 2)
    gl.warp_specialize(
        [
            (reader, (out, tile, full, empty, steps, 0, FAULT)),
            (reader, (out, tile, full, empty, steps, 1, FAULT)),
            (score_role, (x_desc, tile, full, empty, steps, FAULT)),
        ],
        [4, 1],
        [64, 24],
    )


@gluon.jit
def copy_role(x, tile, full, empty, steps, FAULT: gl.constexpr):
    """cp.async whose ends arrive on a barrier."""
    for i in range(steps):
        slot = i % 2
        mbarrier.wait(empty.index(slot), ((i // 2) & 1) ^ 1)
        layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
        if FAULT == "late_copy":
            ampere.async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        ampere.async_copy.async_load(tile.index(slot), x + i * N * N + tile_places(layout))
        if FAULT == "plain_arrive":
            mbarrier.arrive(full.index(slot), count=1)
        elif FAULT != "late_copy":
            ampere.async_copy.mbarrier_arrive(full.index(slot), increment_count=False)


@gluon.jit
def add_role(out, tile, full, empty, steps, FAULT: gl.constexpr):
    total = gl.zeros([N, N], gl.float32, TILE)
    for i in range(steps):
        slot = i % 2
        if FAULT != "no_full_wait":
            mbarrier.wait(full.index(slot), (i // 2) & 1)
        if FAULT == "early_release":
            mbarrier.arrive(empty.index(slot), count=1)
        total += tile.index((slot + 1) % 2 if FAULT == "other_slot" else slot).load(TILE)
        if FAULT != "early_release":
            mbarrier.arrive(empty.index(slot), count=1)
    gl.store(out + tile_places(TILE), total)


@gluon.jit
def arriving_kernel(x, out, steps, COPIERS: gl.constexpr, FAULT: gl.constexpr):
    """The sum of tiles that a role copies by cp.async; each of its threads arrives when its copies have landed."""
    tile = gl.allocate_shared_memory(gl.float32, [2, N, N], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    full = mbarrier.allocate_mbarrier(batch=2)
    empty = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=COPIERS)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [(add_role, (out, tile, full, empty, steps, FAULT)), (copy_role, (x, tile, full, empty, steps, FAULT))],
        [4],
        [64],
    )


@gluon.jit
def lds_ring_kernel(x, out, steps, FAULT: gl.constexpr):
    """CDNA4: out is the sum of tiles, copied to LDS by buffer two turns ahead into a ring of three swizzled slots."""
    size: gl.constexpr = 1024
    ring = gl.allocate_shared_memory(gl.float32, [3, size], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    at = gl.arange(0, size, WAVES)
    for i in gl.static_range(2):
        cdna4.async_copy.buffer_load_to_shared(ring.index(i), x, i * size + at)
        if FAULT != "one_group" or i == 1:
            cdna4.async_copy.commit_group()
    total = gl.zeros([size], gl.float32, WAVES)
    for i in range(steps):
        cdna4.async_copy.wait_group(2 if FAULT == "loose_wait" else 1)
        total += ring.index(i % 3).load(WAVES)
        after = i + 2
        inside = after < steps
        into = (i if FAULT == "same_slot" else after) % 3
        inside = inside if FAULT != "outside" else after < steps + 1
        cdna4.async_copy.buffer_load_to_shared(ring.index(into), x, after * size + at, mask=(at >= 0) & inside)
        if FAULT != "no_commit":
            cdna4.async_copy.commit_group()
    cdna4.async_copy.wait_group(0)
    cdna3.buffer_store(total, out, at)


@gluon.constexpr_function
def has_fence(fault, without):
    return fault not in (without, "no_fences")


@gluon.jit
def fence(side: gl.constexpr, FAULT: gl.constexpr, without: gl.constexpr):
    """A fence of tensor memory, `before` a signal or `after` a wait, but not with the fault `without`."""
    if has_fence(FAULT, without):
        if side == "before":
            gl.inline_asm("tcgen05.fence::before_thread_sync;")
        else:
            gl.inline_asm("tcgen05.fence::after_thread_sync;")


@gluon.jit
def scores_by_turns(q_desc, k_desc, tiles, barriers, steps, FAULT: gl.constexpr):
    """S = Q·Kᵀ of each tile of K into two accumulators in turn."""
    q, k, s = tiles
    full, s_full, s_empty = barriers
    mbarrier.expect(full.index(2), q_desc.block_type.nbytes)
    tma.async_load(q_desc, [0, 0], full.index(2), q)
    mbarrier.wait(full.index(2), 0)
    for i in range(steps):
        into = i % 2
        if FAULT != "no_slot_wait":
            mbarrier.wait(s_full.index(into), ((i // 2) & 1) ^ 1)  # the product that read the slot has ended
        mbarrier.expect(full.index(into), k_desc.block_type.nbytes)
        tma.async_load(k_desc, [i * N, 0], full.index(into), k.index(into))
        mbarrier.wait(full.index(into), (i // 2) & 1)
        if FAULT != "no_acc_wait":
            mbarrier.wait(s_empty.index(into), ((i // 2) & 1) ^ (0 if FAULT == "acc_parity" else 1))
        fence("after", FAULT, "not_after_empty")
        target: gl.constexpr = 0
        tcgen05_mma(q, k.index(into).permute((1, 0)), s.index(target if FAULT == "one_acc" else into), use_acc=False)
        if FAULT == "no_commit":
            mbarrier.arrive(s_full.index(into), count=1)
        else:
            tcgen05_commit(s_full.index(into))


@gluon.jit
def largest_by_turns(out, s, s_full, s_empty, steps, FAULT: gl.constexpr):
    """The sum of all scores, read from both accumulators in turn."""
    layout: gl.constexpr = s.index(0).get_reg_layout()
    total = gl.zeros([N, N], gl.float32, layout)
    for i in range(steps):
        source = i % 2
        if FAULT != "no_full_wait":
            mbarrier.wait(s_full.index(source), (i // 2) & 1)
        fence("after", FAULT, "not_after_full")
        if FAULT == "early_release":
            mbarrier.arrive(s_empty.index(source), count=1)
        total += s.index(0 if FAULT == "one_acc" else source).load(layout)
        fence("before", FAULT, "not_before_release")
        if FAULT != "early_release":
            mbarrier.arrive(s_empty.index(source), count=1)
    gl.store(out + tile_places(layout), total)


@gluon.jit
def two_accumulators_kernel(q_desc, k_desc, out, steps, FAULT: gl.constexpr):
    """out = Σ Q·Kᵀ over tiles of K: one role multiplies with tcgen05, one reads tensor memory."""
    q = gl.allocate_shared_memory(gl.float16, [N, N], q_desc.layout)
    k = gl.allocate_shared_memory(gl.float16, [2, N, N], k_desc.layout)
    s = allocate_tensor_memory(gl.float32, [2, N, N], ACC)
    full = mbarrier.allocate_mbarrier(batch=3)
    s_full = mbarrier.allocate_mbarrier(batch=2)
    s_empty = mbarrier.allocate_mbarrier(batch=2)
    mbarrier.init(full.index(2), count=1)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(s_full.index(i), count=2 if FAULT == "count" else 1)
        mbarrier.init(s_empty.index(i), count=1)
    gl.warp_specialize(
        [
            (largest_by_turns, (out, s, s_full, s_empty, steps, FAULT)),
            (scores_by_turns, (q_desc, k_desc, (q, k, s), (full, s_full, s_empty), steps, FAULT)),
        ],
        [1],
        [24],
    )


@gluon.jit
def bring_both(a, b_desc, left, right, bar, ready, FAULT: gl.constexpr):
    rows = gl.arange(0, N, gl.SliceLayout(1, WARP))[:, None]
    cols = gl.arange(0, N, gl.SliceLayout(0, WARP))[None, :]
    ampere.async_copy.async_load(left, a + rows * N + cols)
    ampere.async_copy.commit_group()
    ampere.async_copy.wait_group(0)
    if FAULT != "no fence":
        fence_async_shared()
    mbarrier.expect(bar, b_desc.block_type.nbytes)
    tma.async_load(b_desc, [0, 0], bar, right)
    mbarrier.arrive(ready, count=1)


@gluon.jit
def multiply_both(out, left, right, bar, ready):
    mbarrier.wait(ready, 0)
    mbarrier.wait(bar, 0)
    product = warpgroup_mma(left, right, gl.zeros([N, N], gl.float32, MMA), is_async=True)
    product = warpgroup_mma_wait(0, deps=(product,))
    rows = gl.arange(0, N, gl.SliceLayout(1, MMA))[:, None]
    gl.store(out + rows * N + gl.arange(0, N, gl.SliceLayout(0, MMA))[None, :], product)


@gluon.jit
def two_proxies_kernel(a, b_desc, out, FAULT: gl.constexpr):
    """out = A·B: one warp copies A by cp.async and, once that is over, B by TMA; a warpgroup multiplies."""
    left = gl.allocate_shared_memory(gl.float16, [N, N], b_desc.layout)
    right = gl.allocate_shared_memory(gl.float16, [N, N], b_desc.layout)
    bar = mbarrier.allocate_mbarrier()
    ready = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.init(ready, count=1)
    gl.warp_specialize(
        [
            (multiply_both, (out, left, right, bar, ready)),
            (bring_both, (a, b_desc, left, right, bar, ready, FAULT)),
        ],
        [1],
        [64],
    )
