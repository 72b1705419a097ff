"""One ring that K and V tiles share in turn: the load warp's side, and the tensor-core warp's side.

      slots      0    1    2    3    4    0 …
      tiles      K0   V0   K1   V1   K2   V2 …

The consumer releases a V tile late. It issues P(n-1)·V(n-1) of the second query tile only after Q·K(n) of the first, so
it still holds V(n-1) when it waits for K(n): `wait_v` notes the slot and steps on, `release_v` releases the noted slot.
With w for wait and r for release, and the slot in brackets:

      wK0(0) rK0(0) wV0(1) │ wK1(2) rV0(1) rK1(2) wV1(3) │ wK2(4) rV1(3) rK2(4) wV2(5) │ …

The methods have the same names as in `tma_ring`, so one role serves both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_commit
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .pipelines import WARP_ARRIVE, PipelineState, StagedPipeline, consumer_state, producer_state


@gluon.aggregate
class KVPipeline(StagedPipeline):
    """A ring that the tensor core reads, one tile per sub-stage. tcgen05.commit releases a slot once the products
    issued so far have read it. Every barrier counts one arrival."""

    @gluon.jit
    def init(self):
        """Initialises every barrier, before the roles start."""
        for i in gl.static_range(2 * self.stages * self.sub_stages):
            mbarrier.init(self.bars.index(i), count=1)

    @gluon.jit
    def consumer_release(self, state, sub: gl.constexpr = 0):
        """Releases a slot's sub-stage once the products issued so far are done."""
        tcgen05_commit(self.empty(state.index, sub))

    @gluon.jit
    def consumer_release_at(self, index):
        """`consumer_release` for slot `index` instead of the consumer's current one."""
        tcgen05_commit(self.empty(index))


@gluon.jit
def make_kv_pipeline(smem, stages: gl.constexpr, sub_stages: gl.constexpr = 1):
    """A ring over `smem` [stages * sub_stages, ...]; call `init` for its barriers."""
    bars = mbarrier.allocate_mbarrier(batch=2 * stages * sub_stages)
    return KVPipeline(smem, bars, stages, sub_stages, sub_stages)


@gluon.aggregate
class PairKVPipeline(KVPipeline):
    """The ring of a CTA pair; each CTA loads and holds a part of every tile. Copies of both complete the full barriers
    of the leader, which issues the products; its commits arrive on the empty barriers of both."""

    empties: gl.shared_memory_descriptor  # [stages * sub_stages, 2]; `bars` has the full ones, [stages * sub_stages, 1]

    @gluon.jit
    def init(self):
        for i in gl.static_range(self.stages * self.sub_stages):
            mbarrier.init(self.bars.index(i), count=1)
            mbarrier.init(self.empties.index(i), count=1)

    @gluon.jit
    def empty(self, index, sub: gl.constexpr = 0):
        return self.empties.index(index * self.sub_stages + sub)


@gluon.jit
def make_pair_pipeline(smem, stages: gl.constexpr, sub_stages: gl.constexpr = 1):
    """A pair's ring over `smem` [stages * sub_stages, ...]; call `init` for its barriers."""
    fulls = mbarrier.allocate_mbarrier(batch=stages * sub_stages, two_ctas=True)
    empties = mbarrier.allocate_mbarrier(batch=stages * sub_stages)
    return PairKVPipeline(smem, fulls, stages, sub_stages, sub_stages, empties)


@gluon.aggregate
class SharedKVPipeline(KVPipeline):
    """A `KVPipeline` whose slots are read by `readers` warps, each of which releases them once."""

    readers: gl.constexpr

    @gluon.jit
    def init(self):
        for i in gl.static_range(self.stages * self.sub_stages):
            mbarrier.init(self.bars.index(i), count=1)
            mbarrier.init(self.bars.index(self.stages * self.sub_stages + i), count=self.readers)

    @gluon.jit
    def consumer_release(self, state, sub: gl.constexpr = 0):
        """Releases a slot's sub-stage: one arrival of each reading warp."""
        gl.inline_asm(WARP_ARRIVE, "r,r", [self.empty(state.index, sub), gl.to_tensor(1)])


@gluon.aggregate
class KVProducerPipeline:
    """The load warp's side of the ring that K and V share, or of one for either (`tma_ring`). All tiles, or their
    chunks, have `tile_bytes` in one CTA; the state is a `PipelineState`."""

    kv_pipeline: gl.base_value  # KVPipeline, PairKVPipeline or SharedKVPipeline
    tile_bytes: gl.constexpr

    @gluon.jit
    def init(self):
        """Initialise the barriers; either the producer or the consumer does it."""
        self.kv_pipeline.init()

    @gluon.jit
    def start(self):
        """The first state."""
        return producer_state(self.kv_pipeline.stages)

    @gluon.jit
    def get_k(self, state, mma_stage: gl.constexpr = 0, expect=True):
        """(full barrier, shared memory) for a K tile. The barrier expects the tile's bytes unless `expect` is false;
        then the caller sets them together with those of other copies."""
        full = self.kv_pipeline.full(state.index, mma_stage)
        mbarrier.expect(full, self.tile_bytes, pred=expect)
        return full, self.kv_pipeline.tile(state, mma_stage)

    @gluon.jit
    def get_v(self, state, mma_stage: gl.constexpr = 0, expect=True):
        """(full barrier, shared memory) for a V tile; the barrier expects its bytes unless `expect` is false."""
        return self.get_k(state, mma_stage, expect)

    @gluon.jit
    def acquire_kv(self, state, mma_stage: gl.constexpr = 0):
        """Waits until the current slot is empty."""
        self.kv_pipeline.producer_acquire(state, mma_stage)

    @gluon.jit
    def commit_kv_step(self, state):
        """The state of the next slot; the copies themselves complete the barrier."""
        return state.step()

    acquire_k = acquire_kv
    acquire_v = acquire_kv
    commit_k = commit_kv_step
    commit_v = commit_kv_step


@gluon.aggregate
class KVConsumerState:
    """The consumer's next slot, and the slot of the V tile that it last waited for."""

    ring: PipelineState
    v_release_index: gl.tensor


@gluon.aggregate
class KVConsumerPipeline:
    """The tensor-core warp's side of the ring."""

    kv_pipeline: KVPipeline

    @gluon.jit
    def init(self):
        """Initialise the barriers; either the producer or the consumer does it."""
        self.kv_pipeline.init()

    @gluon.jit
    def start(self):
        """The first state."""
        return KVConsumerState(consumer_state(self.kv_pipeline.stages), gl.to_tensor(0))

    @gluon.jit
    def wait_k(self, state, mma_stage: gl.constexpr = 0):
        """Waits for the next K tile."""
        self.kv_pipeline.consumer_wait(state.ring, True, mma_stage)

    @gluon.jit
    def k_tile(self, state, mma_stage: gl.constexpr = 0):
        """The K tile of the last `wait_k`."""
        return self.kv_pipeline.tile(state.ring, mma_stage)

    @gluon.jit
    def release_k(self, state, mma_stage: gl.constexpr = 0):
        """Releases the K tile once the products issued so far are done; returns the next slot's state."""
        self.kv_pipeline.consumer_release(state.ring, mma_stage)
        return KVConsumerState(state.ring.step(), state.v_release_index)

    @gluon.jit
    def wait_v(self, state):
        """Waits for the next V tile; returns the state that notes its slot."""
        self.kv_pipeline.consumer_wait(state.ring)
        return KVConsumerState(state.ring.step(), state.ring.index)

    @gluon.jit
    def v_tile(self, state):
        """The V tile of the last `wait_v`."""
        return self.kv_pipeline.smem.index(state.v_release_index)

    @gluon.jit
    def release_v(self, state):
        """Releases the V tile of the last `wait_v` once the products issued so far are done."""
        self.kv_pipeline.consumer_release_at(state.v_release_index)
