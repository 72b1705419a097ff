"""Small sm_100 kernels in Gluon: tensor memory, tcgen05 products and copies; FAULT switches a fault on."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    add2,
    allocate_tensor_memory,
    fence_async_shared,
    fma2,
    max2,
    mbarrier,
    min2,
    mul2,
    sub2,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
    tma,
)


@gluon.jit
def store_tile(out, value, layout: gl.constexpr):
    rows = gl.arange(0, value.shape[0], gl.SliceLayout(1, layout))
    cols = gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))
    gl.store(out + rows[:, None] * value.shape[1] + cols[None, :], value.to(gl.float32))


@gluon.jit
def matmul_kernel(a_desc, b_desc, out, steps, FAULT: gl.constexpr):
    """out = A·B over K in steps, both operands loaded by TMA; the product arrives on `done` itself or by a commit."""
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_type.shape, b_desc.layout)
    M: gl.constexpr = a.shape[0]
    N: gl.constexpr = b.shape[1]
    full = mbarrier.allocate_mbarrier()
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.init(done, count=1)
    acc = allocate_tensor_memory(gl.float32, [M, N], TensorMemoryLayout([M, N], 1))
    nbytes: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    for i in range(steps):
        mbarrier.expect(full, nbytes // 2 if FAULT == "short_expect" else nbytes)
        tma.async_load(a_desc, [0, i * a.shape[1]], full, a)
        tma.async_load(b_desc, [i * a.shape[1], 0], full, b)
        if FAULT != "no_load_wait":
            mbarrier.wait(full, i & 1)
        if FAULT == "inline":
            tcgen05_mma(a, b, acc, use_acc=i > 0, mbarriers=[done])
        elif FAULT == "forgets":
            tcgen05_mma(a, b, acc, use_acc=False, mbarriers=[done])
        elif FAULT == "unwritten":
            tcgen05_mma(a, b, acc, use_acc=True, mbarriers=[done])
        elif FAULT == "skipped":
            tcgen05_mma(a, b, acc, use_acc=i > 0, pred=i != 1)
            tcgen05_commit(done)
        else:
            tcgen05_mma(a, b, acc, use_acc=i > 0)
            if FAULT == "two_commits":
                tcgen05_commit(done)
            if FAULT != "no_commit":
                tcgen05_commit(done)
        if FAULT == "wrong_parity":
            mbarrier.wait(done, (i & 1) ^ 1)
        elif FAULT != "no_wait":
            mbarrier.wait(done, i & 1)
    layout: gl.constexpr = acc.get_reg_layout()
    store_tile(out, acc.load(layout), layout)


@gluon.jit
def transposed_kernel(a_desc, b_desc, out):
    """out = A·Bᵀ with B's tile transposed where it lies."""
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_type.shape, b_desc.layout)
    M: gl.constexpr = a.shape[0]
    N: gl.constexpr = b.shape[0]
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    tma.async_load(a_desc, [0, 0], bar, a)
    tma.async_load(b_desc, [0, 0], bar, b)
    mbarrier.wait(bar, 0)
    acc = allocate_tensor_memory(gl.float32, [M, N], TensorMemoryLayout([M if M < 128 else 128, N], 1))
    tcgen05_mma(a, b.permute((1, 0)), acc, use_acc=False, mbarriers=[bar])
    mbarrier.wait(bar, 1)
    layout: gl.constexpr = acc.get_reg_layout()
    store_tile(out, acc.load(layout), layout)


@gluon.jit
def weights_kernel(p_ptr, v_desc, out, DTYPE: gl.constexpr, FAULT: gl.constexpr):
    """out = P·V with P [128, 64] of 8 bits in tensor memory, four in a column and written in parts, and V [64, N] whose
    keys are rows of shared memory."""
    v = gl.allocate_shared_memory(v_desc.dtype, v_desc.block_type.shape, v_desc.layout)
    N: gl.constexpr = v.shape[1]
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, v_desc.block_type.nbytes)
    tma.async_load(v_desc, [0, 0], bar, v)
    s = allocate_tensor_memory(gl.float32, [128, 64], TensorMemoryLayout([128, 64], 1))
    acc = allocate_tensor_memory(gl.float32, [128, N], TensorMemoryLayout([128, N], 1))
    half: gl.constexpr = s.slice(0, 32).get_reg_layout()
    rows = gl.arange(0, 128, gl.SliceLayout(1, half))
    cols = gl.arange(0, 32, gl.SliceLayout(0, half))
    left = gl.load(p_ptr + rows[:, None] * 64 + cols[None, :]).to(DTYPE)
    right = gl.load(p_ptr + rows[:, None] * 64 + 32 + cols[None, :]).to(DTYPE)
    p = s.slice(0, 16).reinterpret(DTYPE, [128, 64], TensorMemoryLayout([128, 64], 1))
    if FAULT == "one_a_column":
        loose = s.reinterpret(DTYPE, [128, 64], TensorMemoryLayout([128, 64], 4))
        loose.slice(0, 32).store(left)
        loose.slice(32, 32).store(right)
    elif FAULT == "two_a_column":
        wide = s.slice(0, 32).reinterpret(gl.bfloat16, [128, 64], TensorMemoryLayout([128, 64], 1))
        wide.slice(0, 32).store(left.to(gl.float32).to(gl.bfloat16))
        wide.slice(32, 32).store(right.to(gl.float32).to(gl.bfloat16))
    else:
        p.slice(0, 32).store(left)
        if FAULT == "columns_of_16_bits":  # where the second part of 16-bit weights begins
            s.slice(16, 8).reinterpret(DTYPE, [128, 32], TensorMemoryLayout([128, 32], 1)).store(right)
        else:
            p.slice(32, 32).store(right)
    mbarrier.wait(bar, 0)
    tcgen05_mma(p.slice(0, 32), v.slice(0, 32), acc, use_acc=False)
    tcgen05_mma(p.slice(32, 32), v.slice(32, 32), acc, mbarriers=[bar])
    mbarrier.wait(bar, 1)
    layout: gl.constexpr = acc.get_reg_layout()
    store_tile(out, acc.load(layout), layout)


@gluon.jit
def tiles_kernel(x, out, M: gl.constexpr, N: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """A tile, its halves, and the tile read as 16-bit integers, in any layout of blocks."""
    tile = allocate_tensor_memory(gl.float32, [M, N], TensorMemoryLayout([BM, BN], 1))
    layout: gl.constexpr = tile.get_reg_layout()
    rows = gl.arange(0, M, gl.SliceLayout(1, layout))
    cols = gl.arange(0, N, gl.SliceLayout(0, layout))
    tile.store(gl.load(x + rows[:, None] * N + cols[None, :]))
    store_tile(out, tile.load(layout), layout)
    half: gl.constexpr = tile.slice(0, N // 2).get_reg_layout()
    store_tile(out + M * N, tile.slice(N // 2, N // 2).load(half), half)
    store_tile(out + M * N + M * N // 2, tile.slice(0, N // 2).load(half), half)


@gluon.jit
def alias_kernel(x, out):
    """Stages, and 16-bit tiles over 32-bit ones: packed, and one to a column."""
    layout32: gl.constexpr = TensorMemoryLayout([128, 64], 1)
    ring = allocate_tensor_memory(gl.float32, [2, 128, 64], layout32)
    layout: gl.constexpr = ring.index(0).get_reg_layout()
    rows = gl.arange(0, 128, gl.SliceLayout(1, layout))
    cols = gl.arange(0, 64, gl.SliceLayout(0, layout))
    value = gl.load(x + rows[:, None] * 64 + cols[None, :])
    ring.index(0).store(value)
    ring.index(1).store(value + 1.0)
    packed = ring.index(1).reinterpret(gl.bfloat16, [128, 64], layout32)
    packed.store((value + 2.0).to(gl.bfloat16))
    loose = ring.index(0).reinterpret(gl.bfloat16, [128, 64], TensorMemoryLayout([128, 64], 2))
    store_tile(out, loose.load(layout), layout)
    store_tile(out + 128 * 64, packed.load(layout), layout)
    upper = ring.index(1).slice(32, 32)
    half: gl.constexpr = upper.get_reg_layout()
    store_tile(out + 2 * 128 * 64, upper.load(half), half)


@gluon.jit
def reduce_kernel(x, out, best):
    """Loads with the largest or smallest of every row."""
    tile = allocate_tensor_memory(gl.float32, [128, 32], TensorMemoryLayout([128, 32], 1))
    layout: gl.constexpr = tile.get_reg_layout()
    rows = gl.arange(0, 128, gl.SliceLayout(1, layout))
    cols = gl.arange(0, 32, gl.SliceLayout(0, layout))
    tile.store(gl.load(x + rows[:, None] * 32 + cols[None, :]))
    value, high = tile.load_max(layout)
    _, low = tile.load_min(layout, abs=True)
    store_tile(out, value, layout)
    gl.store(best + rows, gl.convert_layout(high, gl.SliceLayout(1, layout)))
    gl.store(best + 128 + rows, gl.convert_layout(low, gl.SliceLayout(1, layout)))


@gluon.jit
def packed_kernel(x, y, out, DTYPE: gl.constexpr):
    """Packed arithmetic, each operation a row of the output."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    i = gl.arange(0, 256, layout)
    a = gl.load(x + i).to(DTYPE)
    b = gl.load(y + i).to(DTYPE)
    gl.store(out + i, add2(a, b).to(gl.float32))
    gl.store(out + 256 + i, sub2(a, b).to(gl.float32))
    gl.store(out + 512 + i, mul2(a, b).to(gl.float32))
    gl.store(out + 768 + i, fma2(a, b, a).to(gl.float32))
    if DTYPE.primitive_bitwidth == 16:
        gl.store(out + 1024 + i, min2(a, b).to(gl.float32))
        gl.store(out + 1280 + i, max2(a, b).to(gl.float32))


@gluon.jit
def copy_kernel(x_desc, out, FAULT: gl.constexpr):
    """Shared memory to tensor memory by tcgen05.cp."""
    tile = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    acc = allocate_tensor_memory(x_desc.dtype, tile.shape, TensorMemoryLayout([128, tile.shape[1]], 1))
    bar = mbarrier.allocate_mbarrier(batch=2)
    mbarrier.init(bar.index(0), count=1)
    mbarrier.init(bar.index(1), count=1)
    mbarrier.expect(bar.index(0), x_desc.block_type.nbytes)
    tma.async_load(x_desc, [0, 0], bar.index(0), tile)
    mbarrier.wait(bar.index(0), 0)
    tcgen05_copy(tile, acc)
    tcgen05_commit(bar.index(1))
    if FAULT != "no_wait":
        mbarrier.wait(bar.index(1), 0)
    layout: gl.constexpr = acc.get_reg_layout()
    store_tile(out, acc.load(layout), layout)


@gluon.jit
def fill_operands(x, a, b, ready, FAULT: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 128, gl.SliceLayout(1, layout))
    cols = gl.arange(0, 64, gl.SliceLayout(0, layout))
    value = gl.load(x + rows[:, None] * 64 + cols[None, :])
    a.store(value)
    b.store(value)
    if FAULT != "no_fence":
        fence_async_shared()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def issue_product(a, b, acc, ready, done, FAULT: gl.constexpr):
    if FAULT != "no_wait":
        mbarrier.wait(ready, 0)
    tcgen05_mma(a, b.permute((1, 0)), acc, use_acc=False, mbarriers=[done])


@gluon.jit
def handover_kernel(x, out, FAULT: gl.constexpr):
    """One role fills the operands with ordinary stores, another one multiplies them."""
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 64], gl.float16)
    a = gl.allocate_shared_memory(gl.float16, [128, 64], shared)
    b = gl.allocate_shared_memory(gl.float16, [128, 64], shared)
    acc = allocate_tensor_memory(gl.float32, [128, 128], TensorMemoryLayout([128, 128], 1))
    ready = mbarrier.allocate_mbarrier()
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(ready, count=1)
    mbarrier.init(done, count=1)
    gl.warp_specialize(
        [(fill_operands, (x, a, b, ready, FAULT)), (issue_product, (a, b, acc, ready, done, FAULT))], [1], [24]
    )
    if FAULT != "never_waited":
        mbarrier.wait(done, 0)
        layout: gl.constexpr = acc.get_reg_layout()
        store_tile(out, acc.load(layout), layout)


@gluon.jit
def write_slice(tile, START: gl.constexpr, VALUE: gl.constexpr):
    part = tile.slice(START, 32)
    part.store(gl.full([128, 32], VALUE, gl.float32, part.get_reg_layout()))


@gluon.jit
def slices_kernel(out, FAULT: gl.constexpr):
    """Two roles write two slices of a tile."""
    tile = allocate_tensor_memory(gl.float32, [128, 64], TensorMemoryLayout([128, 64], 1))
    gl.warp_specialize(
        [(write_slice, (tile, 0, 1.0)), (write_slice, (tile, 16 if FAULT == "overlap" else 32, 2.0))], [4], [24]
    )
    layout: gl.constexpr = tile.get_reg_layout()
    store_tile(out, tile.load(layout), layout)


@gluon.jit
def big_kernel(out, COLUMNS: gl.constexpr):
    """Two tiles at once: 512 columns are all there are."""
    a = allocate_tensor_memory(gl.float32, [128, 256], TensorMemoryLayout([128, 256], 1))
    b = allocate_tensor_memory(gl.float32, [128, COLUMNS], TensorMemoryLayout([128, COLUMNS], 1))
    layout: gl.constexpr = b.get_reg_layout()
    b.store(gl.full([128, COLUMNS], 1.0, gl.float32, layout))
    a.store(gl.full([128, 256], 1.0, gl.float32, a.get_reg_layout()))
    store_tile(out, b.load(layout), layout)
