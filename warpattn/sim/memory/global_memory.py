"""Global memory: the caller's tensors in one address space, and who accessed which element.

Every range of the caller's memory is a buffer with its own base address, 2**40 apart, so that pointers are integers and
stray ones are noticed. Per granule (the smallest element that the kernel accesses there) a shadow holds the last write
as lane * 2**32 + epoch, and the numbers of the last read and the last update in lists of them. Unordered conflicting
accesses are races, between programs too. Reads do not conflict with each other, nor do updates (atomic operations, TMA
reductions), so each names the earlier one that it is not ordered after: a later write must be ordered after all.
TMA uses its own proxy: it sees earlier ordinary stores only after a fence, as in shared memory.
Sums of floats depend on the order of their updates; with `fixed_order` two unordered ones are a race, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .clocks import PRECEDING, Clock
from .findings import Finding, Findings, Place, many

_SHIFT = 40
_MIDDLE = 1 << (_SHIFT - 1)
EPOCH = (1 << 32) - 1
_VERBS = {"read": "reads", "write": "writes", "atomic": "updates", "sum": "adds to", "poll": "polls"}


class Toucher(NamedTuple):
    """Who accesses: a lane in an epoch, with its clock; `asynchronous`: through that proxy, as TMA does; the number of
    the CTA (-1: unknown), and whether an atomic access is one for other accesses of this CTA only (scope "cta")."""

    lane: int
    epoch: int
    clock: Clock
    place: Place
    asynchronous: bool = False
    cta: int = -1
    narrow: bool = False

    @property
    def packed(self) -> int:
        return (self.lane << 32) | self.epoch


class Update(NamedTuple):
    """An atomic access: who, the unordered one before it (-1: none), whether it only read, and for which CTA."""

    packed: int
    before: int
    looks: bool
    cta: int
    narrow: bool
    asynchronous: bool


class Release(NamedTuple):
    """What an address releases: the knowledge of a role in an epoch (-1: of several), and for whom."""

    packed: int
    clock: Clock
    cta: int
    narrow: bool

    def heard(self, who: Toucher) -> bool:
        """Whether an access that acquires learns of it: scope "cta" of either is for one CTA."""
        return not (self.narrow or who.narrow) or self.cta == who.cta


class GlobalBuffer:
    """A contiguous range of the caller's memory."""

    def __init__(self, number: int, name: str, address: int, nbytes: int, granule: int) -> None:
        self.name, self.address, self.nbytes, self.granule = name, address, nbytes, granule
        self.base = (number << _SHIFT) + _MIDDLE
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        self._typed: dict[Any, np.ndarray] = {}
        cells = -(-nbytes // granule)
        self.last_write = np.full(cells, -1, np.int64)
        self.last_read = np.full(cells, -1, np.int64)
        self.last_atomic = np.full(cells, -1, np.int64)
        self.reads: list[tuple[int, int]] = []  # since the last write: who, and the unordered one before it (-1: none)
        self.updates: list[Update] = []
        self.has_writes = False
        self.released: dict[int, Release] = {}  # byte -> what a reader of the last atomic there learns

    def elements(self, dtype: Any) -> np.ndarray:
        """View the bytes as elements of a type, without an incomplete last one."""
        found = self._typed.get(dtype)
        if found is None:
            size = np.dtype(dtype).itemsize
            found = self._typed[dtype] = self.bytes[: self.nbytes // size * size].view(dtype)
        return found


class Part(NamedTuple):
    """The part of a buffer that addresses reach: offsets of bytes, and which addresses these are (None: all)."""

    buffer: GlobalBuffer
    offsets: np.ndarray
    chosen: np.ndarray | None


class GlobalMemory:
    """Every buffer, found by address."""

    def __init__(self, findings: Findings, fixed_order: bool = False) -> None:
        self.findings, self.fixed_order = findings, fixed_order
        self.buffers: list[GlobalBuffer] = []
        self.owners: list[Any] = []  # of the buffers' bytes: alive as long as the run
        self.places: dict[int, Place] = {}  # lane*2^32+epoch of a write, read or atomic -> where; the newest per lane
        self._lanes: dict[int, Place] = {}
        self.preceded = False  # whether the preceding launch writes anything

    def add(self, name: str, address: int, nbytes: int, granule: int) -> GlobalBuffer:
        buffer = GlobalBuffer(len(self.buffers) + 1, name, address, nbytes, granule)
        self.buffers.append(buffer)
        return buffer

    def mark_preceding_writes(self, buffer: GlobalBuffer, cells: np.ndarray) -> None:
        """Record cells as written by the preceding launch."""
        packed = PRECEDING << 32 | 1
        self.preceded = True
        buffer.has_writes = True
        buffer.last_write[cells] = packed
        self.places[packed] = Place("the preceding launch", ())

    def in_flux(self, buffer: GlobalBuffer, cells: np.ndarray, who: Toucher) -> np.ndarray | None:
        """Return which cells the preceding launch may still be writing, as far as `who` knows; None if it has ended or
        writes nothing."""
        if not self.preceded or who.clock.preceded:
            return None
        return buffer.last_write[cells] >> 32 == PRECEDING

    def find(self, address: int) -> GlobalBuffer | None:
        """Return the buffer in whose neighbourhood an address lies."""
        number = (address >> _SHIFT) - 1
        return self.buffers[number] if 0 <= number < len(self.buffers) else None

    def resolve(self, addresses: np.ndarray, itemsize: int, who: Toucher, verb: str) -> list[Part]:
        """Find what addresses reach, a part per buffer; those outside of every buffer are reported and left out."""
        buffer = self.find(addresses.item(0))
        if buffer is not None:
            offsets, room = addresses - buffer.base, buffer.nbytes - itemsize + 1
            unsigned = offsets.view(np.uint64)  # what is negative is huge there
            if room > 0 and unsigned.item(unsigned.argmax()) < room:
                return [Part(buffer, offsets, None)]
        parts, flat = [], addresses.reshape(-1)
        numbers = flat >> _SHIFT
        for number in np.unique(numbers):
            chosen = np.flatnonzero(numbers == number)
            buffer = self.find(int(flat[chosen[0]]))
            if buffer is None:
                text = f"address {int(flat[chosen[0]]):#x}, which belongs to no argument"
                self._outside(who, verb, text, "", None)
                continue
            offsets = flat[chosen] - buffer.base
            inside = (offsets >= 0) & (offsets <= buffer.nbytes - itemsize)
            if not inside.all():
                stray = offsets[~inside]
                low, high = int(stray.min()), int(stray.max()) + itemsize
                text = f"bytes {low}..{high} of {buffer.name}, which has {buffer.nbytes}"
                self._outside(who, verb, text, buffer.name, (low, high))
            if inside.any():
                parts.append(Part(buffer, offsets[inside], chosen[inside]))
        return parts

    def resolve_one(self, address: int, itemsize: int, who: Toucher, verb: str) -> tuple[GlobalBuffer, int] | None:
        """Do the same for one address: return the buffer and the byte in it."""
        buffer = self.find(address)
        if buffer is not None and 0 <= address - buffer.base <= buffer.nbytes - itemsize:
            return buffer, address - buffer.base
        self.resolve(np.array([address]), itemsize, who, verb)
        return None

    def pointers(self, addresses: np.ndarray) -> np.ndarray:
        """Convert addresses of the caller's memory to pointers of the run, relative to the nearest buffer."""
        found = addresses.copy()
        best = np.full(addresses.shape, _MIDDLE, np.int64)  # farther than that no buffer is meant
        for buffer in self.buffers:
            offsets = addresses - buffer.address
            distance = np.maximum(np.maximum(-offsets, offsets - buffer.nbytes + 1), 0)
            nearer = (distance < best) & (addresses != 0)
            found, best = np.where(nearer, buffer.base + offsets, found), np.where(nearer, distance, best)
        return found

    def addresses(self, pointers: np.ndarray) -> np.ndarray:
        """Convert pointers of the run to addresses of the caller's memory."""
        numbers = pointers >> _SHIFT
        found = pointers.copy()
        for buffer in self.buffers:
            found = np.where(numbers == buffer.base >> _SHIFT, pointers - buffer.base + buffer.address, found)
        return found

    def _outside(self, who: Toucher, verb: str, text: str, name: str, box: tuple[int, int] | None) -> None:
        finding = Finding("OutOfBounds", f"{who.place} {verb} {text}", (who.place,), name, box)
        self.findings.add(finding)

    def touch(self, buffer: GlobalBuffer, cells: Any, who: Toucher, how: str, shadow=None) -> None:
        """Check and record an access of the shadow's cells: "read", "write", "atomic", "sum", an atomic addition
        that rounds, or "poll", an atomic read; `shadow` picks them from an array for accesses by descriptor."""
        pick: Callable[[np.ndarray], np.ndarray] = shadow or (lambda array: array)
        write, read, atomic = (pick(a) for a in (buffer.last_write, buffer.last_read, buffer.last_atomic))
        if buffer.has_writes:
            self._check(write[cells], who, how, "wrote", buffer)
            if who.asynchronous:
                self._check_fence(write[cells], who, how, buffer)
        if buffer.updates and how in ("read", "write"):
            self._check_updates(atomic[cells], who, how, buffer)
        if buffer.reads and how in ("write", "atomic", "sum"):
            self._check_reads(read[cells], who, how, buffer)
            read[cells] = -1  # what is ordered after this access is ordered after them
        packed = who.packed
        if how == "read":
            read[cells] = _after_reads(read[cells], who, buffer)
        elif how == "write":
            buffer.has_writes = True
            write[cells] = packed
        else:
            atomic[cells] = self._after(atomic[cells], who, how, buffer)
        self.places[packed] = who.place

    def update(
        self, buffer: GlobalBuffer, cells: range, who: Toucher, acquired: Release | None, how: str
    ) -> None:
        """Check and record an atomic access of one element's cells, which is ordered after what it acquires, too."""
        packed = who.packed
        for cell in cells:
            earlier = int(buffer.last_write[cell])
            if earlier >= 0 and not _ordered(who, earlier, acquired):
                self._race(who, how, (1, earlier, "wrote"), buffer)
            if buffer.reads and how != "poll":
                earlier = _unordered_read(int(buffer.last_read[cell]), who, buffer, acquired)
                if earlier >= 0:
                    self._race(who, how, (1, earlier, "read"), buffer)
                buffer.last_read[cell] = -1
            buffer.last_atomic[cell] = self._follow(int(buffer.last_atomic[cell]), who, acquired, buffer, how)
        self.places[packed] = who.place

    def _after(self, numbers: np.ndarray, who: Toucher, how: str, buffer: GlobalBuffer) -> np.ndarray:
        """Return the numbers of a new update of cells whose last updates have `numbers`."""
        last, where = np.unique(numbers, return_inverse=True)
        first = len(buffer.updates)
        for number in last.tolist():
            self._follow(number, who, None, buffer, how)
        return (first + where).reshape(numbers.shape)

    def _follow(
        self, number: int, who: Toucher, acquired: Release | None, buffer: GlobalBuffer, how: str
    ) -> int:
        """Return the number of a new update after update `number`, or after the newest unordered one before it."""
        looks = how == "poll"
        while number >= 0:
            update = buffer.updates[number]
            ordered = _ordered(who, update.packed, acquired)
            if not ordered and not (looks and update.looks):
                self._check_unordered(who, how, update, buffer)
            if not ordered or (looks and not update.looks):
                break
            number = update.before
        buffer.updates.append(Update(who.packed, number, looks, who.cta, who.narrow, who.asynchronous))
        return len(buffer.updates) - 1

    def _check_unordered(self, who: Toucher, how: str, update: Update, buffer: GlobalBuffer) -> None:
        """Check that an update needs no order after an earlier one."""
        before = "polled" if update.looks else "updated"
        if self.fixed_order and how == "sum" and not update.looks:
            self._race(who, how, (1, update.packed, before), buffer)
        elif (who.narrow or update.narrow) and who.cta != update.cta and min(who.cta, update.cta) >= 0:
            self._race(who, how, (1, update.packed, f"{before}, one of the two with scope='cta'"), buffer)

    def _check_updates(self, numbers: np.ndarray, who: Toucher, how: str, buffer: GlobalBuffer) -> None:
        """Check that an ordinary access is ordered after all updates of its cells; reads do not conflict with polls."""
        if who.asynchronous:
            self._check_updates_fence(numbers, who, how, buffer)
        for last in np.unique(numbers).tolist():
            number = last
            while number >= 0:
                update = buffer.updates[number]
                if not _ordered(who, update.packed) and not (update.looks and how == "read"):
                    before = "polled" if update.looks else "updated"
                    self._race(who, how, (int(np.count_nonzero(numbers == last)), update.packed, before), buffer)
                    break
                number = update.before

    def _check_reads(self, numbers: np.ndarray, who: Toucher, how: str, buffer: GlobalBuffer) -> None:
        """Check that a write or an update is ordered after all reads of its cells."""
        flat = numbers.reshape(-1)
        last, where = np.unique(flat, return_inverse=True)
        earlier = np.array([_unordered_read(number, who, buffer) for number in last.tolist()], np.int64)[where]
        bad = np.flatnonzero(earlier >= 0)
        if bad.size:
            self._race(who, how, (len(bad), int(earlier[bad[0]]), "read"), buffer)

    def _check(self, packed: np.ndarray, who: Toucher, how: str, before: str, buffer: GlobalBuffer) -> None:
        if not packed.size or packed.item(packed.argmax()) < 0:
            return
        lanes = packed >> 32
        ordered = (packed < 0) | (lanes == who.lane)
        if np.count_nonzero(ordered) != ordered.size:
            ordered |= who.clock.known(lanes, packed & EPOCH)
        if np.count_nonzero(ordered) == ordered.size:
            return
        bad = np.flatnonzero(~ordered.reshape(-1))
        self._race(who, how, (len(bad), int(packed.reshape(-1)[bad[0]]), before), buffer)

    def _check_fence(self, packed: np.ndarray, who: Toucher, how: str, buffer: GlobalBuffer) -> None:
        """Check for a fence between ordinary stores and an access by TMA."""
        lanes, epochs = packed >> 32, packed & EPOCH
        bare = (packed >= 0) & (lanes != who.lane) & ~who.clock.known(lanes, epochs, fenced=True)
        bare &= who.clock.known(lanes, epochs)  # others race, which is reported
        if bare.any():
            earlier = int(np.count_nonzero(bare)), int(packed[bare][0]), "wrote them with ordinary stores"
            self._no_fence(who, how, earlier, buffer)

    def _check_updates_fence(self, numbers: np.ndarray, who: Toucher, how: str, buffer: GlobalBuffer) -> None:
        """Check for a fence between atomic operations and an access by TMA."""
        last, where = np.unique(numbers.reshape(-1), return_inverse=True)
        earlier = np.array([_bare_update(number, who, buffer) for number in last.tolist()], np.int64)[where]
        bare = np.flatnonzero(earlier >= 0)
        if bare.size:
            self._no_fence(who, how, (bare.size, int(earlier[bare[0]]), "updated them"), buffer)

    def _no_fence(self, who: Toucher, how: str, earlier: tuple[int, int, str], buffer: GlobalBuffer) -> None:
        """Report a missing fence; earlier: the number of elements, the earlier access and what it did."""
        count, packed, before = earlier
        other = self.places.get(packed, Place("another program", ()))
        text = f"{who.place} {_VERBS[how]} {many(count, 'element')} of {buffer.name} through the asynchronous proxy "
        text += f"after {other} {before}; there is no fence.proxy.async between the two"
        self.findings.add(Finding("MissingFence", text, (who.place, other), buffer.name))

    def report_collision(self, part: Part, who: Toucher, lost: np.ndarray, size: int) -> None:
        """Report that lanes of one store write different values to one address: any of them may stay."""
        at = int(part.offsets.reshape(-1)[np.flatnonzero(lost)[0]])
        what = f"{many(int(np.count_nonzero(lost)), 'element')} of {part.buffer.name}"
        text = f"{who.place} writes different values from several lanes to {what}, the first at byte {at}: "
        text += "which of them stays is chance"
        self.findings.add(Finding("Race", text, (who.place,), part.buffer.name, (at, at + size)))

    def _race(self, who: Toucher, how: str, earlier: tuple[int, int, str], buffer: GlobalBuffer) -> None:
        """Report a conflict; earlier: the number of elements, the earlier access and its kind."""
        count, packed, before = earlier
        other = self.places.get(packed, Place("another program", ()))
        verb, what = _VERBS[how], f"{many(count, 'element')} of {buffer.name}"
        text = f"{who.place} {verb} {what} that {other} {before}; nothing orders the two"
        self.findings.add(Finding("Race", text, (who.place, other), buffer.name))


def _ordered(who: Toucher, packed: int, acquired: Release | None = None) -> bool:
    """Whether an earlier access happened before the current one."""
    lane, epoch = packed >> 32, packed & EPOCH
    if lane == who.lane or who.clock.knows(lane, epoch):
        return True
    return acquired is not None and acquired.clock.knows(lane, epoch)


def _after_reads(numbers: np.ndarray, who: Toucher, buffer: GlobalBuffer) -> Any:
    """Return the numbers of a new read of cells whose last reads have `numbers`."""
    first, reads = len(buffer.reads), buffer.reads
    if not numbers.size:
        return numbers
    number = numbers.item(0)
    if numbers.item(numbers.argmin()) == number == numbers.item(numbers.argmax()):
        reads.append((who.packed, _unordered_before(number, who, reads)))
        return first
    last, where = np.unique(numbers, return_inverse=True)
    reads += [(who.packed, _unordered_before(number, who, reads)) for number in last.tolist()]
    return (first + where).reshape(numbers.shape)


def _unordered_before(number: int, who: Toucher, reads: list[tuple[int, int]]) -> int:
    """Return the number of the newest read, from `number` on, that is not ordered before the current one."""
    while number >= 0 and _ordered(who, reads[number][0]):
        number = reads[number][1]
    return number


def _unordered_read(number: int, who: Toucher, buffer: GlobalBuffer, acquired: Release | None = None) -> int:
    """Return who read, of read `number` and those before it, without order (-1: no one)."""
    while number >= 0:
        packed, number = buffer.reads[number]
        if not _ordered(who, packed, acquired):
            return packed
    return -1


def _bare_update(number: int, who: Toucher, buffer: GlobalBuffer) -> int:
    """Return which atomic operation, of update `number` and those before it, no fence shows to TMA (-1: none)."""
    while number >= 0:
        update = buffer.updates[number]
        lane, epoch = update.packed >> 32, update.packed & EPOCH
        ordinary = not update.asynchronous and not update.looks
        if ordinary and who.clock.knows(lane, epoch) and not who.clock.knows(lane, epoch, row=1):
            return update.packed
        number = update.before
    return -1
