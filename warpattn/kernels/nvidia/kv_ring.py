"""One ring that K and V tiles take in turn: what loads it, and the tensor-core warp that reads it.

      slots      0    1    2    3    4    0 …
      tiles      K0   V0   K1   V1   K2   V2 …

The consumer releases a V tile late. It issues P(n-1)·V(n-1) of the second query tile only after Q·K(n) of the first, so
it still holds V(n-1) when it waits for K(n): `wait_v` notes the slot and steps on, `release_v` releases the noted slot.
With w for wait and r for release, and the slot in brackets:

      wK0(0) rK0(0) wV0(1) │ wK1(2) rV0(1) rK1(2) wV1(3) │ wK2(4) rV1(3) rK2(4) wV2(5) │ …

Specification: section 1.2. The methods have the same names as in `tma_ring`, so one role serves both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .pipelines import KVPipeline, PipelineState, consumer_state, producer_state


@gluon.aggregate
class KVProducerPipeline:
    """The load warp's side. K and V tiles have the same `kv_bytes`; the state is a `PipelineState`."""

    kv_pipeline: gl.base_value  # KVPipeline or SharedKVPipeline
    kv_bytes: gl.constexpr

    @gluon.jit
    def init(self):
        """Initialise the barriers; either the producer or the consumer does it."""
        self.kv_pipeline.init()

    @gluon.jit
    def start(self):
        """The first state."""
        return producer_state(self.kv_pipeline.stages)

    @gluon.jit
    def get_kv_smem(self, state, mma_stage: gl.constexpr = 0):
        """Shared memory of the current slot."""
        return self.kv_pipeline.tile(state, mma_stage)

    @gluon.jit
    def get_k(self, state, mma_stage: gl.constexpr = 0, expect=True):
        """(full barrier, shared memory) for a K tile. The barrier expects the tile's bytes, unless `expect` is false:
        then the caller sets them together with those of other copies."""
        full = self.kv_pipeline.full(state.index, mma_stage)
        mbarrier.expect(full, self.kv_bytes, pred=expect)
        return full, self.get_kv_smem(state, mma_stage)

    @gluon.jit
    def get_v(self, state, mma_stage: gl.constexpr = 0, expect=True):
        """(full barrier, shared memory) for a V tile; the barrier expects its bytes unless `expect` is false."""
        return self.get_k(state, mma_stage, expect)

    @gluon.jit
    def acquire_kv(self, state, mma_stage: gl.constexpr = 0):
        """Wait until the current slot is empty."""
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
    """The consumer's next slot, and the slot of the V tile that it waited for last."""

    ring: PipelineState
    v_release_index: gl.tensor


@gluon.aggregate
class KVConsumerPipeline:
    """The tensor-core warp's side."""

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
        """Wait for the next K tile."""
        self.kv_pipeline.consumer_wait(state.ring, True, mma_stage)

    @gluon.jit
    def k_tile(self, state, mma_stage: gl.constexpr = 0):
        """The K tile of the last `wait_k`."""
        return self.kv_pipeline.tile(state.ring, mma_stage)

    @gluon.jit
    def release_k(self, state, mma_stage: gl.constexpr = 0):
        """Release the K tile when the products issued so far are done; returns the state after it."""
        self.kv_pipeline.consumer_release(state.ring, mma_stage)
        return KVConsumerState(state.ring.step(), state.v_release_index)

    @gluon.jit
    def wait_v(self, state):
        """Wait for the next V tile; returns the state that holds it."""
        self.kv_pipeline.consumer_wait(state.ring)
        return KVConsumerState(state.ring.step(), state.ring.index)

    @gluon.jit
    def v_tile(self, state):
        """The V tile of the last `wait_v`."""
        return self.kv_pipeline.smem.index(state.v_release_index)

    @gluon.jit
    def release_v(self, state):
        """Release the V tile of the last `wait_v` when the products issued so far are done."""
        self.kv_pipeline.consumer_release_at(state.v_release_index)
