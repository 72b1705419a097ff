"""Hopper and CDNA kernels of the kinds that users write, each with faults that a constexpr switches on ("": right)."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3
from triton.experimental.gluon.language.nvidia import ampere
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

N: gl.constexpr = gl.constexpr(64)
STAGES: gl.constexpr = gl.constexpr(3)
TILE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
MMA: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LINE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
WAVES: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [64], [4], [0]))


@gluon.jit
def places(layout: gl.constexpr):
    rows = gl.arange(0, N, gl.SliceLayout(1, layout))[:, None]
    return rows * N + gl.arange(0, N, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def load_operands(a_desc, b_desc, a, b, full, empty, steps, FAULT: gl.constexpr):
    nbytes: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    for i in range(steps):
        slot = i % STAGES
        turn = (i // STAGES) & 1
        if FAULT != "no_empty_wait":
            mbarrier.wait(empty.index(slot), turn if FAULT == "empty_phase" else turn ^ 1)
        mbarrier.expect(full.index(slot), nbytes // 2 if FAULT == "half_bytes" else nbytes)
        tma.async_load(a_desc, [0, i * N], full.index(slot), a.index(slot))
        tma.async_load(b_desc, [i * N, 0], full.index(slot), b.index(slot))


@gluon.jit
def multiply(out_desc, a, b, full, empty, steps, FAULT: gl.constexpr):
    """A product is under way while the next one starts; the slot before goes back when its product has ended."""
    total = gl.zeros([N, N], gl.float32, MMA)
    for i in range(steps):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), ((i // STAGES) & 1) ^ (1 if FAULT == "full_phase" else 0))
        total = warpgroup_mma(a.index(slot), b.index(slot), total, is_async=True)
        total = warpgroup_mma_wait(1, deps=(total,))
        if FAULT == "early_release":
            mbarrier.arrive(empty.index(slot), count=1)
        else:
            mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
    total = warpgroup_mma_wait(1 if FAULT == "loose_last_wait" else 0, deps=(total,))
    result = gl.allocate_shared_memory(gl.float16, [N, N], out_desc.layout)
    result.store(total.to(gl.float16))
    fence_async_shared()
    tma.async_store(out_desc, [0, 0], result)
    if FAULT != "no_store_wait":
        tma.store_wait(0)


@gluon.jit
def gemm_kernel(a_desc, b_desc, out_desc, steps, FAULT: gl.constexpr):
    """out = A·B: a warp loads by TMA into a ring, a warpgroup multiplies."""
    a = gl.allocate_shared_memory(gl.float16, [STAGES, N, N], a_desc.layout)
    b = gl.allocate_shared_memory(gl.float16, [STAGES, N, N], b_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2 if FAULT == "count" else 1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (out_desc, a, b, full, empty, steps, FAULT)),
            (load_operands, (a_desc, b_desc, a, b, full, empty, steps, FAULT)),
        ],
        [1],
        [24],
    )


@triton.jit
def split_k_kernel(a, b, total, done, out, B: tl.constexpr, K: tl.constexpr, FAULT: tl.constexpr):
    """Each program adds its part of the inner dimension to `total`; the last one writes `out` in 16 bits and zeroes."""
    rows, depth, parts = tl.arange(0, B), tl.program_id(0) * K + tl.arange(0, K), tl.num_programs(0)
    left = tl.load(a + rows[:, None] * (parts * K) + depth[None, :])
    right = tl.load(b + depth[:, None] * B + rows[None, :])
    at = total + rows[:, None] * B + rows[None, :]
    if FAULT == "plain_add":
        tl.store(at, tl.load(at) + tl.dot(left, right))
    else:
        tl.atomic_add(at, tl.dot(left, right), sem="relaxed")
    order: tl.constexpr = "relaxed" if FAULT == "relaxed" else "acq_rel"
    if tl.atomic_add(done, 1, sem=order) == (0 if FAULT == "first" else parts - 1):
        tl.store(out + rows[:, None] * B + rows[None, :], tl.load(at).to(tl.float16))
        tl.debug_barrier()  # Triton loads `at` in another layout than it stores it in
        tl.store(at, tl.zeros([B, B], tl.float32))
        tl.store(done, 0)


@gluon.jit
def copied_operands_kernel(a, b, out, steps, FAULT: gl.constexpr):
    """out = A·B with operands copied by cp.async into a ring of three, two steps ahead, one product under way."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, N], gl.float16)
    left = gl.allocate_shared_memory(gl.float16, [STAGES, N, N], layout)
    right = gl.allocate_shared_memory(gl.float16, [STAGES, N, N], layout)
    rows = gl.arange(0, N, gl.SliceLayout(1, TILE))[:, None]
    cols = gl.arange(0, N, gl.SliceLayout(0, TILE))[None, :]
    for i in gl.static_range(2):
        ampere.async_copy.async_load(left.index(i), a + rows * (steps * N) + i * N + cols)
        ampere.async_copy.async_load(right.index(i), b + (i * N + rows) * N + cols)
        if FAULT != "one_group" or i == 1:
            ampere.async_copy.commit_group()
    total = gl.zeros([N, N], gl.float32, MMA)
    for i in range(steps):
        slot = i % STAGES
        ampere.async_copy.wait_group(2 if FAULT == "loose_wait" else 1)
        fence_async_shared()
        total = warpgroup_mma(left.index(slot), right.index(slot), total, is_async=True)
        total = warpgroup_mma_wait(1, deps=(total,))
        after = i + 3 if FAULT == "same_slot" else i + 2
        inside = after < steps
        ampere.async_copy.async_load(
            left.index(after % STAGES), a + rows * (steps * N) + after * N + cols, mask=(rows >= 0) & inside
        )
        ampere.async_copy.async_load(
            right.index(after % STAGES), b + (after * N + rows) * N + cols,
            mask=(rows >= 0) & (inside if FAULT != "outside" else True),
        )  # fmt: skip
        ampere.async_copy.commit_group()
    ampere.async_copy.wait_group(0)
    total = warpgroup_mma_wait(0, deps=(total,))
    gl.store(out + places(MMA), total)


@gluon.jit
def stream_kernel(x_desc, out_desc, tiles, FAULT: gl.constexpr):
    """out = 2x, tile by tile, through two buffers for copies out, of which one is under way."""
    tile = gl.allocate_shared_memory(gl.float16, [N, N], x_desc.layout)
    results = gl.allocate_shared_memory(gl.float16, [2, N, N], x_desc.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    first = gl.program_id(0) * tiles
    for i in range(tiles):
        mbarrier.expect(bar, x_desc.block_type.nbytes)
        tma.async_load(x_desc, [(first + i) * N, 0], bar, tile)
        mbarrier.wait(bar, i & 1)
        value = tile.load(TILE)
        if FAULT == "late_wait":
            results.index(i % 2).store(value + value)
            tma.store_wait(1)
        else:
            tma.store_wait(2 if FAULT == "loose_wait" else 1)
            results.index(i % 2).store(value + value)
        fence_async_shared()
        tma.async_store(out_desc, [(first + (i // 2 * 2 if FAULT == "same_rows" else i)) * N, 0], results.index(i % 2))
    if FAULT != "no_last_wait":
        tma.store_wait(0)
    mbarrier.invalidate(bar)


@gluon.jit
def hand_out(counter, slots, full, empty, total, FAULT: gl.constexpr):
    """Takes the next tile from the counter and passes it on; the first number beyond the end says to stop."""
    i = 0
    going = True
    while going:
        if FAULT == "plain_counter":
            tile = gl.load(counter)
            gl.store(counter, tile + 1)
        else:
            tile = gl.atomic_add(counter, 1, sem="relaxed")
        if FAULT != "no_empty_wait":
            mbarrier.wait(empty.index(i % 2), ((i // 2) & 1) ^ 1)
        slots.index(i % 2).store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
        mbarrier.arrive(full.index(i % 2), count=1, pred=(tile < total) if FAULT == "no_end" else True)
        going = tile < total
        i += 1


@gluon.jit
def square_tiles(x, out, slots, full, empty, total, FAULT: gl.constexpr):
    at = gl.arange(0, 128, LINE)
    i = 0
    going = True
    while going:
        mbarrier.wait(full.index(i % 2), (i // 2) & 1)
        if FAULT == "early_release":
            mbarrier.arrive(empty.index(i % 2), count=1)
        tile = gl.max(slots.index(i % 2).load(LINE), 0)
        if FAULT != "early_release":
            mbarrier.arrive(empty.index(i % 2), count=1)
        going = tile < total
        value = gl.load(x + tile * 128 + at, mask=(at >= 0) & going, other=0.0)
        gl.store(out + tile * 128 + at, value * value, mask=(at >= 0) & (True if FAULT == "outside" else going))
        i += 1


@gluon.jit
def persistent_kernel(x, out, counter, total, FAULT: gl.constexpr):
    """out = x² in tiles of 128 that programs take from a counter: one warp takes, a warpgroup works."""
    slots = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = mbarrier.allocate_mbarrier(batch=2)
    empty = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (square_tiles, (x, out, slots, full, empty, total, FAULT)),
            (hand_out, (counter, slots, full, empty, total, FAULT)),
        ],
        [1],
        [24],
    )


@gluon.jit
def exchange_kernel(part, part_desc, flag, out, FAULT: gl.constexpr):
    """Program 0 writes a tile with ordinary stores, program 1 copies it by TMA once it has seen the flag."""
    if gl.program_id(0) == 0:
        gl.store(part + places(TILE), places(TILE).to(gl.float32))
        if FAULT != "no_fence" and FAULT != "late_fence":
            gl.inline_asm("fence.proxy.async.global;")
        gl.atomic_xchg(flag, 1, sem="relaxed" if FAULT == "relaxed" else "release")
    else:
        tile = gl.allocate_shared_memory(gl.float32, [N, N], part_desc.layout)
        bar = mbarrier.allocate_mbarrier()
        mbarrier.init(bar, count=1)
        seen = gl.atomic_add(flag, 0, sem="acquire")
        while seen == (7 if FAULT == "no_poll" else 0):
            seen = gl.atomic_add(flag, 0, sem="acquire")
        if FAULT == "late_fence":
            gl.inline_asm("fence.proxy.async;")
        mbarrier.expect(bar, part_desc.block_type.nbytes)
        tma.async_load(part_desc, [0, 0], bar, tile)
        mbarrier.wait(bar, 0)
        gl.store(out + places(TILE), tile.load(TILE))


@gluon.jit
def read_signalled(x, out, bars, FAULT: gl.constexpr):
    mbarrier.wait(bars.index(0), 0)
    gl.store(out + gl.arange(0, 128, LINE), gl.load(x + gl.arange(0, 128, LINE)) + 1.0)
    if FAULT != "early_invalidate":
        mbarrier.arrive(bars.index(1), count=1)


@gluon.jit
def signal(x, bars, FAULT: gl.constexpr):
    if FAULT == "late_init":
        mbarrier.init(bars.index(0), count=1)
    gl.store(x + gl.arange(0, 128, LINE), gl.full([128], 2.0, gl.float32, LINE))
    mbarrier.arrive(bars.index(0), count=1)
    if FAULT != "early_invalidate":
        mbarrier.wait(bars.index(1), 0)
    mbarrier.invalidate(bars.index(0))


@gluon.jit
def lifetime_kernel(x, out, FAULT: gl.constexpr):
    """A role writes x and signals, another one waits and reads; the first one invalidates the barrier behind that."""
    bars = mbarrier.allocate_mbarrier(batch=2)
    if FAULT != "late_init":
        mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    if FAULT == "late_init":
        gl.warp_specialize([(signal, (x, bars, FAULT)), (read_signalled, (x, out, bars, FAULT))], [4], [24])
    else:
        gl.warp_specialize([(read_signalled, (x, out, bars, FAULT)), (signal, (x, bars, FAULT))], [4], [24])


@gluon.jit
def two_tiles_kernel(first_desc, out, FAULT: gl.constexpr):
    """A tile of ones goes out by TMA, then a tile of twos is transposed; Triton gives both the same bytes unless the
    first one is named behind the second."""
    first = gl.allocate_shared_memory(gl.float16, [N, N], first_desc.layout)
    first.store(gl.full([N, N], 1.0, gl.float16, TILE))
    fence_async_shared()
    tma.async_store(first_desc, [0, 0], first)
    if FAULT == "":
        tma.store_wait(0)
    second = gl.allocate_shared_memory(gl.float16, [N, N], first_desc.layout)
    second.store(gl.full([N, N], 2.0, gl.float16, TILE))
    gl.store(out + places(TILE), second.permute((1, 0)).load(TILE))
    tma.store_wait(0)
    if FAULT == "kept":
        first._keep_alive()


@gluon.jit
def tiles_kernel(out_desc, TILES: gl.constexpr):
    """Tiles of fp16 in shared memory, of which the last one is written."""
    tiles = gl.allocate_shared_memory(gl.float16, [TILES, N, N], out_desc.layout)
    tiles.index(TILES - 1).store(gl.full([N, N], 1.0, gl.float16, TILE))
    fence_async_shared()
    tma.async_store(out_desc, [0, 0], tiles.index(TILES - 1))
    tma.store_wait(0)


@gluon.jit
def halves_kernel(half_desc, out, FAULT: gl.constexpr):
    """Two half tiles go out by TMA; then a whole one gets the bytes of both."""
    half: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    upper = gl.allocate_shared_memory(gl.float16, [N // 2, N], half_desc.layout)
    lower = gl.allocate_shared_memory(gl.float16, [N // 2, N], half_desc.layout)
    upper.store(gl.full([N // 2, N], 1.0, gl.float16, half))
    lower.store(gl.full([N // 2, N], 2.0, gl.float16, half))
    fence_async_shared()
    if FAULT == "upper":
        tma.async_store(half_desc, [N // 2, 0], lower)
        tma.async_store(half_desc, [0, 0], upper)
    else:
        tma.async_store(half_desc, [0, 0], upper)
        tma.async_store(half_desc, [N // 2, 0], lower)
    tma.store_wait(0 if FAULT == "" else 1)
    whole = gl.allocate_shared_memory(gl.float16, [N, N], half_desc.layout)
    whole.store(gl.full([N, N], 3.0, gl.float16, TILE))
    gl.store(out + places(TILE), whole.permute((1, 0)).load(TILE))
    tma.store_wait(0)


@gluon.jit
def tile_a_turn_kernel(out_desc, turns, FAULT: gl.constexpr):
    """A new tile each turn, which is the same bytes, goes out by TMA."""
    for i in range(turns):
        tile = gl.allocate_shared_memory(gl.float16, [N, N], out_desc.layout)
        tile.store(gl.full([N, N], i, gl.float16, TILE))
        fence_async_shared()
        tma.async_store(out_desc, [i * N, 0], tile)
        tma.store_wait(1 if FAULT == "loose_wait" else 0)
    tma.store_wait(0)


@gluon.jit
def counted_sum_kernel(x, part, done, out, programs, FAULT: gl.constexpr):
    """CDNA: each program sums its rows by buffer loads and adds to `part`; the last one writes the sum to `out`."""
    at = gl.arange(0, 256, WAVES)
    value = cdna3.buffer_load(x, gl.program_id(0) * 256 + at)
    if FAULT == "plain_add":
        cdna3.buffer_store(cdna3.buffer_load(part, at) + value, part, at)
    else:
        cdna3.buffer_atomic_add(part, at, value)
    order: gl.constexpr = "relaxed" if FAULT == "relaxed" else "acq_rel"
    if gl.atomic_add(done, 1, sem=order) == programs - 1:
        cdna3.buffer_store(cdna3.buffer_load(part, at), out, at + (1 if FAULT == "outside" else 0))
