"""Small gfx942 and gfx950 kernels in Gluon; FAULT "" and "relaxed" are correct, other values break one thing."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3, cdna4
from triton.experimental.gluon.language.amd.cdna4 import async_copy

N: gl.constexpr = gl.constexpr(32)
ROWS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [8, 8], [4, 1], [1, 0]))
FLAT: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def lds_layout(BYTES: gl.constexpr, dtype: gl.constexpr, COLS: gl.constexpr):
    """Where the lanes of a copy to LDS stand: BYTES each (4 on gfx942, 16 on gfx950), rows of COLS elements."""
    width: gl.constexpr = BYTES * 8 // dtype.primitive_bitwidth
    lanes: gl.constexpr = min(64, COLS // width)
    return gl.BlockedLayout([1, width], [64 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def grid2d(M: gl.constexpr, K: gl.constexpr, layout: gl.constexpr):
    rows = gl.arange(0, M, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, K, gl.SliceLayout(0, layout))[None, :]
    return rows, cols


@gluon.jit
def buffer_kernel(x, out, n, OP: gl.constexpr):
    """One tile by buffer operations."""
    rows, cols = grid2d(N, N, ROWS)
    offsets = rows * N + cols
    if OP == "plain":
        cdna3.buffer_store(cdna3.buffer_load(x, offsets), out, offsets)
    elif OP == "masked":
        cdna3.buffer_store(cdna3.buffer_load(x, offsets, mask=rows < n), out, offsets)
    elif OP == "other":
        cdna3.buffer_store(cdna3.buffer_load(x, offsets, mask=rows < n, other=5, cache=".cg"), out, offsets)
    elif OP == "store":
        cdna3.buffer_store(cdna3.buffer_load(x, offsets), out, offsets, mask=cols < n)
    elif OP == "outside":
        cdna3.buffer_store(cdna3.buffer_load(x, offsets + n), out, offsets)
    elif OP == "outside_store":
        cdna3.buffer_store(cdna3.buffer_load(x, offsets), out, offsets - n)
    elif OP == "slice":
        narrow: gl.constexpr = gl.BlockedLayout([1, 1], [8, 8], [4, 1], [1, 0])
        rows, cols = grid2d(N, N, narrow)
        value = gl.amd.slice(cdna3.buffer_load(x, rows * N + cols), [N, N // 2], [0, N // 2])
        gl.amd.hint.sched_barrier()
        half_rows, half_cols = grid2d(N, N // 2, narrow)
        gl.barrier()
        cdna3.buffer_store(value, out, half_rows * (N // 2) + half_cols)


@gluon.jit
def atomic_kernel(x, out, OP: gl.constexpr):
    """Every program updates the same row."""
    layout: gl.constexpr = gl.BlockedLayout([1], [64], [4], [0])
    i = gl.arange(0, N, layout)
    value = cdna3.buffer_load(x, i + gl.program_id(0) * N)
    if OP == "add":
        cdna3.buffer_atomic_add(out, i, value, mask=i < N - 1)
    elif OP == "max":
        cdna3.buffer_atomic_max(out, i, value)
    elif OP == "min":
        cdna3.buffer_atomic_min(out, i, value)
    elif OP == "and":
        cdna3.buffer_atomic_and(out, i, value)
    elif OP == "or":
        cdna3.buffer_atomic_or(out, i, value)
    elif OP == "xor":
        cdna3.buffer_atomic_xor(out, i, value)
    elif OP == "store":
        cdna3.buffer_store(value, out, i)


@triton.jit
def swap_kernel(x, out):
    """Compare and swap, which Gluon has no buffer operation for, but Triton makes one."""
    i = tl.arange(0, 32)
    tl.store(out + i, tl.atomic_cas(x + i, i, 2 * i + 1))


@gluon.jit
def copy_kernel(x, out, n, OP: gl.constexpr, BYTES: gl.constexpr):
    """One tile through LDS by a copy of its own."""
    layout: gl.constexpr = lds_layout(BYTES, x.dtype.element_ty, N)
    rows, cols = grid2d(N, N, layout)
    tile = gl.allocate_shared_memory(x.dtype.element_ty, [N, N], FLAT)
    if OP == "buffer":
        async_copy.buffer_load_to_shared(tile, x, rows * N + cols)
    elif OP == "buffer_mask":
        async_copy.buffer_load_to_shared(tile, x, rows * N + cols, mask=rows < n)
    elif OP == "buffer_other":
        async_copy.buffer_load_to_shared(tile, x, rows * N + cols, mask=rows < n, other=3)
    elif OP == "pointers":
        async_copy.global_load_to_shared(tile, x + rows * N + cols)
    elif OP == "pointers_other":
        async_copy.global_load_to_shared(tile, x + rows * N + cols, mask=rows < n, other=3)
    elif OP == "pointers_mask":
        async_copy.global_load_to_shared(tile, x + rows * N + cols, mask=rows < n)
    elif OP == "outside":
        async_copy.global_load_to_shared(tile, x + n * N + rows * N + cols)
    async_copy.commit_group()
    async_copy.wait_group(0)
    out_rows, out_cols = grid2d(N, N, ROWS)
    cdna3.buffer_store(async_copy.load_shared_relaxed(tile, ROWS), out, out_rows * N + out_cols)


@gluon.jit
def fetch(x, ring, i, slot, n, FAULT: gl.constexpr, BYTES: gl.constexpr):
    """Start the copy of tile i."""
    rows, cols = grid2d(N, N, lds_layout(BYTES, x.dtype.element_ty, N))
    offsets = (i * N + rows) * N + cols
    if FAULT == "outside":
        async_copy.buffer_load_to_shared(ring.index(slot), x, offsets)
    else:
        async_copy.buffer_load_to_shared(ring.index(slot), x, offsets, mask=(i * N + rows) < n * N)
    if FAULT != "no_commit" and FAULT != "late_commit":
        async_copy.commit_group()


@gluon.jit
def ring_kernel(x, out, n, FAULT: gl.constexpr, BYTES: gl.constexpr):
    """The sum of n tiles, with the next one under way to the other of two slots while one is added."""
    ring = gl.allocate_shared_memory(x.dtype.element_ty, [2, N, N], FLAT)
    total = gl.zeros([N, N], gl.float32, ROWS)
    fetch(x, ring, 0, 0, n, FAULT, BYTES)
    for i in range(n):
        fetch(x, ring, i + 1, i % 2 if FAULT == "same_slot" else (i + 1) % 2, n, FAULT, BYTES)
        if FAULT == "loose_wait":
            async_copy.wait_group(2)
        elif FAULT != "no_wait":
            async_copy.wait_group(1)
        if FAULT == "late_commit":
            async_copy.commit_group()
        if FAULT == "store_under_copy":
            ring.index((i + 1) % 2).store(total.to(x.dtype.element_ty))
        slot = (i + 1) % 2 if FAULT == "wrong_slot" else i % 2
        if FAULT == "relaxed":
            total += async_copy.load_shared_relaxed(ring.index(slot), ROWS).to(gl.float32)
        else:
            total += ring.index(slot).load(ROWS).to(gl.float32)
        if FAULT == "overtaken":
            fetch(x, ring, i + 1, (i + 1) % 2, n, FAULT, BYTES)
    if FAULT != "no_last_wait":
        async_copy.wait_group(0)
    rows, cols = grid2d(N, N, ROWS)
    cdna3.buffer_store(total, out, rows * N + cols)


@gluon.jit
def staged_kernel(x, out, n, LAYOUT: gl.constexpr):
    """Tiles through LDS by ordinary stores, in two stages of a pipeline of warps; read back transposed."""
    tile = gl.allocate_shared_memory(x.dtype.element_ty, [N, N], LAYOUT)
    rows, cols = grid2d(N, N, ROWS)
    total = gl.zeros([N, N], gl.float32, ROWS)
    for i in range(n):
        with gl.amd.warp_pipeline_stage("load", priority=1):
            tile.store(cdna3.buffer_load(x, i * N * N + rows * N + cols))
        with gl.amd.warp_pipeline_stage("add", priority=0):
            total += tile.permute((1, 0)).load(ROWS).to(gl.float32)
    cdna3.buffer_store(total, out, rows * N + cols)


@gluon.jit
def mfma_kernel(a, b, out, K: gl.constexpr, LAYOUT: gl.constexpr, WIDTH: gl.constexpr, SHARED: gl.constexpr):
    """out = A·Bᵀ of two [N, K] matrices; B through LDS, transposed."""
    rows, cols = grid2d(N, K, ROWS)
    left = gl.convert_layout(cdna3.buffer_load(a, rows * K + cols), gl.DotOperandLayout(0, LAYOUT, WIDTH))
    tile = gl.allocate_shared_memory(b.dtype.element_ty, [N, K], SHARED)
    tile.store(cdna3.buffer_load(b, rows * K + cols))
    right = tile.permute((1, 0)).load(gl.DotOperandLayout(1, LAYOUT, WIDTH))
    total = cdna3.mfma(left, right, gl.zeros([N, N], out.dtype.element_ty, LAYOUT))
    out_rows, out_cols = grid2d(N, N, LAYOUT)
    cdna3.buffer_store(total, out, out_rows * N + out_cols)


@gluon.jit
def scales(x, layout: gl.constexpr):
    rows, cols = grid2d(N, 4, layout)
    return cdna3.buffer_load(x, rows * 4 + cols)


@gluon.jit
def scaled_kernel(a, b, a_scale, b_scale, out, FORMATS: gl.constexpr, SCALED: gl.constexpr):
    """out = A·Bᵀ of operands with K = 128 in microscaled formats; two e2m1 stand in a byte."""
    layout: gl.constexpr = gl.amd.AMDMFMALayout(4, [16, 16, 128], True, [2, 2])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 16)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 16)
    a_bytes: gl.constexpr = 64 if FORMATS[0] == "e2m1" else 128
    b_bytes: gl.constexpr = 64 if FORMATS[1] == "e2m1" else 128
    rows, cols = grid2d(N, a_bytes, left)
    x = cdna3.buffer_load(a, rows * a_bytes + cols)
    rows, cols = grid2d(b_bytes, N, right)
    y = cdna3.buffer_load(b, cols * b_bytes + rows)
    total = gl.full([N, N], 1.0, gl.float32, layout)
    if SCALED:
        x_scale = scales(a_scale, cdna4.get_mfma_scale_layout(left, [N, 4]))
        y_scale = scales(b_scale, cdna4.get_mfma_scale_layout(right, [N, 4]))
        total = cdna4.mfma_scaled(x, x_scale, FORMATS[0], y, y_scale, FORMATS[1], total)
    else:
        total = cdna4.mfma_scaled(x, None, FORMATS[0], y, None, FORMATS[1], total)
    rows, cols = grid2d(N, N, layout)
    cdna3.buffer_store(total, out, rows * N + cols)


@gluon.jit
def upcast_kernel(a, scale, out, KIND: gl.constexpr):
    """Packed fp4, or fp8, as numbers: fp4 along the columns or the rows, with a scale for each element or without."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 8], [4, 1], [1, 0])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [8, 8], [4, 1], [1, 0])
    tall: gl.constexpr = gl.BlockedLayout([2, 4], [8, 8], [4, 1], [1, 0])
    rows, cols = grid2d(N, N, layout)
    x = cdna3.buffer_load(a, rows * N + cols)
    if KIND == "columns":
        value = gl.fp4_to_fp(x, gl.bfloat16, 1)
        rows, cols = grid2d(N, 2 * N, wide)
        cdna3.buffer_store(gl.convert_layout(value, wide).to(gl.float32), out, rows * 2 * N + cols)
    elif KIND == "rows":
        rows, cols = grid2d(2 * N, N, tall)
        value = gl.fp4_to_fp(x, gl.float16, 0)
        cdna3.buffer_store(gl.convert_layout(value, tall).to(gl.float32), out, rows * N + cols)
    elif KIND == "fp4":
        rows, cols = grid2d(N, 2 * N, wide)
        factor = cdna3.buffer_load(scale, rows * 2 * N + cols)
        value = cdna4.scaled_upcast(x, factor, gl.bfloat16, 1)
        cdna3.buffer_store(value.to(gl.float32), out, rows * 2 * N + cols)
    else:
        factor = cdna3.buffer_load(scale, rows * N + cols)
        cdna3.buffer_store(cdna4.scaled_upcast(x, factor, gl.bfloat16).to(gl.float32), out, rows * N + cols)


@gluon.jit
def repacked_kernel(a, b, out):
    """out = A·Bᵀ of e2m1 operands [32, 128], both packed along their rows in LDS."""
    layout: gl.constexpr = gl.amd.AMDMFMALayout(4, [16, 16, 128], True, [2, 2])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 16)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 16)
    rows, cols = grid2d(N // 2, 128, ROWS)
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
    x = gl.allocate_shared_memory(gl.uint8, [N // 2, 128], shared, cdna3.buffer_load(a, rows * 128 + cols))
    rows, cols = grid2d(128, N // 2, ROWS)
    turned: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    y = gl.allocate_shared_memory(gl.uint8, [128, N // 2], turned, cdna3.buffer_load(b, cols * 128 + rows))
    first, second = cdna4.load_shared_fp4_repacked(x, left), cdna4.load_shared_fp4_repacked(y, right)
    total = cdna4.mfma_scaled(first, None, "e2m1", second, None, "e2m1", gl.full([N, N], 0.0, gl.float32, layout))
    rows, cols = grid2d(N, N, layout)
    cdna3.buffer_store(total, out, rows * N + cols)
