"""Kernels of sm_100 around copies by row number, block-scaled products and cluster launch control."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    clc,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma_scaled,
    tma,
)
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

ROWS = gl.constexpr(32)
M, N, K = gl.constexpr(128), gl.constexpr(64), gl.constexpr(128)


@gluon.jit
def gather_kernel(x_desc, out_desc, rows, column, FAULT: gl.constexpr):
    """Rows of x by their numbers into a tile, and the tile to the same rows of out."""
    tile = gl.allocate_shared_memory(gl.float16, [ROWS, 64], x_desc.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    layout: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [1, gl.num_warps()], [1, 0]))
    numbers = gl.load(rows + gl.arange(0, ROWS, layout))
    mbarrier.expect(bar, ROWS * 64 * 2)
    tma.async_gather(x_desc, numbers, column, bar, tile)
    if FAULT != "no_wait":
        mbarrier.wait(bar, 0)
    tma.async_scatter(out_desc, numbers, column, tile)
    if FAULT != "no_store_wait":
        tma.store_wait(0)
    mbarrier.invalidate(bar)


@gluon.jit
def load_tile(pointer, rows: gl.constexpr, columns: gl.constexpr, layout: gl.constexpr):
    """A row-major tile."""
    row = gl.arange(0, rows, gl.SliceLayout(1, layout))[:, None]
    return gl.load(pointer + row * columns + gl.arange(0, columns, gl.SliceLayout(0, layout))[None, :])


@gluon.jit
def copy_scales(packed, target, BLOCK: gl.constexpr, FAULT: gl.constexpr):
    """Scales [128, K / BLOCK], of which four columns and 32 rows of each quarter are 16 bytes, by a copy."""
    shared: gl.constexpr = gl.NVMMASharedLayout(0, 8, 2)
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0])
    fours: gl.constexpr = K // BLOCK // 4
    tile = gl.allocate_shared_memory(
        packed.dtype.element_ty, [32 * fours, 16], shared, load_tile(packed, 32 * fours, 16, layout)
    )
    if FAULT != "no_fence":
        fence_async_shared()
    tcgen05_copy(tile.reshape([1, fours, 32, 4, 4]).permute([0, 3, 2, 1, 4]).reshape([128, 4 * fours]), target)
    return tile


@gluon.jit
def scaled_kernel(a, b, a_scale, b_scale, out, FORMAT: gl.constexpr, BLOCK: gl.constexpr, FAULT: gl.constexpr):
    """out = (a · scales) @ (b · scales)ᵀ for a [M, K], b [N, K], scales [rows, K / BLOCK], those of a maybe packed."""
    packed: gl.constexpr = 2 if FORMAT == "e2m1" else 1
    shared: gl.constexpr = gl.NVMMASharedLayout(128 if packed == 1 else 64, 8, 2)
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    a_tile = gl.allocate_shared_memory(
        a.dtype.element_ty, [M, K // packed], shared, load_tile(a, M, K // packed, layout)
    )
    b_tile = gl.allocate_shared_memory(
        b.dtype.element_ty, [N, K // packed], shared, load_tile(b, N, K // packed, layout)
    )
    scales: gl.constexpr = TensorMemoryScalesLayout()
    kind: gl.constexpr = a_scale.dtype.element_ty
    a_scales = allocate_tensor_memory(kind, [M, K // BLOCK], scales)
    b_scales = allocate_tensor_memory(kind, [N, K // BLOCK], scales)
    by_row: gl.constexpr = a_scales.get_reg_layout()
    by_column: gl.constexpr = b_scales.get_reg_layout()
    packed_scales: gl.constexpr = FAULT.startswith("copied")
    if packed_scales:
        tile = copy_scales(a_scale, a_scales, BLOCK, FAULT)
    else:
        a_scales.store(load_tile(a_scale, M, K // BLOCK, by_row))
    b_scales.store(load_tile(b_scale, N, K // BLOCK, by_column))
    acc = allocate_tensor_memory(gl.float32, [M, N], TensorMemoryLayout([M, N], col_stride=1))
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    fence_async_shared()
    tcgen05_mma_scaled(a_tile, b_tile.permute([1, 0]), acc, a_scales, b_scales, FORMAT, FORMAT, use_acc=False)
    tcgen05_commit(bar)
    if FAULT == "copied_over":
        tile.store(gl.full(tile.shape, 0, tile.dtype, gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0])))
    if FAULT == "early_scales":
        a_scales.store(load_tile(a_scale, M, K // BLOCK, by_row))
    if FAULT != "no_wait":
        mbarrier.wait(bar, 0)
    result: gl.constexpr = acc.get_reg_layout()
    value = acc.load(result)
    row = gl.arange(0, M, gl.SliceLayout(1, result))[:, None]
    gl.store(out + row * N + gl.arange(0, N, gl.SliceLayout(0, result))[None, :], value)


@gluon.jit
def stealing_kernel(out, FAULT: gl.constexpr):
    """Each program marks its own tile, then those of programs that it has cancelled before they start."""
    answer = gl.allocate_shared_memory(gl.int64, [2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    tile, going, phase = gl.program_id(0), True, 0
    while going:
        gl.store(out + tile, gl.program_id(0) + 1)
        mbarrier.expect(bar, 16)
        clc.try_cancel(answer, bar)
        if FAULT != "no_wait":
            mbarrier.wait(bar, phase)
        found = clc.load_result(answer)
        going = found.is_canceled()
        tile = found.program_id(0)
        phase ^= 1
    mbarrier.invalidate(bar)


@gluon.jit
def halves_by_threads_kernel(x, weights, out, FAULT: gl.constexpr):
    """out = x · a number, each CTA of two its half of the rows by cp.async; both hold all weights, and reshape them."""
    halves: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], cga_layout=[[1, 0]])
    shared: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0], cga_layout=[[1, 0]])
    tile = gl.allocate_shared_memory(gl.float32, [64, 32], shared)
    row = gl.arange(0, 64, gl.SliceLayout(1, halves))[:, None]
    at = row * 32 + gl.arange(0, 32, gl.SliceLayout(0, halves))[None, :]
    async_copy.async_load(tile, x + at, mask=(row < 60) & (at >= 0))
    async_copy.commit_group()
    whole: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=[[0]])
    table = gl.load(weights + gl.arange(0, 64, whole)).reshape([8, 8])
    factor = gl.max(gl.max(table, 1), 0)
    if FAULT != "no_wait":
        async_copy.wait_group(0)
    gl.store(out + at, tile.load(halves) * factor)
