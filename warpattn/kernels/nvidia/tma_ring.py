"""A ring for K and one for V: the load warp's side, and the side of the tensor-core warp that reads them.

S = Q·Kᵀ sums over the head dim, so it can start when the first columns of Q and K have arrived; O = P·V sums over keys
and needs a whole V tile. So a K tile has `num_qk_stages` chunks of columns, each with its own barriers, a V tile one:

      K ring     [ chunk 0 │ chunk 1 ] [ chunk 0 │ chunk 1 ] …     barriers per chunk
      V ring     [       whole       ] [       whole       ] …     barriers per tile

The first chunks of K share their barriers with those of Q: the caller then sets the expected bytes of both.

The load warp's side of each ring is a `KVProducerPipeline`, as of the ring that K and V share. Aggregates are values,
so states are passed and returned; `KVProducerRings` and `KVConsumerRings` take both rings at once, with the methods of
`kv_ring`, so one role serves both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import base_value

from .kv_ring import KVProducerPipeline
from .pipelines import PipelineState, consumer_state


@gluon.jit
def make_tma_producer(pipeline, is_k: gl.constexpr, nbytes: gl.constexpr):
    """The producer of a ring whose chunks have `nbytes` in each CTA; only K has several."""
    chunks: gl.constexpr = pipeline.sub_stages
    gl.static_assert(is_k or chunks == 1, "V arrives whole")
    gl.static_assert(pipeline.parts == chunks, "a chunk is a tile of the ring")
    return KVProducerPipeline(pipeline, nbytes)


@gluon.aggregate
class TMAConsumerPipeline:
    """The tensor-core warp's side of the K ring or the V ring."""

    pipeline: base_value  # KVPipeline or PairKVPipeline
    is_k: gl.constexpr

    @gluon.jit
    def start(self):
        """The first state."""
        return consumer_state(self.pipeline.stages)

    @gluon.jit
    def get_tile(self, state, qk_stage: gl.constexpr = 0):
        """Shared memory of a chunk in the current slot."""
        return self.pipeline.tile(state, qk_stage)

    @gluon.jit
    def wait(self, state, qk_stage: gl.constexpr = 0):
        """Waits until a chunk of the current slot is full."""
        self.pipeline.consumer_wait(state, True, qk_stage)

    @gluon.jit
    def release(self, state, qk_stage: gl.constexpr = 0):
        """Releases a chunk once the products issued so far are done; with the last chunk, returns the state of the next
        slot."""
        self.pipeline.consumer_release(state, qk_stage)
        if qk_stage == self.pipeline.sub_stages - 1:
            return state.step()
        else:
            return state

    @gluon.jit
    def release_at(self, index):
        """Releases V slot `index` without changing the state."""
        gl.static_assert(not self.is_k, "only V is released late")
        self.pipeline.consumer_release_at(index)


@gluon.aggregate
class KVProducerState:
    k: PipelineState
    v: PipelineState


@gluon.aggregate
class KVProducerRings:
    """The load warp's side of both rings."""

    k: KVProducerPipeline
    v: KVProducerPipeline

    @gluon.jit
    def start(self):
        return KVProducerState(self.k.start(), self.v.start())

    @gluon.jit
    def acquire_k(self, state, qk_stage: gl.constexpr = 0):
        self.k.acquire_k(state.k, qk_stage)

    @gluon.jit
    def acquire_v(self, state):
        self.v.acquire_v(state.v)

    @gluon.jit
    def get_k(self, state, qk_stage: gl.constexpr = 0, expect=True):
        return self.k.get_k(state.k, qk_stage, expect)

    @gluon.jit
    def get_v(self, state, expect=True):
        return self.v.get_v(state.v, 0, expect)

    @gluon.jit
    def commit_k(self, state):
        return KVProducerState(self.k.commit_k(state.k), state.v)

    @gluon.jit
    def commit_v(self, state):
        return KVProducerState(state.k, self.v.commit_v(state.v))


@gluon.aggregate
class KVRingsState:
    """The consumer's next slots in both rings, and the slot of the V tile that it last waited for."""

    k: PipelineState
    v: PipelineState
    v_release_index: gl.tensor


@gluon.aggregate
class KVConsumerRings:
    """The tensor-core warp's side of both rings."""

    k: TMAConsumerPipeline
    v: TMAConsumerPipeline

    @gluon.jit
    def start(self):
        return KVRingsState(self.k.start(), self.v.start(), gl.to_tensor(0))

    @gluon.jit
    def wait_k(self, state, qk_stage: gl.constexpr = 0):
        self.k.wait(state.k, qk_stage)

    @gluon.jit
    def k_tile(self, state, qk_stage: gl.constexpr = 0):
        return self.k.get_tile(state.k, qk_stage)

    @gluon.jit
    def release_k(self, state, qk_stage: gl.constexpr = 0):
        return KVRingsState(self.k.release(state.k, qk_stage), state.v, state.v_release_index)

    @gluon.jit
    def wait_v(self, state):
        self.v.wait(state.v)
        return KVRingsState(state.k, state.v.step(), state.v.index)

    @gluon.jit
    def v_tile(self, state):
        return self.v.pipeline.smem.index(state.v_release_index)

    @gluon.jit
    def release_v(self, state):
        self.v.release_at(state.v_release_index)
