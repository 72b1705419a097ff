"""Shared and tensor memory of the Blackwell backward, and the barriers beside the rings.

      S        S = K · Qᵀ is complete                      commit             -> weigh, and derive for a score's slope
      s_read   derive has read S for the slope of a score  4 derive warps     -> mma, before the next S
      dP       dP = V · dOᵀ is complete                    commit             -> derive
      p        P is written, S is read                     4 weigh warps      -> mma, derive
      p_read   P has been read                             derive and commit  -> weigh
      ds[slot] dS is written, dP is read                   4 derive warps     -> mma
      dQ       dQ = dSᵀ · K is complete                    commit             -> reduce, and derive with one slot of dS
      dq_read  dQ has been read                            4 reduce warps     -> mma
      sums     dV and dK are complete                      commit             -> weigh, derive
      keys     all keys are finite                         4 weigh warps      -> mma, under a mask
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    mbarrier,
    tensor_memory_descriptor,
)

from ...nvidia.backward import arguments as sizes
from ...nvidia.backward.visits import FIELDS, STAGES, row_numbers_layout
from ...nvidia.pipelines import StagedPipeline, empty_arrivals, make_pipeline, make_tiles
from ..layouts import element_type
from ..sync import make_signal

VISITS = gl.constexpr(sizes.VISITS)


@gluon.aggregate
class Sums:
    """Tensor memory; rows are the N keys but for dQ."""

    s: tensor_memory_descriptor  # [N, M] fp32
    dp: tensor_memory_descriptor  # [N, M] fp32
    p: gl.base_value  # [N, M] of 16 bits; shared memory where N is 64
    dq: tensor_memory_descriptor  # [M, D] fp32, or [D, M] if `transposed`
    dv: tensor_memory_descriptor  # [N, D] fp32
    dk: tensor_memory_descriptor  # [N, D] fp32


@gluon.aggregate
class Barriers:
    """The barriers above."""

    s: gl.shared_memory_descriptor
    s_read: gl.shared_memory_descriptor
    dp: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    p_read: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    dq_read: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    keys: gl.shared_memory_descriptor


@gluon.aggregate
class Rings:
    """Shared memory with the barriers of its slots, tensor memory, and barriers of that."""

    k: StagedPipeline  # one slot [1, N, 1, D]
    v: StagedPipeline
    q: StagedPipeline  # [stages, 1, M, 1, D]
    do: gl.base_value  # `OutputGradients`
    ds: gl.shared_memory_descriptor  # [ds_slots, N, M]: keys by queries
    shift: gl.shared_memory_descriptor  # [stages, 1, M] fp32, of the Q slots
    delta: gl.shared_memory_descriptor  # of the dO slots
    dq: gl.shared_memory_descriptor  # [1, M, dq_cols] fp32
    visits: gl.shared_memory_descriptor  # [VISITS * FIELDS, 1] int32
    sums: Sums
    bars: Barriers


@gluon.aggregate
class OutputGradients(StagedPipeline):
    """The ring of dO, without empty barriers: Q's slot of the same visit is released when both have been read."""

    @gluon.jit
    def producer_acquire(self, state, sub: gl.constexpr = 0):
        """The full barrier of a slot; it is empty since that of Q was."""
        return self.full(state.index, sub)


@gluon.jit
def make_output_gradients(smem):
    """Makes the ring of dO over `smem` [STAGES, ...]."""
    bars = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    return OutputGradients(smem, bars, STAGES, 1, 1)


@gluon.jit
def make_rings(config: gl.constexpr):
    """Allocate shared and tensor memory and initialise every barrier."""
    dtype: gl.constexpr = element_type(config.element)
    block_m: gl.constexpr = config.block_m
    dq_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, block_m, config.dq_cols], gl.float32)
    row_layout: gl.constexpr = row_numbers_layout()
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    topology: gl.constexpr = config.topology
    k = make_tiles(1, config.rows, config.padded_qk, dtype, config.ragged)
    v = make_tiles(1, config.rows, config.padded_v, dtype, config.ragged)
    q = make_tiles(STAGES, block_m, config.padded_qk, dtype, config.ragged)
    do = make_tiles(STAGES, block_m, config.padded_v, dtype, config.ragged)
    return Rings(
        make_pipeline(k, empty_arrivals(topology, "K"), 1),
        make_pipeline(v, empty_arrivals(topology, "V"), 1),
        make_pipeline(q, empty_arrivals(topology, "Q"), STAGES, fills=2),  # its bytes, and the visit
        make_output_gradients(do),
        gl.allocate_shared_memory(dtype, [config.ds_slots, config.rows, block_m], pair_layout(config)),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, block_m], row_layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, block_m], row_layout),
        gl.allocate_shared_memory(gl.float32, [1, block_m, config.dq_cols], dq_layout),
        gl.allocate_shared_memory(gl.int32, [VISITS * FIELDS, 1], plain),
        make_sums(config),
        make_barriers(topology),
    )


@gluon.jit
def make_sums(config: gl.constexpr):
    """Allocate tensor memory, and P."""
    rows: gl.constexpr = config.rows
    return Sums(
        columns_of(config, gl.float32, rows, config.block_m),
        columns_of(config, gl.float32, rows, config.block_m),
        make_weights(config),
        columns_of(config, gl.float32, config.dq_shape[0], config.dq_shape[1]),
        columns_of(config, gl.float32, rows, config.padded_v),
        columns_of(config, gl.float32, rows, config.padded_qk),
    )


@gluon.jit
def make_weights(config: gl.constexpr):
    """Allocates P."""
    dtype: gl.constexpr = element_type(config.element)
    if config.wide:
        return gl.allocate_shared_memory(dtype, [config.rows, config.block_m], pair_layout(config))
    else:
        return columns_of(config, dtype, config.rows, config.block_m)


@gluon.constexpr_function
def pair_layout(config):
    """Shared-memory layout of a tile [keys, queries], as the tensor core reads it."""
    return gl.NVMMASharedLayout.get_default_for([config.rows, config.block_m], element_type(config.element))


@gluon.jit
def columns_of(config: gl.constexpr, dtype: gl.constexpr, rows: gl.constexpr, cols: gl.constexpr):
    """Tensor memory [rows, cols] with a lane per row, or two, each with half of its columns."""
    layout: gl.constexpr = TensorMemoryLayout([rows, config.block_columns(cols)], 1)
    return allocate_tensor_memory(dtype, [rows, cols], layout)


@gluon.jit
def ds_state(ctx, state, tile):
    """The state of the slots of dS: that of Q's slots, or of a single slot."""
    if ctx.config.ds_slots == 1:
        return tile
    else:
        return state


@gluon.jit
def ds_signal(ctx, state):
    """The barrier of a slot of dS."""
    if ctx.config.ds_slots == 1:
        return ctx.rings.bars.ds
    else:
        return ctx.rings.bars.ds.index(state.index)


@gluon.jit
def make_barriers(topology: gl.constexpr):
    return Barriers(
        make_signal(topology, "S"),
        make_signal(topology, "S read"),
        make_signal(topology, "dP"),
        make_signal(topology, "P"),
        make_signal(topology, "P read"),
        make_signal(topology, "dS"),
        make_signal(topology, "dQ"),
        make_signal(topology, "dQ read"),
        make_signal(topology, "sums"),
        make_signal(topology, "keys"),
    )
