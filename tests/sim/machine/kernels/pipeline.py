"""A small kernel for each struct of the K/V pipelines: out = Σ relu(Q·Kᵀ/8)·V over the tiles of K and V.

load ─ ring or rings ─▶ product ─ S ─▶ relu ─ P ─▶ product …          V(n-1) is held while K(n) is waited for
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
    tensor_memory_descriptor,
    tma,
)

from tests.sim.blackwell.kernels import store_tile
from warpattn.kernels.nvidia.kv_ring import KVConsumerPipeline, KVProducerPipeline, make_kv_pipeline
from warpattn.kernels.nvidia.pipelines import consumer_state, make_pipeline, producer_state
from warpattn.kernels.nvidia.tma_ring import (
    KVConsumerRings,
    KVProducerRings,
    TMAConsumerPipeline,
    make_tma_producer,
)

M: gl.constexpr = gl.constexpr(128)
N: gl.constexpr = gl.constexpr(64)
STAGES: gl.constexpr = gl.constexpr(3)


@gluon.aggregate
class Exchange:
    """Tensor memory and the barriers between the tensor core and the warps that make P of S."""

    s: tensor_memory_descriptor
    p: tensor_memory_descriptor
    o: tensor_memory_descriptor
    s_full: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    p_empty: gl.shared_memory_descriptor
    o_full: gl.shared_memory_descriptor


@gluon.jit
def barrier():
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    return bar


@gluon.jit
def make_exchange(D: gl.constexpr):
    s = allocate_tensor_memory(gl.float32, [M, N], TensorMemoryLayout([M, N], 1))
    p = allocate_tensor_memory(gl.float16, [M, N], TensorMemoryLayout([M, N], 1))
    o = allocate_tensor_memory(gl.float32, [M, D], TensorMemoryLayout([M, D], 1))
    return Exchange(s, p, o, barrier(), barrier(), barrier(), barrier())


@gluon.jit
def relu_role(out, tiles, x):
    layout: gl.constexpr = x.s.get_reg_layout()
    for i in range(tiles):
        mbarrier.wait(x.s_full, i & 1)
        p = gl.maximum(x.s.load(layout) * 0.125, 0.0)
        mbarrier.wait(x.p_empty, (i & 1) ^ 1)
        x.p.store(p.to(gl.float16))
        mbarrier.arrive(x.p_full, count=1)
    mbarrier.wait(x.o_full, 0)
    o_layout: gl.constexpr = x.o.get_reg_layout()
    store_tile(out, x.o.load(o_layout), o_layout)


@gluon.jit
def scores(kv, state, q, x, chunks: gl.constexpr):
    """S = Q·Kᵀ, chunk by chunk; Q's chunk comes with the first K's."""
    for c in gl.static_range(chunks):
        kv.wait_k(state, c)
        k = kv.k_tile(state, c)
        tcgen05_mma(q.index(c).reshape([M, q.shape[-1]]), k.reshape([N, k.shape[-1]]).permute((1, 0)), x.s,
                    use_acc=c > 0)  # fmt: skip
    tcgen05_commit(x.s_full)


@gluon.jit
def product_role(kv, tiles, q, x, chunks: gl.constexpr):
    """Products in the order of the Blackwell kernel: K(n), then P(n-1)·V(n-1), then both are given back."""
    state = kv.start()
    scores(kv, state, q, x, chunks)
    for c in gl.static_range(chunks):
        state = kv.release_k(state, c)
    state = kv.wait_v(state)
    for i in range(1, tiles):
        mbarrier.wait(x.p_full, (i - 1) & 1)
        scores(kv, state, q, x, chunks)
        values = kv.v_tile(state)
        tcgen05_mma(x.p, values.reshape([N, values.shape[-1]]), x.o, use_acc=i > 1)
        tcgen05_commit(x.p_empty)
        kv.release_v(state)
        for c in gl.static_range(chunks):
            state = kv.release_k(state, c)
        state = kv.wait_v(state)
    mbarrier.wait(x.p_full, (tiles - 1) & 1)
    values = kv.v_tile(state)
    tcgen05_mma(x.p, values.reshape([N, values.shape[-1]]), x.o, use_acc=tiles > 1)
    tcgen05_commit(x.o_full)


@gluon.jit
def load_role(kv, descs, tiles, q, chunks: gl.constexpr):
    """Q's chunks ride on those of the first K."""
    q_desc, k_desc, v_desc = descs
    width: gl.constexpr = q.shape[-1]
    state = kv.start()
    for i in range(tiles):
        for c in gl.static_range(chunks):
            kv.acquire_k(state, c)
            full, smem = kv.get_k(state, c, i > 0)
            if i == 0:
                mbarrier.expect(full, q_desc.block_type.nbytes + k_desc.block_type.nbytes)
                tma.async_load(q_desc, [0, c * width], full, q.index(c))
            tma.async_load(k_desc, [i * N, c * width], full, smem)
        state = kv.commit_k(state)
        kv.acquire_v(state)
        full, smem = kv.get_v(state)
        tma.async_load(v_desc, [i * N, 0], full, smem)
        state = kv.commit_v(state)


@gluon.jit
def shared_ring_kernel(q_desc, k_desc, v_desc, out, tiles):
    """One ring of three slots for K and V: KVProducerPipeline and KVConsumerPipeline."""
    D: gl.constexpr = q_desc.block_type.shape[1]
    q = gl.allocate_shared_memory(gl.float16, [1, M, D], q_desc.layout)
    ring = make_kv_pipeline(gl.allocate_shared_memory(gl.float16, [STAGES, N, D], k_desc.layout), STAGES)
    producer = KVProducerPipeline(ring, k_desc.block_type.nbytes)
    consumer = KVConsumerPipeline(ring)
    producer.init()
    x = make_exchange(D)
    fence_async_shared()
    gl.warp_specialize(
        [
            (relu_role, (out, tiles, x)),
            (product_role, (consumer, tiles, q, x, 1)),
            (load_role, (producer, (q_desc, k_desc, v_desc), tiles, q, 1)),
        ],
        [1, 1],
        [24, 24],
    )


@gluon.jit
def two_rings_kernel(q_desc, k_desc, v_desc, out, tiles, chunks: gl.constexpr):
    """A ring for K, in chunks of columns, and one for V: KVProducerRings and KVConsumerRings."""
    width: gl.constexpr = q_desc.block_type.shape[1]
    D: gl.constexpr = v_desc.block_type.shape[1]
    q = gl.allocate_shared_memory(gl.float16, [chunks, M, width], q_desc.layout)
    k_smem = gl.allocate_shared_memory(gl.float16, [STAGES * chunks, N, width], k_desc.layout)
    k = make_kv_pipeline(k_smem, STAGES, chunks)
    v = make_kv_pipeline(gl.allocate_shared_memory(gl.float16, [STAGES, N, D], v_desc.layout), STAGES)
    k.init()
    v.init()
    k_producer = make_tma_producer(k, True, k_desc.block_type.nbytes)
    v_producer = make_tma_producer(v, False, v_desc.block_type.nbytes)
    producer = KVProducerRings(k_producer, v_producer)
    consumer = KVConsumerRings(TMAConsumerPipeline(k, True), TMAConsumerPipeline(v, False))
    x = make_exchange(D)
    fence_async_shared()
    gl.warp_specialize(
        [
            (relu_role, (out, tiles, x)),
            (product_role, (consumer, tiles, q, x, chunks)),
            (load_role, (producer, (q_desc, k_desc, v_desc), tiles, q, chunks)),
        ],
        [1, 1],
        [24, 24],
    )


@gluon.jit
def write(trace, at, value):
    gl.store(trace + at, value)
    return at + 1


@gluon.jit
def slots_kernel(trace, phases, tiles):
    """The slots that a consumer of the shared ring waits for and gives back, in the order of `product_role`."""
    smem = gl.allocate_shared_memory(gl.float16, [6, N, N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    ring = make_kv_pipeline(smem, 6)
    kv = KVConsumerPipeline(ring)
    kv.init()
    for slot in gl.static_range(6):
        mbarrier.arrive(ring.full(slot), count=1)
    state = kv.start()
    kv.wait_k(state)
    at = write(trace, 0, state.ring.index)
    at = write(trace, at, state.ring.index)
    state = kv.release_k(state)
    state = kv.wait_v(state)
    at = write(trace, at, state.v_release_index)
    for _ in range(1, tiles):
        kv.wait_k(state)
        at = write(trace, at, state.ring.index)
        kv.release_v(state)
        at = write(trace, at, state.v_release_index)
        at = write(trace, at, state.ring.index)
        state = kv.release_k(state)
        state = kv.wait_v(state)
        at = write(trace, at, state.v_release_index)
    for slot in gl.static_range(5):
        mbarrier.wait(ring.empty(slot), 0)  # all but the last V have been given back
    gl.store(phases, state.ring.index)
    gl.store(phases + 1, state.ring.phase)


@gluon.jit
def scale_role(ring, out, steps, layout: gl.constexpr):
    """A warpgroup reads tiles with registers and gives them back once per warp."""
    state = consumer_state(ring.stages)
    total = gl.zeros([N, ring.smem.shape[-1]], gl.float32, layout)
    for _ in range(steps):
        ring.consumer_wait(state)
        total += ring.tile(state).load(layout)
        ring.consumer_release(state)
        state = state.step()
    store_tile(out, total, layout)


@gluon.jit
def fill_role(ring, x_desc, steps):
    state = producer_state(ring.stages)
    for i in range(steps):
        full = ring.producer_acquire(state)
        mbarrier.expect(full, x_desc.block_type.nbytes)
        tma.async_load(x_desc, [i * N, 0], full, ring.tile(state))
        state = state.step()


@gluon.jit
def warps_ring_kernel(x_desc, out, steps, layout: gl.constexpr, stages: gl.constexpr):
    """out = the sum of the tiles of x: StagedPipeline between a TMA warp and a warpgroup."""
    smem = gl.allocate_shared_memory(x_desc.dtype, [stages, N, x_desc.block_type.shape[1]], x_desc.layout)
    ring = make_pipeline(smem, 4, stages)
    fence_async_shared()
    gl.warp_specialize([(scale_role, (ring, out, steps, layout)), (fill_role, (ring, x_desc, steps))], [1], [24])
