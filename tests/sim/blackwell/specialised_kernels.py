"""A warp-specialised matmul on sm_100: load ─▶ multiply ─▶ store, two accumulators in turn; FAULT: a wrong barrier."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tma,
)

M: gl.constexpr = gl.constexpr(128)
N: gl.constexpr = gl.constexpr(64)


@gluon.jit
def load_role(a_desc, b_desc, a, b, full, empty, tiles):
    """Rows of A for every tile; B again, too."""
    for t in range(tiles):
        mbarrier.wait(empty, (t & 1) ^ 1)
        mbarrier.expect(full, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma.async_load(a_desc, [t * M, 0], full, a)
        tma.async_load(b_desc, [0, 0], full, b)


@gluon.jit
def multiply_role(a, b, acc, bars, tiles, FAULT: gl.constexpr):
    """A tile's product into the accumulator whose turn it is, once the one before the last has been stored."""
    full, empty = bars.index(0), bars.index(1)
    acc_full, acc_empty = bars.slice(2, 2), bars.slice(4, 2)
    for t in range(tiles):
        stage = t & 1
        phase = (t >> 1) & 1
        if FAULT == "other_stage":
            mbarrier.wait(acc_empty.index(stage ^ 1), phase ^ 1)
        else:
            mbarrier.wait(acc_empty.index(stage), phase ^ 1)
        mbarrier.wait(full, t & 1)
        tcgen05_mma(a, b, acc.index(stage), use_acc=False)
        tcgen05_commit(empty)
        tcgen05_commit(acc_full.index(stage))


@gluon.jit
def store_role(out, acc, acc_full, acc_empty, tiles):
    """Each finished accumulator to global memory."""
    layout: gl.constexpr = acc.index(0).get_reg_layout()
    rows = gl.arange(0, M, gl.SliceLayout(1, layout))
    cols = gl.arange(0, N, gl.SliceLayout(0, layout))
    for t in range(tiles):
        stage = t & 1
        mbarrier.wait(acc_full.index(stage), (t >> 1) & 1)
        value = acc.index(stage).load(layout)
        gl.store(out + t * M * N + rows[:, None] * N + cols[None, :], value)
        mbarrier.arrive(acc_empty.index(stage), count=1)


@gluon.jit
def matmul_kernel(a_desc, b_desc, out, tiles, FAULT: gl.constexpr):
    """out[t] = A[t]·B for every tile of rows of A."""
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_type.shape, b_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    full, empty = bars.index(0), bars.index(1)
    acc_full, acc_empty = bars.slice(2, 2), bars.slice(4, 2)
    for i in gl.static_range(6):
        mbarrier.init(bars.index(i), count=1)
    acc = allocate_tensor_memory(gl.float32, [2, M, N], TensorMemoryLayout([M, N], 1))
    gl.warp_specialize(
        [
            (store_role, (out, acc, acc_full, acc_empty, tiles)),
            (multiply_role, (a, b, acc, bars, tiles, FAULT)),
            (load_role, (a_desc, b_desc, a, b, full, empty, tiles)),
        ],
        [1, 1],
        [48, 48],
    )


@gluon.jit
def twice_role(bar):
    """Completes two phases and waits for neither."""
    mbarrier.arrive(bar, count=1)
    mbarrier.arrive(bar, count=1)


@gluon.jit
def once_role(bar, PARITY: gl.constexpr):
    """Waits for one of them."""
    mbarrier.wait(bar, PARITY)


@gluon.jit
def phases_kernel(PARITY: gl.constexpr):
    """A wait that its parity alone does not tell from others: no role waits between the two phases."""
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    gl.warp_specialize([(twice_role, (bar,)), (once_role, (bar, PARITY))], [1], [48])
