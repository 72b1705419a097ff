"""Stream-K: partitions the keys of a batch over CTAs, so that the work of any two CTAs differs by at most one unit.

A row tile is a tile of query rows of one sequence. Each of its key heads has a number of units of key tiles, followed
by the head overhead: units without keys for the time to start and finish a head. All of these, one after the other,
form the work queue:

      row tile 0: head 0 | head 1 | …    row tile 1: head 0 | …          units 0 .. total - 1
      CTA 0 ────────▶|◀──── CTA 1 ────▶|◀──── CTA 2 ────▶| …             ranges that differ by at most one unit

Each CTA takes one range, the first CTAs the longer ones. A range that ends inside a head splits it, and the head's
parts are combined later; a range that starts in the overhead after a head goes on with the next head. Every CTA
computes this from lengths on the device, so the grid does not depend on them.

Several row tiles of a sequence read the same keys, from L2 if they read them at about the same time. So there may be
several queues with a part of the row tiles each (`Queue`): the CTAs of a pair take the same ranges of two queues.

If all heads have the same number of units, it is better to end ranges at heads, or at equal parts of heads, even if a
few CTAs stay idle: there are fewer parts or none, and CTAs start and finish fewer heads (`partition_heads`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.aggregate
class Queue:
    """The work queue of this CTA, one of `count`. CTA c of a launch is number c // count of queue c % count."""

    number: gl.tensor
    count: gl.tensor
    cta: gl.tensor  # this CTA's number in the queue

    @gluon.jit
    def ctas(self):
        """Number of CTAs of the queue."""
        return gl.num_programs(0) // self.count


@gluon.jit
def my_queue(count):
    """The `Queue` of this CTA."""
    cta = gl.program_id(0)
    return Queue(cta % count, count, cta // count)


@gluon.aggregate
class StreamK:
    """`total` units over CTAs: the first `longer` CTAs take `size` + 1, the others `size`, until none is left."""

    total: gl.tensor
    size: gl.tensor
    longer: gl.tensor
    head_overhead: gl.tensor  # units without keys after each head

    @gluon.jit
    def first(self, cta):
        """First unit of a CTA's range, which ends where the next CTA's begins."""
        return gl.minimum(cta * self.size + gl.minimum(cta, self.longer), self.total)

    @gluon.jit
    def owner(self, unit):
        """The CTA whose range contains `unit`."""
        wide = self.longer * (self.size + 1)
        long = unit < wide
        size = gl.where(long, self.size + 1, gl.maximum(self.size, 1))
        return gl.where(long, unit, unit - wide) // size + gl.where(long, 0, self.longer)

    @gluon.jit
    def unless(self, condition, other):
        """This partition, or `other` if `condition` holds."""
        return StreamK(
            gl.where(condition, other.total, self.total),
            gl.where(condition, other.size, self.size),
            gl.where(condition, other.longer, self.longer),
            gl.where(condition, other.head_overhead, self.head_overhead),
        )


@gluon.jit
def partition(total, ctas, head_overhead):
    """Partitions `total` units, head overheads included, over `ctas` CTAs."""
    size = total // ctas
    return StreamK(total, size, total - size * ctas, head_overhead)


@gluon.jit
def partition_heads(plain, heads, units, ctas, shape, growth: gl.constexpr, invariant: gl.constexpr):
    """Partitions `heads` heads of `units` units each over `ctas` CTAs, in ranges that end at heads or at equal parts of
    heads. Returns `plain` instead if a range would grow by more than `growth` units. With `invariant` no head is
    padded: every unit of the queue has a workspace slot, but padding would have none.

    shape: has `splits`, the parts of a head, and `whole`, the heads of a CTA; one of them is 1 (see `EvenCut`).
    """
    size = gl.where(shape.splits > 1, (units + shape.splits - 1) // shape.splits, units * shape.whole)
    padded = gl.where(shape.splits > 1, (units + size - 1) // gl.maximum(size, 1) * size, units)
    total = heads * units
    fits = (heads * padded <= size * ctas) & ((size - growth) * ctas <= total)
    if invariant:
        fits = fits & (padded == units)
    return plain.unless(fits, StreamK(heads * padded, size, gl.to_tensor(0), padded - units))


@gluon.aggregate
class Cursor:
    """A position in the work queue: a unit, its row tile, and the first unit of that row tile."""

    unit: gl.tensor
    row_tile: gl.tensor
    row_tile_start: gl.tensor

    @gluon.jit
    def advance(self, count, row_tile_units):
        """The position `count` units further: in the same row tile (of `row_tile_units` units), or at the next one."""
        unit = self.unit + count
        done = unit == self.row_tile_start + row_tile_units
        return Cursor(unit, self.row_tile + done.to(gl.int32), gl.where(done, unit, self.row_tile_start))

    @gluon.jit
    def skip_overhead(self, units, padded_units, heads):
        """This position, or the start of the next head if it is past the `units` of its head. `padded_units`: units of
        a head with overhead; both are 0 if the queue is empty."""
        inside = self.unit - self.row_tile_start
        begin = inside % gl.maximum(padded_units, 1)
        return self.advance(gl.where(begin < units, 0, padded_units - begin), padded_units * heads)


@gluon.aggregate
class Part:
    """A CTA's part of a head, and the workspace slots of that head's parts. CTAs are numbered within the queue."""

    head: gl.tensor  # key head of the row tile
    begin: gl.tensor  # first unit inside the head
    count: gl.tensor  # units, with the overhead after the last one
    head_start: gl.tensor  # the head's first unit in the queue
    splits: gl.tensor  # parts of the head
    first_cta: gl.tensor
    queue: Queue
    invariant: gl.constexpr  # every unit is a part

    @gluon.jit
    def slot(self, split):
        """Workspace slot of part `split` of the head. If `invariant`, each unit has a slot; else CTA c has two: 2 c
        for the head inside which its range begins, 2 c + 1 for a head that begins in its range. Queues have every n-th
        slot."""
        if self.invariant:
            own = self.head_start + split
        else:
            own = 2 * (self.first_cta + split) + (split == 0).to(gl.int32)
        return own * self.queue.count + self.queue.number

    @gluon.jit
    def number(self):
        """Number of this part among the head's."""
        if self.invariant:
            return self.begin
        else:
            return self.queue.cta - self.first_cta


@gluon.jit
def part_at(cursor, units, padded_units, stream_k, queue, invariant: gl.constexpr):
    """The part of this CTA at position `cursor` of its range of a `queue`. `units`: units of a head of that row tile;
    `padded_units`: with overhead."""
    inside = cursor.unit - cursor.row_tile_start
    head = inside // padded_units
    begin = inside - head * padded_units
    head_start = cursor.unit - begin
    splits, owner = parts_of(head_start, units, stream_k, invariant)
    if invariant:
        count = gl.to_tensor(1)
    else:
        left = stream_k.first(queue.cta + 1) - cursor.unit
        count = gl.where(left < units - begin, left, padded_units - begin)
    return Part(head, begin, count, head_start, splits, owner, queue, invariant)


@gluon.jit
def parts_of(head_start, units, stream_k, invariant: gl.constexpr):
    """(number of parts, CTA of the first one) of the head whose `units` begin at `head_start`."""
    if invariant:
        return units, head_start
    else:
        owner = stream_k.owner(head_start)
        return stream_k.owner(head_start + units - 1) - owner + 1, owner


@gluon.jit
def find_row_tile(unit, sums):
    """(row tile, its first unit) of `unit` within a block of row tiles, given inclusive sums of their units.

    Over several blocks: add the row tiles, take the largest of the units.
    """
    passed = sums <= unit
    return gl.sum(passed.to(gl.int32), 0), gl.max(gl.where(passed, sums, 0), 0)
