"""The tile scheduler for sequences of different lengths: reads tiles from a list made on the device, longest first.

`order_kernel` writes one record for every block of query rows of every sequence, sorted by the number of its key tiles.
The scheduler then counts through (block, head) pairs as it does for a dense batch:

      tile number ──▶ section of heads ──▶ record of the list ──▶ head inside the section

      list   [blocks, counter, ...] [b, row, q_start, len_q, k_start, len_k, -, -] [b, row, ...] ...

A tile carries the lengths of its sequence, also through shared memory, so that only the producer reads the list.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import scheduler_sizes
from .scheduler import get_field, put_field
from .span import tile_span

VARLEN_TILE_FIELDS = gl.constexpr(scheduler_sizes.VARLEN_TILE_FIELDS)
RECORD = gl.constexpr(scheduler_sizes.RECORD)
BLOCKS = gl.constexpr(scheduler_sizes.BLOCKS)
COUNTER = gl.constexpr(scheduler_sizes.COUNTER)


@gluon.aggregate
class VarlenTile:
    """One output tile and its sequence; row -1 if no tile is left."""

    b: gl.tensor
    h: gl.tensor
    row: gl.tensor  # first query row within the sequence
    q_start: gl.tensor  # first query of the sequence: a row of ragged queries, or b
    seq_q: gl.tensor
    k_start: gl.tensor  # first key of the sequence; only the producer has it
    seq_k: gl.tensor
    number: gl.tensor

    @gluon.jit
    def output(self):
        """The row, or batch entry, that the output of its sequence begins at."""
        return self.q_start


@gluon.aggregate
class VarlenScheduler:
    """As `scheduler.Work` for a dense batch."""

    heads_q: gl.tensor
    group: gl.tensor  # query heads per key head
    section: gl.tensor  # query heads per section
    lse_batch: gl.tensor  # elements of the LSE from one sequence to the next; 0: sequences lie end to end
    lse_head: gl.tensor  # from one head to the next
    blocks: gl.tensor  # records in the list
    records: gl.tensor  # int32*, the first record
    packed: gl.constexpr  # query heads of a tile, a divisor of `group`

    @gluon.jit
    def total(self):
        """Number of tiles."""
        return self.heads_q // self.packed * self.blocks

    @gluon.jit
    def tile(self, number, tokens: gl.constexpr):
        """Output tile `number`; the list was made for `tokens` queries a block."""
        return tile_of_list(self, number, number < self.total())

    @gluon.jit
    def place(self, tile, tokens: gl.constexpr):
        """A non-negative int32 that names a tile."""
        return tile.number

    @gluon.jit
    def tile_at(self, place, tokens: gl.constexpr):
        """The tile with this `place`."""
        return self.tile(place, tokens)

    @gluon.jit
    def lengths(self, tile):
        """A value with the fields `seq_q` and `seq_k` of a tile's sequence."""
        return tile

    @gluon.jit
    def key_tiles(self, mods, tile, config: gl.constexpr):
        """The key tiles of a tile."""
        return tile_span(mods.key_span(tile, tile, config.tokens), config.block_n)

    @gluon.jit
    def lse_rows(self, lse, tile, head, token):
        """Pointers to the LSE of a head and token, any shape, of a tile's sequence."""
        _, row = self.query_place(tile, token)
        return lse + (tile.b.to(gl.int64) * self.lse_batch + head.to(gl.int64) * self.lse_head) + row

    @gluon.jit
    def query_place(self, tile, token):
        """(batch entry, row) of a query token of a tile's sequence, any shape: a row of sequences end to end."""
        return tile.b, gl.where(self.lse_batch == 0, tile.q_start, 0) + token

    @gluon.jit
    def publish(self, slots, index, tile):
        """Writes a tile into a slot of [stages * VARLEN_TILE_FIELDS, 1]; one warp calls it."""
        publish_lengths(slots, index * VARLEN_TILE_FIELDS, tile)

    @gluon.jit
    def read(self, slots, index):
        """The tile in a slot, without the start of its keys; four warps call it."""
        return read_lengths(slots, index * VARLEN_TILE_FIELDS)


@gluon.jit
def tile_of_list(work, number, inside):
    """Output tile `number` of the list of a `VarlenScheduler`, if it is `inside`."""
    per_section = gl.maximum(work.section // work.packed * work.blocks, 1)
    section = number // per_section
    rest = number - section * per_section
    width = gl.maximum(gl.minimum(work.section, work.heads_q - section * work.section) // work.packed, 1)
    block = rest // width
    head = section * work.section + (rest - block * width) * work.packed
    record = work.records + block * RECORD
    b = gl.load(record, mask=inside, other=0)
    row = gl.load(record + 1, mask=inside, other=-1)
    q_start = gl.load(record + 2, mask=inside, other=0)
    seq_q = gl.load(record + 3, mask=inside, other=0)
    k_start = gl.load(record + 4, mask=inside, other=0)
    seq_k = gl.load(record + 5, mask=inside, other=0)
    return VarlenTile(b, head, row, q_start, seq_q, k_start, seq_k, number)


@gluon.jit
def publish_lengths(slots, first, tile):
    """Writes a tile into the fields from `first` on; one warp calls it."""
    put_field(slots.index(first), tile.b)
    put_field(slots.index(first + 1), tile.h)
    put_field(slots.index(first + 2), tile.row)
    put_field(slots.index(first + 3), tile.q_start)
    put_field(slots.index(first + 4), tile.seq_q)
    put_field(slots.index(first + 5), tile.seq_k)
    put_field(slots.index(first + 6), tile.number)


@gluon.jit
def read_lengths(slots, first):
    """The tile in the fields from `first` on, without the start of its keys; four warps call it."""
    b = get_field(slots.index(first))
    h = get_field(slots.index(first + 1))
    row = get_field(slots.index(first + 2))
    q_start = get_field(slots.index(first + 3))
    seq_q = get_field(slots.index(first + 4))
    seq_k = get_field(slots.index(first + 5))
    number = get_field(slots.index(first + 6))
    return VarlenTile(b, h, row, q_start, seq_q, gl.to_tensor(0), seq_k, number)


@gluon.jit
def extent_of(offsets, b):
    """(first row, number of rows) of packed sequence `b`."""
    first = gl.load(offsets + b)
    return first, gl.load(offsets + b + 1) - first


@gluon.jit
def extent_within(offsets, b, batch):
    """`extent_of` where a launch may have more sequences than there are: those past `batch` have no rows."""
    there = b < batch
    first = gl.load(offsets + b, mask=there, other=0)
    return first, gl.load(offsets + b + 1, mask=there, other=0) - first
