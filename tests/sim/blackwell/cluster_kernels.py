"""Small kernels for clusters of two CTAs: split tiles, remote arrivals, multicast, products of a pair; with faults."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    allocate_tensor_memory,
    clc,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
    tcgen05_mma_barrier_count,
)
from triton.experimental.gluon.language.nvidia.hopper import (
    cluster,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from tests.sim.blackwell.kernels import store_tile


@gluon.jit
def halves_kernel(x_desc, y_desc, flag, out, FAULT: gl.constexpr):
    """y = 2x by TMA and out = the sums of the rows of x, each CTA its half of the rows."""
    a = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, x_desc.nbytes_per_cta * 2 if FAULT == "long_expect" else x_desc.nbytes_per_cta)
    tma.async_load(x_desc, [0, 0], bar, a)
    if FAULT != "no_wait":
        mbarrier.wait(bar, 0)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0], x_desc.layout.cga_layout)
    value = a.load(layout)
    a.store(value * 2)
    if FAULT != "no_fence":
        fence_async_shared()
    tma.async_store(y_desc, [0, 0], a)
    tma.store_wait(0)
    rows = gl.arange(0, a.shape[0], gl.SliceLayout(1, layout))
    gl.store(out + rows, gl.sum(value, 1))
    if FAULT == "crossed":  # the rows of the other CTA, and nothing says that it has written them
        gl.store(out + a.shape[0] + rows, gl.load(out + (rows ^ (a.shape[0] // 2))))
    if FAULT == "met":
        cluster.barrier()
        gl.store(out + a.shape[0] + rows, gl.load(out + (rows ^ (a.shape[0] // 2))))
    gl.store(flag + gl.program_id(0), 7.0)  # one CTA does that for both


@gluon.jit
def load_role(x_desc, a, full, empty, go, steps, FAULT: gl.constexpr):
    """`empty` is CTA 0's, and only it waits there, for both; then it lets both go on."""
    for i in range(steps):
        if FAULT != "no_empty_wait":
            mbarrier.wait(empty, (i & 1) ^ 1)
        if FAULT != "no_go":
            mbarrier.arrive(go, count=1, from_cta=0)
            mbarrier.wait(go, i & 1)
        mbarrier.expect(full, x_desc.nbytes_per_cta)
        tma.async_load(x_desc, [i * a.shape[0], 0], full, a, multicast=True)


@gluon.jit
def sum_role(a, full, empty, out, steps, layout: gl.constexpr, FAULT: gl.constexpr):
    total = gl.zeros([a.shape[0], a.shape[1]], gl.float32, layout)
    for i in range(steps):
        mbarrier.wait(full, i & 1)
        if FAULT != "early_release":
            total += a.load(layout)
        mbarrier.arrive(empty, count=1)
        if FAULT == "early_release":
            total += a.load(layout)
    store_tile(out, total, layout)


@gluon.jit
def multicast_kernel(x_desc, out, steps, layout: gl.constexpr, FAULT: gl.constexpr):
    """Both CTAs get every tile from the copies of CTA 0, and each sums its half of the rows."""
    a = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    full = mbarrier.allocate_mbarrier()
    empty = mbarrier.allocate_mbarrier(two_ctas=FAULT != "own_empty")
    go = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    mbarrier.init(go, count=1)
    gl.warp_specialize(
        [
            (sum_role, (a, full, empty, out, steps, layout, FAULT)),
            (load_role, (x_desc, a, full, empty, go, steps, FAULT)),
        ],
        [1],
        [24],
    )


@gluon.jit
def relay_kernel(out, FAULT: gl.constexpr):
    """CTA 0 lets both CTAs go on by an arrival from_cta=0, after both have written."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], [[1]])
    rows = gl.arange(0, 256, layout)
    go = mbarrier.allocate_mbarrier()
    mbarrier.init(go, count=2 if FAULT == "two_needed" else 1)
    gl.store(out + rows, (rows + 1).to(gl.float32))
    if FAULT != "no_meeting":
        cluster.barrier()
    mbarrier.arrive(go, count=1, from_cta=0)
    mbarrier.wait(go, 0)
    gl.store(out + 256 + rows, gl.load(out + (rows ^ 128)))


@gluon.jit
def product_kernel(a_desc, b_desc, out, steps, acc_layout: gl.constexpr, MULTI: gl.constexpr, FAULT: gl.constexpr):
    """out = A·B over K in steps with tcgen05: by each CTA for itself (B multicast or loaded twice) or by the pair."""
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_type.shape, b_desc.layout)
    PAIR: gl.constexpr = acc_layout.two_ctas
    full = mbarrier.allocate_mbarrier(two_ctas=PAIR)
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.init(done, count=1 if FAULT == "one_commit" else tcgen05_mma_barrier_count([a, b], MULTI, PAIR))
    acc = allocate_tensor_memory(gl.float32, [a.shape[0], b.shape[1]], acc_layout)
    for i in range(steps):
        if FAULT != "short_expect":
            mbarrier.expect(full, a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
        else:
            mbarrier.expect(full, a_desc.nbytes_per_cta)
        tma.async_load(a_desc, [0, i * a.shape[1]], full, a)
        tma.async_load(b_desc, [i * a.shape[1], 0], full, b, multicast=MULTI)
        if FAULT != "no_load_wait":
            mbarrier.wait(full, i & 1)
        if FAULT == "inline":
            tcgen05_mma(a, b, acc, use_acc=i > 0, multicast=MULTI, mbarriers=[done])
        else:
            tcgen05_mma(a, b, acc, use_acc=i > 0, multicast=MULTI)
            tcgen05_commit(done, descs=[a, b] if MULTI and FAULT != "own_commit" else [])
        if FAULT != "no_wait":
            mbarrier.wait(done, i & 1)
    layout: gl.constexpr = acc.get_reg_layout()
    store_tile(out, acc.load(layout), layout)


@gluon.jit
def wgmma_kernel(a_desc, b_desc, out, mma: gl.constexpr, FAULT: gl.constexpr):
    """out = A·B on sm_90: each CTA has its half of the rows of A, and gets B by multicast."""
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_type.shape, b_desc.layout)
    full = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.expect(full, a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
    tma.async_load(a_desc, [0, 0], full, a)
    tma.async_load(b_desc, [0, 0], full, b, multicast=True)
    if FAULT != "no_wait":
        mbarrier.wait(full, 0)
    zero = gl.zeros([a.shape[0], b.shape[1]], gl.float32, mma)
    if FAULT == "registers":
        left = a.load(gl.DotOperandLayout(0, mma, 2))
        store_tile(out, warpgroup_mma(left, b, zero), mma)
    else:
        store_tile(out, warpgroup_mma(a, b, zero), mma)


@gluon.jit
def column_sums_kernel(x, out):
    """A reduction over the rows, of which each CTA has half."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0], [[1, 0]])
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = gl.arange(0, 64, gl.SliceLayout(0, layout))
    total = gl.sum(gl.load(x + rows[:, None] * 64 + cols[None, :]), 0)
    gl.store(out + cols, total)


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def crossing_kernel(x, out, WAY: gl.constexpr):
    """What needs elements that another CTA holds."""
    split: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], [[1]])
    whole: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], [[0]])
    value = gl.load(x + gl.arange(0, 256, split))
    if WAY == "atomic":
        gl.atomic_add(out + gl.arange(0, 256, split), value)
    elif WAY == "convert":
        gl.store(out + gl.arange(0, 256, whole), gl.convert_layout(value, whole))
    elif WAY == "scan":
        gl.store(out + gl.arange(0, 256, split), gl.associative_scan(value, 0, _plus))
    elif WAY == "reverse":
        gl.store(out + gl.arange(0, 256, split), gl.gather(value, 255 - gl.arange(0, 256, split), 0))
    elif WAY == "ticket":  # both CTAs get the one old value
        ticket = gl.atomic_add(x, 1.0)
        gl.store(out + gl.arange(0, 256, split), value + ticket)
    elif WAY == "unwritten":  # the rows of one CTA were never written
        tile = gl.allocate_shared_memory(gl.float32, [256], gl.SwizzledSharedLayout(1, 1, 1, [0], [[1]]))
        moved = gl.convert_layout(tile.load(split), whole)
        gl.store(out + gl.arange(0, 256, whole), gl.where(gl.arange(0, 256, whole) < 300, moved, 0.0))
    else:
        tile = gl.allocate_shared_memory(gl.float32, [256], gl.SwizzledSharedLayout(1, 1, 1, [0], [[1]]))
        tile.store(value)
        gl.store(out + gl.arange(0, 256, whole), tile.load(whole))


@gluon.jit
def pair_attention_kernel(q_desc, k_desc, v_desc, out, tiles, s_layout: gl.constexpr, o_layout: gl.constexpr,
                          FAULT: gl.constexpr):  # fmt: skip
    """out = Σ relu(Q·Kᵀ)·V by a pair: each CTA has half the rows of Q and K and half the columns of V."""
    q = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_type.shape, q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, k_desc.block_type.shape, k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, v_desc.block_type.shape, v_desc.layout)
    M: gl.constexpr = q.shape[0]
    N: gl.constexpr = k.shape[0]
    full = mbarrier.allocate_mbarrier(two_ctas=True)
    ready = mbarrier.allocate_mbarrier(two_ctas=True)
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.init(ready, count=1)
    mbarrier.init(done, count=1)
    s = allocate_tensor_memory(gl.float32, [M, N], s_layout)
    o = allocate_tensor_memory(gl.float32, [M, v.shape[1]], o_layout)
    p = s.reinterpret(gl.float16, [M, N], s_layout)
    layout: gl.constexpr = s.get_reg_layout()
    for i in range(tiles):
        mbarrier.expect(full, q_desc.nbytes_per_cta + k_desc.nbytes_per_cta + v_desc.nbytes_per_cta)
        tma.async_load(q_desc, [0, 0], full, q)
        tma.async_load(k_desc, [i * N, 0], full, k)
        tma.async_load(v_desc, [i * N, 0], full, v)
        mbarrier.wait(full, i & 1)
        tcgen05_mma(q, k.permute((1, 0)), s, use_acc=False)
        tcgen05_commit(done)
        mbarrier.wait(done, 0)
        p.store(gl.maximum(s.load(layout), 0.0).to(gl.float16))
        if FAULT != "no_ready":
            mbarrier.arrive(ready, count=1)
            mbarrier.wait(ready, i & 1)
        tcgen05_mma(p, v, o, use_acc=i > 0)
        tcgen05_commit(done)
        mbarrier.wait(done, 1)
    store_tile(out, o.load(o.get_reg_layout()), o.get_reg_layout())


@gluon.jit
def looping_kernel(x_desc, y_desc, out, steps, FAULT: gl.constexpr):
    """Barriers made anew for every tile; both CTAs store the same tile, and out = its even + its odd columns."""
    a = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0], x_desc.layout.cga_layout)
    N: gl.constexpr = a.shape[1]
    for i in range(steps):
        bar = mbarrier.allocate_mbarrier()
        if i < steps:
            mbarrier.init(bar, count=1)
        mbarrier.expect(bar, x_desc.nbytes_per_cta)
        tma.async_load(x_desc, [i * a.shape[0], 0], bar, a)
        mbarrier.wait(bar, 0)
        mbarrier.invalidate(bar)
        even, odd = gl.split(a.load(layout).reshape([a.shape[0], N // 2, 2]))
        if FAULT == "differ":
            rank = gl.inline_asm("mov.u32 $0, %cluster_ctarank;", "=r", [], gl.int32)
            a.store(gl.full([a.shape[0], N], rank.to(gl.float32), gl.float32, layout))
            fence_async_shared()
        tma.async_store(y_desc, [i * a.shape[0], 0], a)
        if FAULT != "no_store_wait":
            tma.store_wait(0)
        both = even + odd
        store_tile(out + i * a.shape[0] * (N // 2), both, both.type.layout)
        if FAULT != "no_meeting":
            cluster.barrier()


@gluon.jit
def met_role(out, layout: gl.constexpr, FAULT: gl.constexpr):
    rows = gl.arange(0, 128, layout)
    gl.store(out + rows, (rows + 1).to(gl.float32))
    if FAULT != "no_role_meeting":
        cluster.barrier()
    gl.store(out + 128 + rows, gl.load(out + (rows ^ 64)))


@gluon.jit
def meeting_roles_kernel(out, FAULT: gl.constexpr):
    """Two roles, of which the CTAs meet in each."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], [[1]])
    gl.warp_specialize([(met_role, (out, layout, FAULT)), (met_role, (out + 256, layout, FAULT))], [4], [24])


@gluon.jit
def copied_accumulator_kernel(c_desc, a_desc, b_desc, out, acc_layout: gl.constexpr, FAULT: gl.constexpr):
    """out = C + A·B, with C copied to tensor memory: by each CTA or by the pair."""
    PAIR: gl.constexpr = acc_layout.two_ctas
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_type.shape, b_desc.layout)
    c = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_type.shape, c_desc.layout)
    full = mbarrier.allocate_mbarrier(two_ctas=PAIR)
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.init(done, count=1)
    acc = allocate_tensor_memory(gl.float32, [a.shape[0], b.shape[1]], acc_layout)
    mbarrier.expect(full, a_desc.nbytes_per_cta + b_desc.nbytes_per_cta + c_desc.nbytes_per_cta)
    tma.async_load(a_desc, [0, 0], full, a)
    tma.async_load(b_desc, [0, 0], full, b)
    tma.async_load(c_desc, [0, 0], full, c)
    if FAULT != "no_wait":
        mbarrier.wait(full, 0)
    tcgen05_copy(c, acc)
    tcgen05_mma(a, b, acc)
    tcgen05_commit(done)
    if FAULT != "no_done":
        mbarrier.wait(done, 0)
    layout: gl.constexpr = acc.get_reg_layout()
    store_tile(out, acc.load(layout), layout)


@gluon.jit
def stealing_kernel(out, FAULT: gl.constexpr):
    """Each cluster marks its own tile, a half by each CTA, then those of clusters that it has cancelled."""
    answer = gl.allocate_shared_memory(gl.int64, [2], gl.SwizzledSharedLayout(1, 1, 1, [0], [[0]]))
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    columns = gl.arange(0, 256, gl.BlockedLayout([1], [32], [4], [0], [[1]]))
    tile, going, phase = gl.program_id(0), True, 0
    while going:
        gl.store(out + tile * 256 + columns, gl.program_id(0) + 1)
        mbarrier.expect(bar, 16)
        clc.try_cancel(answer, bar)
        mbarrier.wait(bar, phase)
        found = clc.load_result(answer)
        going = found.is_canceled()
        tile = found.program_id(0)
        phase ^= 1
        if FAULT != "no_meeting":  # CTA 0 asks again only when both have read the answer
            cluster.barrier()
    mbarrier.invalidate(bar)
