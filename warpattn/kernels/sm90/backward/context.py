"""Shared memory of Hopper's backward kernel."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...nvidia.backward import arguments as sizes
from ...nvidia.backward.visits import FIELDS, STAGES, row_numbers_layout
from ...nvidia.pipelines import StagedPipeline, empty_arrivals, make_pipeline, make_tiles
from ..layouts import element_type

VISITS = gl.constexpr(sizes.VISITS)
TURN_FIELDS = gl.constexpr(sizes.TURN_FIELDS)


@gluon.aggregate
class Rings:
    """Shared memory."""

    k: StagedPipeline  # a slot has `key_parts` tiles: [stages * parts, 1, 64, 1, D]
    v: StagedPipeline  # one slot, in which gradients may be staged, too
    q: StagedPipeline  # [stages, 1, M, 1, D]; a tile is several boxes where a box has fewer columns
    do: StagedPipeline
    ds: StagedPipeline  # [stages * parts, 64, M]: keys by queries
    p: StagedPipeline  # [stages, 64, M], from `weigh` to `derive`; without these roles the ring of dS
    shift: gl.shared_memory_descriptor  # [stages, 1, M] fp32 beside the Q slots: what S starts with
    delta: gl.shared_memory_descriptor  # [stages, 1, M] fp32 beside the dO slots: what dP starts with
    dq: gl.shared_memory_descriptor  # [dq_buffers, 1, dq_rows, dq_cols] fp32
    ordered: gl.base_value  # `OrderedRings` if dQ tiles have counters, else None
    visits: gl.shared_memory_descriptor  # [VISITS * FIELDS, 1] int32


@gluon.aggregate
class OrderedRings:
    """Rings between roles that add dQ and `ordered.py`."""

    dq: gl.base_value  # from `reduce` to `add`; None without these roles
    turns: StagedPipeline  # [stages * TURN_FIELDS, 1] int32: tiles whose turn has come, from `turn` to the roles below
    added: StagedPipeline  # no memory: that such a tile was added to, from the role that adds dQ to `pass`


@gluon.jit
def make_ordered_rings(dq, config: gl.constexpr):
    """Makes the rings for additions that may have to wait; `dq`: buffers."""
    topology: gl.constexpr = config.topology
    ring = None
    fills: gl.constexpr = 4 * len(config.adds) if config.attend_adds else 1
    if not config.attend_adds:
        ring = make_pipeline(dq, empty_arrivals(topology, "dQ"), config.dq_buffers, fills=4)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = gl.allocate_shared_memory(gl.int32, [STAGES * TURN_FIELDS, 1], plain)
    return OrderedRings(
        ring,
        make_pipeline(tiles, empty_arrivals(topology, "turns"), STAGES, TURN_FIELDS),
        make_pipeline(None, empty_arrivals(topology, "added"), STAGES, fills=fills),
    )


@gluon.jit
def make_rings(config: gl.constexpr):
    """Allocates shared memory, initialises barriers."""
    dtype: gl.constexpr = element_type(config.element)
    rows: gl.constexpr = config.rows
    block_m: gl.constexpr = config.block_m
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, block_m], dtype)
    dq_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, config.dq_rows, config.dq_cols], gl.float32)
    row_layout: gl.constexpr = row_numbers_layout()
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    topology: gl.constexpr = config.topology
    parts: gl.constexpr = config.key_parts
    stages: gl.constexpr = config.ds_stages
    cols_qk: gl.constexpr = config.box(config.padded_qk)
    cols_v: gl.constexpr = config.box(config.padded_v)
    boxes_qk: gl.constexpr = config.padded_qk // cols_qk
    boxes_v: gl.constexpr = config.padded_v // cols_v
    key_stages: gl.constexpr = config.key_stages
    k = make_tiles(key_stages * parts * boxes_qk, rows, cols_qk, dtype, config.ragged)
    v = make_tiles(parts * boxes_v, rows, cols_v, dtype, config.ragged)
    q = make_tiles(STAGES * boxes_qk, block_m, cols_qk, dtype, config.ragged)
    do = make_tiles(STAGES * boxes_v, block_m, cols_v, dtype, config.ragged)
    ds = make_pipeline(
        gl.allocate_shared_memory(dtype, [stages * parts, rows, block_m], ds_layout), empty_arrivals(topology, "dS"),
        stages, parts, fills=4 * parts,
    )  # fmt: skip
    p = ds
    if config.by_product:
        p = make_pipeline(
            gl.allocate_shared_memory(dtype, [stages, rows, block_m], ds_layout), empty_arrivals(topology, "P"),
            stages, fills=4,
        )  # fmt: skip
    dq = gl.allocate_shared_memory(gl.float32, [config.dq_buffers, 1, config.dq_rows, config.dq_cols], dq_layout)
    ordered = None
    if config.counted:
        ordered = make_ordered_rings(dq, config)
    return Rings(
        make_pipeline(k, empty_arrivals(topology, "K"), key_stages, parts * boxes_qk),
        make_pipeline(v, empty_arrivals(topology, "V"), 1, parts * boxes_v),
        make_pipeline(q, empty_arrivals(topology, "Q"), STAGES, boxes_qk, fills=2),  # bytes of Q, and the visit
        make_pipeline(do, empty_arrivals(topology, "dO"), STAGES, boxes_v),
        ds,
        p,
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, block_m], row_layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, block_m], row_layout),
        dq,
        ordered,
        gl.allocate_shared_memory(gl.int32, [VISITS * FIELDS, 1], plain),
    )
