"""One ring that K and V tiles take in turn: what loads it, and the tensor-core warp that reads it.

      slots      0    1    2    3    4    0 …
      tiles      K0   V0   K1   V1   K2   V2 …

A V tile is given back late. P(n-1)·V(n-1) of the second query tile is issued only after Q·K(n) of the first, so V(n-1)
is still held when K(n) is waited for: `wait_v` notes its slot and moves on, `release_v` gives back the noted slot.
With w for wait and r for release, and the slot in brackets:

      wK0(0) rK0(0) wV0(1) │ wK1(2) rV0(1) rK1(2) wV1(3) │ wK2(4) rV1(3) rK2(4) wV2(5) │ …

Specification: section 1.2. The methods have the names of `tma_ring`'s, so a role is written once for both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .pipelines import KVPipeline, PipelineState, consumer_state, producer_state


@gluon.aggregate
class KVProducerPipeline:
    """The load warp's side. K and V tiles have the same `kv_bytes`; the state is a `PipelineState`."""

    kv_pipeline: KVPipeline
    kv_bytes: gl.constexpr

    @gluon.jit
    def init(self):
        """Initialise the barriers; the producer or the consumer does it, not both."""
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
        """(full barrier, shared memory) for a K tile, armed with its bytes unless `expect` is false: the caller then
        arms it with them and those of what comes along."""
        full = self.kv_pipeline.full(state.index, mma_stage)
        mbarrier.expect(full, self.kv_bytes, pred=expect)
        return full, self.get_kv_smem(state, mma_stage)

    @gluon.jit
    def get_v(self, state, mma_stage: gl.constexpr = 0, expect=True):
        """(full barrier, shared memory) for a V tile, armed with its bytes unless `expect` is false."""
        return self.get_k(state, mma_stage, expect)

    @gluon.jit
    def acquire_kv(self, state, mma_stage: gl.constexpr = 0):
        """Wait until the current slot is free."""
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
    """Where the consumer is, and the slot of the V tile that it has waited for last."""

    ring: PipelineState
    v_release_index: gl.tensor


@gluon.aggregate
class KVConsumerPipeline:
    """The tensor-core warp's side."""

    kv_pipeline: KVPipeline

    @gluon.jit
    def init(self):
        """Initialise the barriers; the producer or the consumer does it, not both."""
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
        """The K tile that was waited for."""
        return self.kv_pipeline.tile(state.ring, mma_stage)

    @gluon.jit
    def release_k(self, state, mma_stage: gl.constexpr = 0):
        """Give the K tile back when the products issued so far are done; returns the state after it."""
        self.kv_pipeline.consumer_release(state.ring, mma_stage)
        return KVConsumerState(state.ring.step(), state.v_release_index)

    @gluon.jit
    def wait_v(self, state):
        """Wait for the next V tile; returns the state that holds it."""
        self.kv_pipeline.consumer_wait(state.ring)
        return KVConsumerState(state.ring.step(), state.ring.index)

    @gluon.jit
    def v_tile(self, state):
        """The V tile that is held."""
        return self.kv_pipeline.smem.index(state.v_release_index)

    @gluon.jit
    def release_v(self, state):
        """Give the held V tile back when the products issued so far are done."""
        self.kv_pipeline.consumer_release_at(state.v_release_index)
