"""Attention on sm_100 with the roles of FlashAttention-4, for one tile of queries; FAULT switches a fault on.

load ─ K, V rings ─▶ product ─ S ─▶ softmax ─ P over S, scale over S ─▶ product ─ O ─▶ correction ─▶ product …
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tma,
)

M: gl.constexpr = gl.constexpr(128)
N: gl.constexpr = gl.constexpr(64)
D: gl.constexpr = gl.constexpr(64)


@gluon.aggregate
class Bars:
    """Every barrier: full and empty ones of the rings, and those of the exchange between the roles."""

    q: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    s_full: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    scale_full: gl.shared_memory_descriptor
    o_full: gl.shared_memory_descriptor
    o_ready: gl.shared_memory_descriptor


@gluon.jit
def probabilities(s):
    """P over the first half of S's columns."""
    return s.slice(0, N // 2).reinterpret(gl.bfloat16, [M, N], TensorMemoryLayout([M, N], 1))


@gluon.jit
def scale_of(s, FAULT: gl.constexpr):
    """The factor of every row, over a column of S that P leaves free."""
    column: gl.constexpr = N // 2 - 1 if FAULT == "scale_on_p" else N // 2
    return s.slice(column, 1).reinterpret(gl.float32, [M, 1], TensorMemoryLayout([M, 1], 1))


@gluon.jit
def load(descs, tiles, buffers, bars, FAULT: gl.constexpr):
    q_desc, k_desc, v_desc = descs
    q, k, v = buffers
    mbarrier.expect(bars.q, q_desc.block_type.nbytes)
    tma.async_load(q_desc, [0, 0], bars.q, q)
    for i in range(tiles):
        slot = i % 2
        turn = (i // 2) & 1
        if FAULT != "no_empty_wait":
            mbarrier.wait(bars.k_empty.index(slot), turn ^ 1)
        mbarrier.expect(bars.k_full.index(slot), k_desc.block_type.nbytes)
        tma.async_load(k_desc, [i * N, 0], bars.k_full.index(slot), k.index(slot))
        mbarrier.wait(bars.v_empty.index(slot), turn ^ 1)
        if FAULT == "short_expect":
            mbarrier.expect(bars.v_full.index(slot), v_desc.block_type.nbytes - 16)
        else:
            mbarrier.expect(bars.v_full.index(slot), v_desc.block_type.nbytes)
        tma.async_load(v_desc, [i * N, 0], bars.v_full.index(slot), v.index(slot))


@gluon.jit
def score(i, tiles, q, k, s, bars):
    if i < tiles:
        slot = i % 2
        mbarrier.wait(bars.k_full.index(slot), (i // 2) & 1)
        tcgen05_mma(q, k.index(slot).permute((1, 0)), s, use_acc=False)
        tcgen05_commit(bars.k_empty.index(slot))
        tcgen05_commit(bars.s_full)


@gluon.jit
def product(tiles, q, k, v, s, o, bars, FAULT: gl.constexpr):
    if FAULT != "no_q_wait":
        mbarrier.wait(bars.q, 0)
    score(0, tiles, q, k, s, bars)
    for i in range(tiles):
        slot = i % 2
        if FAULT == "early_score":
            score(i + 1, tiles, q, k, s, bars)
        if FAULT == "p_parity":
            mbarrier.wait(bars.p_full, (i & 1) ^ 1)
        elif FAULT != "no_p_wait":
            mbarrier.wait(bars.p_full, i & 1)
        if FAULT != "no_ready_wait":
            mbarrier.wait(bars.o_ready, i & 1)
        mbarrier.wait(bars.v_full.index(slot), (i // 2) & 1)
        tcgen05_mma(probabilities(s), v.index(slot), o, use_acc=False if FAULT == "forgets" else i > 0)
        if FAULT != "no_v_release":
            tcgen05_commit(bars.v_empty.index(slot))
        if FAULT != "no_o_commit":
            tcgen05_commit(bars.o_full)
        if FAULT != "early_score":
            score(i + 1, tiles, q, k, s, bars)


@gluon.jit
def correction(tiles, s, o, bars, FAULT: gl.constexpr):
    layout: gl.constexpr = o.get_reg_layout()
    for i in range(tiles):
        if FAULT != "no_scale_wait":
            mbarrier.wait(bars.scale_full, i & 1)
        column = scale_of(s, FAULT)
        scale = gl.convert_layout(column.load(), layout)
        if i > 0:
            if FAULT != "no_o_wait":
                mbarrier.wait(bars.o_full, (i - 1) & 1)
            o.store(o.load(layout) * scale)
        mbarrier.arrive(bars.o_ready, count=1)


@gluon.jit
def softmax(out, tiles, scale_log2, s, o, bars, FAULT: gl.constexpr):
    layout: gl.constexpr = s.get_reg_layout()
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    best = gl.full([M], float("-inf"), gl.float32, rows)
    total = gl.full([M], 0.0, gl.float32, rows)
    for i in range(tiles):
        if FAULT != "no_s_wait":
            mbarrier.wait(bars.s_full, i & 1)
        scores = s.load(layout) * scale_log2
        higher = gl.maximum(best, gl.max(scores, 1))
        factor = gl.exp2(best - higher)
        column = scale_of(s, FAULT)
        column.store(gl.convert_layout(gl.expand_dims(factor, 1), column.get_reg_layout()))
        if FAULT != "no_scale_arrive":
            mbarrier.arrive(bars.scale_full, count=1)
        p = gl.exp2(scores - gl.expand_dims(higher, 1))
        if FAULT == "early_p_arrive":
            mbarrier.arrive(bars.p_full, count=1)
        probabilities(s).store(p.to(gl.bfloat16))
        if FAULT != "early_p_arrive":
            mbarrier.arrive(bars.p_full, count=1)
        total = total * factor + gl.sum(p, 1)
        best = higher
    mbarrier.wait(bars.o_full, (tiles - 1) & 1)
    final: gl.constexpr = o.get_reg_layout()
    result = o.load(final) / gl.convert_layout(gl.expand_dims(total, 1), final)
    i = gl.arange(0, M, gl.SliceLayout(1, final))
    j = gl.arange(0, D, gl.SliceLayout(0, final))
    gl.store(out + i[:, None] * D + j[None, :], result)


@gluon.jit
def barriers(COUNT: gl.constexpr):
    bars = mbarrier.allocate_mbarrier(batch=COUNT)
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def attention_kernel(q_desc, k_desc, v_desc, out, tiles, scale_log2, FAULT: gl.constexpr):
    """out = softmax(Q·Kᵀ)·V for 128 queries."""
    q = gl.allocate_shared_memory(gl.bfloat16, [M, D], q_desc.layout)
    k = gl.allocate_shared_memory(gl.bfloat16, [2, N, D], k_desc.layout)
    v = gl.allocate_shared_memory(gl.bfloat16, [2, N, D], v_desc.layout)
    s = allocate_tensor_memory(gl.float32, [M, N], TensorMemoryLayout([M, N], 1))
    o = allocate_tensor_memory(gl.float32, [M, D], TensorMemoryLayout([M, D], 1))
    bars = Bars(
        q=barriers(1).index(0),
        k_full=barriers(2),
        k_empty=barriers(2),
        v_full=barriers(2),
        v_empty=barriers(2),
        s_full=barriers(1).index(0),
        p_full=barriers(1).index(0),
        scale_full=barriers(1).index(0),
        o_full=barriers(1).index(0),
        o_ready=barriers(1).index(0),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (softmax, (out, tiles, scale_log2, s, o, bars, FAULT)),
            (correction, (tiles, s, o, bars, FAULT)),
            (product, (tiles, q, k, v, s, o, bars, FAULT)),
            (load, ((q_desc, k_desc, v_desc), tiles, (q, k, v), bars, FAULT)),
        ],
        [4, 1, 1],
        [80, 24, 24],
    )
