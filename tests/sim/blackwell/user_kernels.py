"""sm_100 kernels of the kinds that users write, each with faults that a constexpr switches on ("": right)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
    tma,
)
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

ROWS = gl.constexpr(32)
N = gl.constexpr(64)
TILE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def normalise_kernel(x_desc, out_desc, numbers, steps, FAULT: gl.constexpr):
    """Rows of x by their numbers, divided by their largest value, to the same rows of out."""
    tile = gl.allocate_shared_memory(gl.float16, [ROWS, N], x_desc.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    layout: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [1, gl.num_warps()], [1, 0]))
    first = gl.program_id(0) * steps
    for i in range(steps):
        rows = gl.load(numbers + (first + i) * ROWS + gl.arange(0, ROWS, layout))
        mbarrier.expect(bar, N * 2 if FAULT == "row_bytes" else ROWS * N * 2)
        tma.async_gather(x_desc, rows, 0, bar, tile)
        if FAULT != "no_wait":
            mbarrier.wait(bar, i & 1)
        value = tile.load(TILE).to(gl.float32)
        tile.store((value / gl.max(value, 1)[:, None]).to(gl.float16))
        fence_async_shared()
        tma.async_scatter(out_desc, rows - (ROWS if FAULT == "before" else 0), 0, tile)
        tma.store_wait(1 if FAULT == "reused" else 0)
    tma.store_wait(0)
    mbarrier.invalidate(bar)


@gluon.jit
def load_pairs(descs, a, b, full, empty, tiles, steps, FAULT: gl.constexpr):
    a_desc, b_desc, _ = descs
    count = 0
    for tile in range(tiles):
        for k in range(steps):
            slot = count % 2
            mbarrier.wait(empty.index(slot), ((count // 2) & 1) ^ 1)
            mbarrier.expect(full.index(slot), a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
            tma.async_load(a_desc, [tile * a_desc.block_type.shape[0], k * N], full.index(slot), a.index(slot))
            tma.async_load(b_desc, [k * N, 0], full.index(slot), b.index(slot))
            count += 1


@gluon.jit
def multiply_pairs(a, b, acc, barriers, tiles, steps, FAULT: gl.constexpr):
    """Products of tile after tile into two accumulators in turn."""
    full, empty, acc_full, acc_empty = barriers
    count = 0
    for tile in range(tiles):
        into = tile % 2
        if FAULT != "no_acc_wait":
            mbarrier.wait(acc_empty.index(into), ((tile // 2) & 1) ^ (0 if FAULT == "acc_phase" else 1))
        if FAULT == "early_commit":
            tcgen05_commit(acc_full.index(into))
        for k in range(steps):
            slot = count % 2
            mbarrier.wait(full.index(slot), (count // 2) & 1)
            tcgen05_mma(a.index(slot), b.index(slot), acc.index(into), use_acc=k > 0)
            tcgen05_commit(empty.index(slot))
            count += 1
        if FAULT != "early_commit":
            tcgen05_commit(acc_full.index(into))


@gluon.jit
def store_pairs(out_desc, acc, result, acc_full, acc_empty, tiles, FAULT: gl.constexpr):
    layout: gl.constexpr = acc.index(0).get_reg_layout()
    for tile in range(tiles):
        source = tile % 2
        mbarrier.wait(acc_full.index(source), (tile // 2) & 1)
        if FAULT == "early_release":
            mbarrier.arrive(acc_empty.index(source), count=1)
        value = acc.index(source).load(layout)
        if FAULT != "early_release":
            mbarrier.arrive(acc_empty.index(source), count=1)
        tma.store_wait(1 if FAULT == "loose_store_wait" else 0)
        result.store(value.to(gl.float16))
        fence_async_shared()
        tma.async_store(out_desc, [tile * out_desc.block_type.shape[0], 0], result)
    tma.store_wait(0)


@gluon.jit
def pair_gemm_kernel(a_desc, b_desc, out_desc, tiles, steps, acc_layout: gl.constexpr, FAULT: gl.constexpr):
    """out = A·B, tile after tile, by a pair of CTAs: roles that load, multiply and store, two accumulators."""
    M: gl.constexpr = out_desc.block_type.shape[0]
    a = gl.allocate_shared_memory(gl.float16, [2, M, N], a_desc.layout)
    b = gl.allocate_shared_memory(gl.float16, [2, N, N], b_desc.layout)
    result = gl.allocate_shared_memory(gl.float16, out_desc.block_type.shape, out_desc.layout)
    acc = allocate_tensor_memory(gl.float32, [2, M, N], acc_layout)
    full = mbarrier.allocate_mbarrier(batch=2, two_ctas=True)
    empty = mbarrier.allocate_mbarrier(batch=2)
    acc_full = mbarrier.allocate_mbarrier(batch=2)
    acc_empty = mbarrier.allocate_mbarrier(batch=2, two_ctas=FAULT != "own_release")
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(acc_full.index(i), count=2 if FAULT == "count" else 1)
        mbarrier.init(acc_empty.index(i), count=1)
    gl.warp_specialize(
        [
            (store_pairs, (out_desc, acc, result, acc_full, acc_empty, tiles, FAULT)),
            (multiply_pairs, (a, b, acc, (full, empty, acc_full, acc_empty), tiles, steps, FAULT)),
            (load_pairs, ((a_desc, b_desc, out_desc), a, b, full, empty, tiles, steps, FAULT)),
        ],
        [1, 1],
        [24, 24],
    )
