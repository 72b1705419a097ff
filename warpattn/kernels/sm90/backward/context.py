"""The value that every role of the Hopper backward kernel gets: tensors, rings, the CTA's keys, mask and score."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ...nvidia.pipelines import StagedPipeline, empty_arrivals, make_pipeline
from ...pieces.modifiers import Modifiers
from ...pieces.scheduler import get_field, put_field
from ..layouts import element_type
from ..prefill.context import make_tiles
from . import config as sizes

STAGES = gl.constexpr(sizes.STAGES)
CONSUMERS = gl.constexpr(sizes.CONSUMERS)
VISITS = gl.constexpr(sizes.VISITS)
FIELDS = gl.constexpr(sizes.VISIT_FIELDS)
MASKED = gl.constexpr(sizes.MASKED)
MORE = gl.constexpr(sizes.MORE)


@gluon.aggregate
class Tensors:
    """Operands in global memory; those of q, k, v have 4 dimensions (batch, seq, heads, dim) and clip at the ends."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    do: tma.tensor_descriptor
    dk: tma.tensor_descriptor
    dv: tma.tensor_descriptor
    dq: tma.tensor_descriptor  # fp32 (batch * heads_q, seq_q, dim), added to
    shift: tma.tensor_descriptor  # fp32 (batch * heads_q, padded seq_q): what is added to the scores, see `prepare.py`
    delta: tma.tensor_descriptor  # the same: minus the row's sum of dout · out


@gluon.aggregate
class Rings:
    """Shared memory."""

    k: StagedPipeline  # one slot, a part per warpgroup: [2, 1, 64, 1, D]
    v: StagedPipeline
    q: StagedPipeline  # [stages, 1, M, 1, D]
    do: StagedPipeline
    ds: StagedPipeline  # [stages * 2, 64, M]: keys by queries, a part per warpgroup
    shift: gl.shared_memory_descriptor  # [stages, 1, M] fp32, of the Q slots
    delta: gl.shared_memory_descriptor  # of the dO slots
    dq: gl.shared_memory_descriptor  # [stages, 1, M, dq_cols] fp32
    visits: gl.shared_memory_descriptor  # [VISITS * FIELDS, 1] int32


@gluon.aggregate
class Keys:
    """The keys of a CTA."""

    b: gl.tensor
    h: gl.tensor  # key head
    first: gl.tensor  # key
    seq_q: gl.tensor
    seq_k: gl.tensor
    heads_q: gl.tensor
    group: gl.tensor


@gluon.aggregate
class Visit:
    """One tile of query rows that the CTA's keys meet; the fields `b`, `h`, `row` are those of a `Tile`."""

    b: gl.tensor
    h: gl.tensor  # query head
    row: gl.tensor  # -1: no tile
    flags: gl.tensor

    @gluon.jit
    def masked(self):
        """Whether some score of the tile may be hidden."""
        return (self.flags & MASKED) != 0

    @gluon.jit
    def more(self):
        """Whether another tile follows."""
        return (self.flags & MORE) != 0


@gluon.aggregate
class Context:
    tensors: Tensors
    rings: Rings
    keys: Keys
    mods: Modifiers
    slope: gl.constexpr  # derivative of the score function, or None: 1
    scale: gl.tensor
    config: gl.constexpr


@gluon.constexpr_function
def row_numbers_layout():
    """A number for each row, as TMA writes them: one after the other."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.jit
def keys_of_program(shape, block_n: gl.constexpr):
    """The keys of this CTA; `shape` is a `BackwardShape`."""
    number = gl.program_id(0)
    per_section = shape.section * shape.n_tiles
    section = number // per_section
    rest = number - section * per_section
    width = gl.maximum(gl.minimum(shape.section, shape.heads - section * shape.section), 1)
    n = rest // width
    head = section * shape.section + (rest - n * width)
    heads_kv = shape.heads_q // shape.group
    b = head // heads_kv
    return Keys(b, head - b * heads_kv, n * block_n, shape.seq_q, shape.seq_k, shape.heads_q, shape.group)


@gluon.jit
def publish_visit(slots, index, visit):
    """Write a visit into record `index`; called by one warp."""
    put_field(slots.index(index * FIELDS), visit.row)
    put_field(slots.index(index * FIELDS + 1), visit.h)
    put_field(slots.index(index * FIELDS + 2), visit.flags)


@gluon.jit
def read_visit(ctx, state):
    """The visit whose tile is in the slot of a consumer's `state`, of any ring with a slot per visit; called by four
    warps."""
    first = (state.index + STAGES * state.phase) * FIELDS
    slots = ctx.rings.visits
    row = get_field(slots.index(first))
    return Visit(ctx.keys.b, get_field(slots.index(first + 1)), row, get_field(slots.index(first + 2)))


@gluon.jit
def make_rings(config: gl.constexpr):
    """Allocate shared memory and initialise every barrier."""
    dtype: gl.constexpr = element_type(config.element)
    rows: gl.constexpr = config.rows
    block_m: gl.constexpr = config.block_m
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, block_m], dtype)
    dq_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, block_m, config.dq_cols], gl.float32)
    row_layout: gl.constexpr = row_numbers_layout()
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    topology: gl.constexpr = config.topology
    k = make_tiles(CONSUMERS, rows, config.padded, dtype, False)
    v = make_tiles(CONSUMERS, rows, config.padded, dtype, False)
    q = make_tiles(STAGES, block_m, config.padded, dtype, False)
    do = make_tiles(STAGES, block_m, config.padded, dtype, False)
    ds = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, rows, block_m], ds_layout)
    return Rings(
        make_pipeline(k, empty_arrivals(topology, "K"), 1, CONSUMERS),
        make_pipeline(v, empty_arrivals(topology, "V"), 1, CONSUMERS),
        make_pipeline(q, empty_arrivals(topology, "Q"), STAGES),
        make_pipeline(do, empty_arrivals(topology, "dO"), STAGES),
        make_pipeline(ds, empty_arrivals(topology, "dS"), STAGES, CONSUMERS, fills=4 * CONSUMERS),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, block_m], row_layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, block_m], row_layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, block_m, config.dq_cols], dq_layout),
        gl.allocate_shared_memory(gl.int32, [VISITS * FIELDS, 1], plain),
    )
