"""Rings of shared-memory tiles between a producer and its consumers, as values.

Every slot of a ring has a full and an empty mbarrier, or a pair for each sub-stage. The producer waits for *empty*,
sets the bytes that *full* expects and starts the copy; the copy itself completes *full*. A consumer waits for *full*,
reads, and releases the slot by arriving on *empty*: once per warp where warps read it, by a commit where the tensor
core does (`KVPipeline` in kv_ring.py).

      producer                    slot 0   slot 1                    consumer
      wait empty[i]  ──▶  load  ──▶ [ tile ][ tile ] ──▶  wait full[i] ──▶ read ──▶ release on empty[i]
      step                                                                          step

The barriers of a ring are one array, full ones first; with n slots of S sub-stages

      full(slot, sub) = S·slot + sub          empty(slot, sub) = n·S + S·slot + sub

Phases follow the mbarrier rule: waiting with parity 1 on a fresh barrier falls through, so a producer starts at
phase 1 (its first lap never blocks) and a consumer at phase 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .clipped_rows import stacked, tile_box


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
    """A ring of `stages` slots of `parts` tiles; a slot has `sub_stages`, each with its own barriers."""

    smem: gl.base_value  # shared memory [stages * parts, ...], or an aggregate with its method `index`
    bars: gl.shared_memory_descriptor  # [2 * stages * sub_stages, 1]
    stages: gl.constexpr
    parts: gl.constexpr
    sub_stages: gl.constexpr

    @gluon.jit
    def tile(self, state, part=0):
        """Tile number `part` of a slot."""
        return self.smem.index(state.index * self.parts + part)

    @gluon.jit
    def full(self, index, sub: gl.constexpr = 0):
        """The barrier that completes when a slot's sub-stage is full."""
        return self.bars.index(index * self.sub_stages + sub)

    @gluon.jit
    def empty(self, index, sub: gl.constexpr = 0):
        """The barrier that completes when a slot's sub-stage is empty."""
        return self.bars.index(index * self.sub_stages + (self.stages * self.sub_stages + sub))

    @gluon.jit
    def producer_acquire(self, state, sub: gl.constexpr = 0):
        """Waits until a slot's sub-stage is empty; returns its full barrier."""
        mbarrier.wait(self.empty(state.index, sub), state.phase)
        return self.full(state.index, sub)

    @gluon.jit
    def consumer_wait(self, state, pred=True, sub: gl.constexpr = 0):
        """Waits until a slot's sub-stage is full, if `pred`."""
        mbarrier.wait(self.full(state.index, sub), state.phase, pred=pred)

    @gluon.jit
    def warps_wait(self, state):
        """Waits until a slot is full, every warp of a consumer by itself.

        With `consumer_wait` the compiler takes two waits for two uses of one place in memory, and synchronises the
        warps before the second. In a loop over key tiles that costs 1 % of the time (H200).
        """
        gl.inline_asm(WARP_WAIT, "r,r", [self.full(state.index), state.phase])

    @gluon.jit
    def consumer_release(self, state, pred=True):
        """Releases the slot, if `pred`: each of the consumer's four warps arrives on the empty barrier.

        Each warp arrives by itself, because the compiler synchronises the warps before an arrival of the warpgroup.
        """
        gl.inline_asm(WARP_ARRIVE, "r,r", [self.empty(state.index), gl.to_tensor(pred).to(gl.int32)])

    @gluon.jit
    def producer_commit(self, state):
        """Hands over a slot that the producer's four warps wrote: each warp arrives on the full barrier."""
        gl.inline_asm(WARP_ARRIVE, "r,r", [self.full(state.index), gl.to_tensor(1)])


@gluon.constexpr_function
def empty_arrivals(topology, name):
    """Arrivals that complete an empty barrier of edge `name`."""
    return topology.empty_arrivals(name)


@gluon.jit
def make_pipeline(
    smem, arrivals: gl.constexpr, stages: gl.constexpr, parts: gl.constexpr = 1, more: gl.constexpr = 0,
    fills: gl.constexpr = 1, arrivals_of_more: gl.constexpr = 1,
):  # fmt: skip
    """Makes a ring over `smem` [stages * parts, ...] and initialises its barriers: full ones complete on `fills`
    arrivals (1 and the bytes for TMA), empty ones on `arrivals`. `more` barriers of `arrivals_of_more` follow."""
    bars = mbarrier.allocate_mbarrier(batch=2 * stages + more)
    for i in gl.static_range(stages):
        mbarrier.init(bars.index(i), count=fills)
        mbarrier.init(bars.index(stages + i), count=arrivals)
    for i in gl.static_range(more):
        mbarrier.init(bars.index(2 * stages + i), count=arrivals_of_more)
    return StagedPipeline(smem, bars, stages, parts, 1)


@gluon.jit
def make_tiles(
    count: gl.constexpr, rows: gl.constexpr, cols: gl.constexpr, dtype: gl.constexpr, clipped: gl.constexpr,
    packed: gl.constexpr = 1,
):  # fmt: skip
    """Shared memory for `count` tiles."""
    box: gl.constexpr = tile_box(rows, cols, clipped, packed)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(box, dtype)
    return gl.allocate_shared_memory(dtype, stacked(count, box), layout)


WARP_WAIT = gl.constexpr(
    "{ .reg .pred full; again: mbarrier.try_wait.parity.shared::cta.b64 full, [$0], $1; @!full bra.uni again; }"
)
WARP_ARRIVE = gl.constexpr(
    "{ .reg .pred e, p; setp.ne.b32 p, $1, 0; elect.sync _|e, 0xffffffff; and.pred e, e, p;"
    " @e mbarrier.arrive.release.cta.shared::cta.b64 _, [$0]; }"
)
