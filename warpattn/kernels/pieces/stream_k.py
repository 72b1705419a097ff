"""Sharing out the keys of a batch over CTAs: every one gets the same number of key tiles, to within one unit.

Every (sequence, row tile) is an entry; each of its key heads has `units(entry)` units of key tiles and, behind them,
room for the price of a head: what starting and finishing it costs, in units without keys. Laid end to end,

      entry 0: head 0 | head 1 | …    entry 1: head 0 | …                units 0 .. total - 1
      CTA 0 ────────▶|◀──── CTA 1 ────▶|◀──── CTA 2 ────▶| …             runs that differ by at most one unit

each CTA takes one run, front-loaded. Where a run ends inside a head, the head is split and its parts are combined
later; a run that starts in the room behind a head goes on with the next one. All of it follows from the lengths on the
device, so the grid never depends on them. Source of the front-loaded shares: specification of attention, section 3.11.

Where all heads have equally many units, shares that end where heads or equal parts of heads do are better, even if a
few CTAs stay idle: fewer parts, or none, and every CTA begins and finishes one thing less (`share_heads`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.aggregate
class Shares:
    """`total` units over CTAs: the first `rest` of them take `size` + 1, the others `size`, as far as they go.

    `price`: units without keys behind each head.
    """

    total: gl.tensor
    size: gl.tensor
    rest: gl.tensor
    price: gl.tensor

    @gluon.jit
    def first(self, part):
        """First unit of a CTA; that of the next one is its end."""
        return gl.minimum(part * self.size + gl.minimum(part, self.rest), self.total)

    @gluon.jit
    def owner(self, unit):
        """The CTA that has a unit."""
        wide = self.rest * (self.size + 1)
        long = unit < wide
        size = gl.where(long, self.size + 1, gl.maximum(self.size, 1))
        return gl.where(long, unit, unit - wide) // size + gl.where(long, 0, self.rest)

    @gluon.jit
    def unless(self, condition, other):
        """The same, or `other` where the condition holds."""
        return Shares(
            gl.where(condition, other.total, self.total),
            gl.where(condition, other.size, self.size),
            gl.where(condition, other.rest, self.rest),
            gl.where(condition, other.price, self.price),
        )


@gluon.jit
def share_out(total, parts, price):
    """Shares of `total` units, with a `price` in them for each head, over `parts` CTAs."""
    size = total // parts
    return Shares(total, size, total - size * parts, price)


@gluon.jit
def share_heads(plain, heads, units, parts, cut, growth: gl.constexpr):
    """Shares of `heads` heads of equally many `units` over `parts` CTAs that end where heads or equal parts of heads
    do; `plain`, how they are shared out otherwise, if a run would grow by more than `growth` units.

    cut: (parts of a head, heads of a CTA), of which one is 1; what `even_cut` finds.
    """
    size = gl.where(cut[0] > 1, (units + cut[0] - 1) // cut[0], units * cut[1])
    room = gl.where(cut[0] > 1, (units + size - 1) // gl.maximum(size, 1) * size, units)
    total = heads * units
    fits = (heads * room <= size * parts) & ((size - growth) * parts <= total)
    return plain.unless(fits, Shares(heads * room, size, gl.to_tensor(0), room - units))


@gluon.aggregate
class Place:
    """A position in the line of units: `unit`, the entry it belongs to, and the units `before` that entry."""

    unit: gl.tensor
    entry: gl.tensor
    before: gl.tensor

    @gluon.jit
    def advance(self, count, entry_units):
        """The place `count` units on, in the same entry of `entry_units` units or at the start of the next one."""
        unit = self.unit + count
        done = unit == self.before + entry_units
        return Place(unit, self.entry + done.to(gl.int32), gl.where(done, unit, self.before))

    @gluon.jit
    def past_price(self, units, room, heads):
        """The place, or the next head if all `units` of the one here lie before it in its `room`."""
        inside = self.unit - self.before
        begin = inside % room
        return self.advance(gl.where(begin < units, 0, room - begin), room * heads)


@gluon.aggregate
class Part:
    """Which part of a head a CTA has at hand, and where partial results of that head lie."""

    head: gl.tensor  # key head of the entry
    begin: gl.tensor  # first unit inside the head
    count: gl.tensor  # units, with the room behind the last
    first: gl.tensor  # the head's first unit in the line
    splits: gl.tensor  # parts of the head
    first_cta: gl.tensor

    @gluon.jit
    def slot(self, split, invariant: gl.constexpr):
        """Workspace slot of part number `split` of the head: with `invariant` a unit's own, else one of two of its
        CTA, 2 c for the head that its run begins in and 2 c + 1 for the one that begins in its run."""
        if invariant:
            return self.first + split
        else:
            return 2 * (self.first_cta + split) + (split == 0).to(gl.int32)

    @gluon.jit
    def number(self, cta, invariant: gl.constexpr):
        """Number of the part at hand."""
        if invariant:
            return self.begin
        else:
            return cta - self.first_cta


@gluon.jit
def part_at(place, units, room, shares, cta, invariant: gl.constexpr):
    """The part of CTA `cta` at a place of its run; `units` of a head of the entry there, and the `room` it takes."""
    inside = place.unit - place.before
    head = inside // room
    begin = inside - head * room
    first = place.unit - begin
    splits, owner = parts_of(first, units, shares, invariant)
    if invariant:
        count = gl.to_tensor(1)
    else:
        left = shares.first(cta + 1) - place.unit
        count = gl.where(left < units - begin, left, room - begin)
    return Part(head, begin, count, first, splits, owner)


@gluon.jit
def parts_of(first, units, shares, invariant: gl.constexpr):
    """(parts, CTA of the first one) of the head whose `units` begin at `first`."""
    if invariant:
        return units, first
    else:
        owner = shares.owner(first)
        return shares.owner(first + units - 1) - owner + 1, owner


@gluon.jit
def find_place(unit, sums):
    """(entry, units before it) of `unit` as far as a block of entries tells, given inclusive sums of their units.

    Several blocks: add the entries, take the largest of the units.
    """
    passed = sums <= unit
    return gl.sum(passed.to(gl.int32), 0), gl.max(gl.where(passed, sums, 0), 0)
