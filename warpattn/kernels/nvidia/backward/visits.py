"""The context of the roles of a backward on NVIDIA GPUs: tensors, the CTA's keys, and visits. A visit is a query tile
that sees the keys; the loader (`load.py`) finds it, and the other roles read it from shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ...pieces.modifiers import Modifiers
from ...pieces.scheduler import get_field, put_field
from ..pipelines import PipelineState
from . import arguments as sizes

STAGES = gl.constexpr(sizes.STAGES)
FIELDS = gl.constexpr(sizes.VISIT_FIELDS)
MASKED = gl.constexpr(sizes.MASKED)
MORE = gl.constexpr(sizes.MORE)
FIRST = gl.constexpr(sizes.FIRST)
PADDING = gl.constexpr(sizes.PADDING)


@gluon.aggregate
class DenseRows:
    """Rows of a dense batch (batch, seq, heads, dim), with the methods of `ClippedRows`: a start is a batch entry."""

    desc: tma.tensor_descriptor

    @gluon.jit
    def load(self, start, length, row, head, full, smem, column: gl.constexpr = 0):
        """Loads rows from `row` on, columns from `column` on; zeros past the end."""
        tma.async_load(self.desc, [start, row, head, column], full, smem)

    @gluon.jit
    def store(self, start, length, row, head, column: gl.constexpr, smem):
        """Stores `smem` to rows from `row` on; nothing is written past the end."""
        tma.async_store(self.desc, [start, row, head, column], smem)


@gluon.aggregate
class Tensors:
    """Operands in memory, each a `DenseRows` or `ClippedRows`, and the kernels' own buffers."""

    q: gl.base_value
    k: gl.base_value
    v: gl.base_value
    do: gl.base_value
    dk: gl.base_value
    dv: gl.base_value
    dq: tma.tensor_descriptor  # fp32 (heads, padded rows, dim), added to
    shift: tma.tensor_descriptor  # fp32 (heads, padded rows): what is added to the scores, see `prepare.py`
    delta: tma.tensor_descriptor  # the same: minus the row's sum of dout · out
    turns: gl.tensor  # int32* (heads, padded rows / ROWS), where dQ tiles have counters
    turn_blocks: gl.tensor  # number of blocks of ROWS padded rows of a head
    counter: gl.tensor  # int32* counter of key tiles taken, see `pieces/scheduler.py`


@gluon.aggregate
class Keys:
    """The keys of a CTA."""

    b: gl.tensor
    h: gl.tensor  # key head
    first: gl.tensor  # first key
    seq_q: gl.tensor
    seq_k: gl.tensor
    group: gl.tensor
    q_start: gl.tensor  # first token of the sequence, or its batch entry
    k_start: gl.tensor
    head: gl.tensor  # query head 0 and row 0 in the kernels' own numbers
    row: gl.tensor


@gluon.aggregate
class Work:
    """Key tiles of all heads, numbered by `KeyTileOrder`."""

    tiles: gl.tensor  # of a head
    section: gl.tensor
    heads: gl.tensor
    shape: gl.tuple  # a `BackwardShape`
    sequences: gl.tuple  # `Sequences`

    @gluon.jit
    def computed_anew(self, count):
        """The same work; `count`: see `hidden_zero`."""
        return Work(self.tiles + hidden_zero(count), self.section, self.heads, self.shape, self.sequences)

    @gluon.jit
    def total(self):
        """Number of key tiles."""
        return self.heads * self.tiles

    @gluon.jit
    def head_and_tile(self, number):
        """(key head of all batch entries, key tile in it) of a number."""
        first = number // (self.section * self.tiles) * self.section
        heads = gl.minimum(self.section, self.heads - first)
        rest = number - first * self.tiles
        n = rest // heads
        return first + rest - n * heads, n

    @gluon.jit
    def downward(self, number, config: gl.constexpr):
        """Whether a key tile visits rows from the last to the first: in every other lap. CTAs of such a lap begin
        together, at the last rows. Those of the next lap begin as these end, the longest first, so they end together,
        at the last rows, too. For `mirrored` laps see `mirrored_tile`."""
        if config.mirrored:
            rows = self.shape.lap_rows
            laps = (self.tiles + rows - 1) // rows
            sections = (self.heads + self.section - 1) // self.section
            _, n = self.head_and_tile(number)
            return (number // (self.section * self.tiles) * laps + n // rows + sections * laps) % 2 == 1
        else:
            lap = self.shape.lap
            if config.ragged:
                lap = gl.load(self.sequences.tiles + 1)
            return number // lap % 2 == 0

    @gluon.jit
    def mirrored_tile(self, number, n, config: gl.constexpr):
        """The key tile of number `number`, the n-th of its head. In laps that walk up, the last key tile is first:

              lap     CTA n begins          begins at             is at the last rows, or at its own
              up      with all others       rows beside its keys  after all with later keys
              down    as an up lap's ends   the last rows         after all with earlier keys, which are longer

        So an up lap's shortest CTAs are followed by a down lap's longest, all end together, and at each tile of dQ
        CTAs arrive one after the other, always behind CTAs of smaller numbers, for which alone they wait."""
        rows = self.shape.lap_rows
        first = n // rows * rows
        mirror = first + gl.minimum(first + rows, self.tiles) - 1 - n
        return gl.where(self.downward(number, config), n, mirror)


@gluon.aggregate
class Visit:
    """A tile of query rows that sees some of the CTA's keys; the fields `b`, `h`, `row` are those of a `Tile`."""

    b: gl.tensor
    h: gl.tensor  # query head
    row: gl.tensor  # -1: no tile, or no key tile is left; BEHIND: no query sees the keys
    flags: gl.tensor
    turn: gl.tensor  # number of CTAs that add to the tile's dQ before this one

    @gluon.jit
    def masked(self):
        """Whether some score of the tile may be hidden."""
        return (self.flags & MASKED) != 0

    @gluon.jit
    def more(self):
        """Whether another tile follows."""
        return (self.flags & MORE) != 0

    @gluon.jit
    def first_key(self):
        """The key tile's first key; read from the visit, it takes no register for the whole key tile."""
        return self.flags >> FIRST


@gluon.constexpr_function
def row_numbers_layout():
    """Shared-memory layout of a number per row, contiguous as TMA writes them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.aggregate
class Context:
    """The argument of every role of the main kernel."""

    tensors: Tensors
    rings: gl.base_value  # of the architecture: shared memory, and tensor memory where there is any
    work: Work
    keys: Keys  # those of the CTA's only key tile, or of the one that a role works on
    mods: Modifiers
    slope: gl.constexpr  # derivative of the score function, or None: 1
    scale: gl.tensor
    config: gl.constexpr


@gluon.jit
def keys_at(work, number, config: gl.constexpr):
    """The keys of a key tile."""
    if config.ragged:
        return ragged_keys(work, number, config)
    else:
        return dense_keys(work, number, config)


@gluon.jit
def first_keys(work, config: gl.constexpr):
    """The keys of a CTA's only key tile. If it does several, each role finds them (`at_number`, `at_keys`)."""
    if config.persistent:
        none = gl.to_tensor(0)
        return Keys(none, none, none, none, none, none, none, none, none, none)
    else:
        return keys_at(work, gl.program_id(0), config)


@gluon.jit
def at_number(ctx, number, count):
    """The context for the loader of key tile `number`; `count`: see `hidden_zero`."""
    if ctx.config.persistent:
        return with_keys(ctx, keys_at(ctx.work.computed_anew(count), number, ctx.config))
    else:
        return ctx


@gluon.jit
def hidden_zero(count):
    """0, by a number below 2³⁰ that changes. The compiler computes what depends on it each time, instead of keeping it
    in registers, of which the loader has few."""
    return count >> 30


@gluon.jit
def at_keys(ctx, state, get: gl.constexpr = get_field):
    """The context of the key tile whose visit is in the slot of a consumer's `state`; `get`: see `read_visit`."""
    if ctx.config.persistent:
        return with_keys(ctx, read_keys(ctx, state, get))
    else:
        return ctx


@gluon.jit
def with_keys(ctx, keys):
    """The context of other keys."""
    return Context(ctx.tensors, ctx.rings, ctx.work, keys, ctx.mods, ctx.slope, ctx.scale, ctx.config)


@gluon.jit
def dense_keys(work, number, config: gl.constexpr):
    """The keys of a key tile in a dense batch."""
    shape = work.shape
    head, n = work.head_and_tile(number)
    if config.waits_for_later:
        n = shape.tiles - 1 - n
    elif config.mirrored:
        n = work.mirrored_tile(number, n, config)
    b = head // shape.heads_kv
    return keys_of_batch_entry(shape, b, head - b * shape.heads_kv, n * config.block_n)


@gluon.jit
def keys_of_batch_entry(shape, b, h, first):
    """Keys from `first` on of key head h in a dense batch."""
    return Keys(b, h, first, shape.seq_q, shape.seq_k, shape.group, b, b, b * shape.heads_q, gl.to_tensor(0))


@gluon.jit
def ragged_keys(work, number, config: gl.constexpr):
    """The keys of a key tile in packed sequences, from a record of the list of key tiles."""
    sequences = work.sequences
    h, n = work.head_and_tile(number)
    record = sequences.tiles + 2 + 2 * n
    b = gl.load(record)
    q_start, k_start = gl.load(sequences.cu_q + b), gl.load(sequences.cu_k + b)
    seq_q, seq_k = gl.load(sequences.cu_q + b + 1) - q_start, gl.load(sequences.cu_k + b + 1) - k_start
    first = gl.load(record + 1) * config.block_n
    row = padded_start(q_start, b)
    return Keys(b, h, first, seq_q, seq_k, work.shape.group, q_start, k_start, gl.to_tensor(0), row)


@gluon.jit
def padded_start(start, b):
    """Where packed sequence b, whose first query is `start`, begins in the kernels' own numbers."""
    return (start + b * PADDING) // PADDING * PADDING


@gluon.jit
def publish_visit(ctx, state, visit):
    """Writes a visit, and its keys where they are not the CTA's only ones, into the record of a producer's `state`;
    called by one warp."""
    slots, first = ctx.rings.visits, record_to_fill(state)
    put_fields(slots, first, (visit.row, visit.h, visit.flags, visit.turn))
    if ctx.config.persistent:
        keys = ctx.keys
        put_fields(slots, first + 4, (keys.b, keys.h, keys.first))
        if ctx.config.ragged:
            put_fields(slots, first + 7, (keys.seq_q, keys.seq_k, keys.q_start, keys.k_start, keys.row))


@gluon.jit
def put_fields(slots, first, values):
    """Writes values from field `first` on; called by one warp."""
    for i in gl.static_range(len(values)):
        put_field(slots.index(first + i), values[i])


@gluon.jit
def record(state):
    """The first field of the record of a consumer's `state`."""
    return (state.index + STAGES * state.phase) * FIELDS


@gluon.jit
def record_to_fill(state):
    """The first field of the record of a producer's `state`."""
    return record(PipelineState(state.index, state.phase ^ 1, STAGES))


@gluon.jit
def read_visit(ctx, state, get: gl.constexpr = get_field):
    """Reads the visit whose tile is in the slot of a consumer's `state`, of any ring with a slot per visit. `get` reads
    a field: `get_field` where four warps call this, `field_of_warp` where one does."""
    first = record(state)
    slots = ctx.rings.visits
    row = get(slots.index(first))
    h, flags, turn = (slots.index(first + 1), slots.index(first + 2), slots.index(first + 3))
    return Visit(ctx.keys.b, get(h), row, get(flags), get(turn))


@gluon.jit
def read_keys(ctx, state, get: gl.constexpr):
    """Reads the keys of the visit in the slot of a consumer's `state`; `get`: see `read_visit`."""
    slots, number = ctx.rings.visits, record(state)
    b, h, first = slots.index(number + 4), slots.index(number + 5), slots.index(number + 6)
    b, h, first = get(b), get(h), get(first)
    if ctx.config.ragged:
        seq_q, seq_k = slots.index(number + 7), slots.index(number + 8)
        q_start, k_start, row = slots.index(number + 9), slots.index(number + 10), slots.index(number + 11)
        return Keys(
            b, h, first, get(seq_q), get(seq_k), ctx.work.shape.group, get(q_start),
            get(k_start), gl.to_tensor(0), get(row),
        )  # fmt: skip
    else:
        return keys_of_batch_entry(ctx.work.shape, b, h, first)


@gluon.jit
def no_visit():
    """The visit that roles get when no key tile is left."""
    none = gl.to_tensor(-1)
    return Visit(none, none, none, none, none)


@gluon.jit
def publish_end(ctx, state):
    """Writes `no_visit`, of which roles read only the row, into the record of a producer's `state`."""
    put_field(ctx.rings.visits.index(record_to_fill(state)), -1)


@gluon.jit
def first_visit(ctx, ring, state, visit_state):
    """Waits for the first visit of a role's next key tile."""
    ring.consumer_wait(state)
    return read_visit(ctx, visit_state)


@gluon.jit
def following_visit(ctx, ring, state, visit_state):
    """Waits for the first visit of the next key tile, or `no_visit`."""
    if ctx.config.persistent:
        return first_visit(ctx, ring, state, visit_state)
    else:
        return no_visit()
