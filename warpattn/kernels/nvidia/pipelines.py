"""Rings of shared-memory tiles between a producer and its consumers, as values.

Every ring has a full and an empty mbarrier per slot. The producer waits for *empty*, arms *full* with the bytes it
is about to load and starts the copy; the copy itself completes *full*. A consumer waits for *full*, reads, and
arrives on *empty*, once per warp.

      producer                    slot 0   slot 1                    consumer
      wait empty[i]  ──▶  load  ──▶ [ tile ][ tile ] ──▶  wait full[i] ──▶ read ──▶ arrive empty[i]
      step                                                                          step

Phases follow the mbarrier rule: waiting with parity 1 on a fresh barrier falls through, so a producer starts at
phase 1 (its first lap never blocks) and a consumer at phase 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.aggregate
class PipelineState:
    """Slot index 0..stages-1 and the phase bit that flips at every wrap."""

    index: gl.tensor
    phase: gl.tensor
    stages: gl.constexpr

    @gluon.jit
    def step(self):
        """The state of the next slot."""
        if self.stages == 1:
            return PipelineState(self.index, self.phase ^ 1, self.stages)
        wrapped = self.index == self.stages - 1
        index = gl.where(wrapped, 0, self.index + 1)
        phase = gl.where(wrapped, self.phase ^ 1, self.phase)
        return PipelineState(index, phase, self.stages)


@gluon.jit
def producer_state(stages: gl.constexpr):
    """First state of a producer: its first lap over the ring does not wait."""
    return PipelineState(gl.to_tensor(0), gl.to_tensor(1), stages)


@gluon.jit
def consumer_state(stages: gl.constexpr):
    """First state of a consumer."""
    return PipelineState(gl.to_tensor(0), gl.to_tensor(0), stages)


@gluon.aggregate
class StagedPipeline:
    """A ring of `stages` slots with their full and empty barriers; a slot holds `parts` tiles of `smem`."""

    smem: gl.shared_memory_descriptor  # [stages * parts, ...]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr
    parts: gl.constexpr

    @gluon.jit
    def tile(self, state, part: gl.constexpr = 0):
        """Tile number `part` of a slot."""
        return self.smem.index(state.index * self.parts + part)

    @gluon.jit
    def producer_acquire(self, state):
        """Wait until the slot is free; returns the full barrier to arm."""
        mbarrier.wait(self.empty.index(state.index), state.phase)
        return self.full.index(state.index)

    @gluon.jit
    def consumer_wait(self, state, pred=True):
        """Wait until the slot is loaded. With `pred` false nothing is waited for."""
        mbarrier.wait(self.full.index(state.index), state.phase, pred=pred)

    @gluon.jit
    def consumer_release(self, state, pred=True):
        """Give the slot back: one arrival of each of the consumer's four warps on the empty barrier.

        Per warp, because an arrival of the whole warpgroup costs a barrier among its warps first.
        """
        gl.inline_asm(_WARP_ARRIVE, "r,r", [self.empty.index(state.index), gl.to_tensor(pred).to(gl.int32)])


@gluon.jit
def make_pipeline(smem, consumers: gl.constexpr, stages: gl.constexpr, parts: gl.constexpr = 1):
    """Barriers for a ring over `smem` [stages * parts, ...]: full completes on one arrival plus its bytes, empty on
    one arrival of each of the four warps of each consumer."""
    full = mbarrier.allocate_mbarrier(batch=stages)
    empty = mbarrier.allocate_mbarrier(batch=stages)
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=4 * consumers)
    return StagedPipeline(smem, full, empty, stages, parts)


_WARP_ARRIVE = gl.constexpr(
    "{ .reg .pred e, p; setp.ne.b32 p, $1, 0; elect.sync _|e, 0xffffffff; and.pred e, e, p;"
    " @e mbarrier.arrive.release.cta.shared::cta.b64 _, [$0]; }"
)
