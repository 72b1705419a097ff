"""Shared memory: buffers of bytes, views on them, and the record of who accessed which bytes.

A view (MemDesc) is a NumPy array on the buffer's bytes, with a leading dimension for the CTAs of a cluster, in the
logical order of its shape: swizzles of addresses are not modelled. Index, sub-slice, transpose and reshape are views
on the same bytes, so tiles alias as they do on the card.

Two accesses conflict if they have bytes in common and one writes. Their clocks must order them; if the earlier one is
an ordinary write and the later one goes through the asynchronous proxy, a fence must separate them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..errors import SimulationError
from ..ir.formats import memory_dtype
from ..ir.valuetypes import Type
from .clocks import SEEN, Clock
from .findings import Finding, Findings, Kind, Place

POISON = 0xFF  # a NaN in every float format, -1 as an integer


class Access(NamedTuple):
    """One access of a view: by which lane, in which epoch, how; `hidden`: by assembly, unknown to the compiler."""

    view: MemDesc
    lane: int
    epoch: int
    writes: bool
    asynchronous: bool
    place: Place
    cta: int = 0
    hidden: bool = False


class Missing(NamedTuple):
    """Elements of a value that were never written, and the finding if one of them is used."""

    where: np.ndarray
    fault: Finding

    def at(self, where: Any) -> Missing:
        """Return the same fault for other elements."""
        return Missing(np.asarray(where, np.bool_), self.fault)


def _verb(access: Access) -> str:
    return "writes" if access.writes else "reads"


def either(one: Missing | None, other: Missing | None) -> Missing | None:
    """Return the elements that are missing in one of two values of a shape."""
    if one is None or other is None:
        return one or other
    return one.at(one.where | other.where)


def of_product(a: Missing | None, b: Missing | None, shape: tuple[int, ...]) -> Missing | None:
    """Return the elements [M, N] of a product that depend on missing ones of operands [M, K] and [K, N]."""
    found = a or b
    if found is None:
        return None
    rows = np.zeros(shape[0], np.bool_) if a is None else a.where.any(axis=1)
    columns = np.zeros(shape[1], np.bool_) if b is None else b.where.any(axis=0)
    return found.at(np.broadcast_to(np.logical_or.outer(rows, columns), shape))


def side_by_side(boxes: list[tuple[np.ndarray, Missing | None]], columns: int) -> tuple[np.ndarray, Missing | None]:
    """Return the first columns of boxes beside each other, and which of their elements are undefined."""
    values = np.concatenate([value for value, _ in boxes], axis=1)[:, :columns]
    fault = next((missing for _, missing in boxes if missing is not None), None)
    if fault is None:
        return values, None
    marks = [np.zeros(value.shape, np.bool_) if missing is None else missing.where for value, missing in boxes]
    return values, fault.at(np.concatenate(marks, axis=1)[:, :columns])


class SharedBuffer:
    """One allocation of a program."""

    def __init__(self, name: str, kind: Type, ctas: int, findings: Findings, allocation: int = 0) -> None:
        self.name, self.findings, self.allocation = name, findings, allocation  # the uid of its op
        self.nbytes = math.prod(kind.shape or ()) * kind.itemsize
        self.data = np.full((ctas, self.nbytes), POISON, np.uint8)
        self.written = np.zeros((ctas, self.nbytes), np.uint8)
        self.records: list[Access] = []
        self.views: list[MemDesc] = []
        self.fault: Finding | None = None  # of undefined values that were stored here
        self.barriers: dict[tuple[int, int], Any] = {}  # (cta, byte) -> Barrier
        self.first = 0  # offset in shared memory, if Triton may give buffers the same bytes
        self.rivals: list[SharedBuffer] = []  # then the program's buffers, including this one

    def settle(self, first: int, buffers: list[SharedBuffer]) -> None:
        """Place the buffer at byte `first` of shared memory and add it to a program's buffers."""
        buffers[:] = [each for each in buffers if each.allocation != self.allocation or each.records]
        buffers.append(self)
        self.first, self.rivals = first, buffers

    def root(self, kind: Type) -> MemDesc:
        """Return the view of the whole buffer."""
        dtype, shape = memory_dtype(kind.elem), kind.shape or ()
        arrays = [raw.view(dtype).reshape(raw.shape[0], *shape) for raw in (self.data, self.written)]
        return MemDesc(self, kind.elem, arrays[0], arrays[1])

    def touch(self, access: Access, clock: Clock) -> None:
        """Compare an access with the earlier ones and record it."""
        view = access.view
        if view.stray:
            self.reached_outside(view, access.place)
        for rival in self.rivals:
            if rival is not self:
                rival.records = [old for old in rival.records if not self._takes_over(access, clock, rival, old)]
        kept = []
        for old in self.records:
            if old.cta != access.cta or not (view is old.view or view.meets(old.view)):
                kept.append(old)
                continue
            ordered = old.lane == access.lane or clock.knows(old.lane, old.epoch)
            if access.writes or old.writes:
                if not ordered:
                    self._race(access, old)
                elif old.lane != access.lane:
                    self._fence(access, old, clock)
            covered = view is old.view or view.covers(old.view)
            if not (
                ordered and covered and (access.writes or (not old.writes and old.asynchronous is access.asynchronous))
            ):
                kept.append(old)
        kept.append(access)
        self.records = kept

    def _takes_over(self, new: Access, clock: Clock, rival: SharedBuffer, old: Access) -> bool:
        """Whether an access replaces one of a buffer with the same bytes; it must be ordered after that."""
        low, high = (rival.first - self.first + byte for byte in (old.view.low, old.view.high))
        if old.cta != new.cta or low >= new.view.high or new.view.low >= high:
            return False
        ordered = old.lane == new.lane or clock.knows(old.lane, old.epoch)
        if not ordered and (new.writes or old.writes):
            text = f"{new.place} {_verb(new)} {new.view.extent} of {self.named(new)} and {old.place} {_verb(old)} "
            text += f"{rival.named(old)}: Triton gives both the same bytes, and nothing orders the two"
            self.findings.add(Finding("Race", text, (new.place, old.place), self.name, (new.view.low, new.view.high)))
        return ordered and new.view.dense and new.view.low <= low and high <= new.view.high

    def reached_outside(self, view: MemDesc, place: Place) -> None:
        """Report the use of a tile that the buffer does not have."""
        self.findings.add(Finding("OutOfBounds", f"{place} reaches {view.stray}", (place,), self.name))

    def _race(self, new: Access, old: Access) -> None:
        text = (
            f"{new.place} {_verb(new)} {new.view.extent} of {self.named(new)}, "
            f"which {old.place} {_verb(old)}; nothing orders the two"
        )
        self.findings.add(self._conflict("Race", text, new, old))

    def _fence(self, new: Access, old: Access, clock: Clock) -> None:
        """Report that an access is ordered after an earlier one, but sees nothing of it for want of a fence."""
        crosses = old.writes and new.asynchronous and not old.asynchronous
        if not crosses or clock.knows(old.lane, old.epoch, SEEN):
            return
        text = (
            f"{new.place} reaches {self.named(new)} through the asynchronous proxy after {old.place} wrote it with "
            "ordinary stores; there is no fence_async_shared between the two"
        )
        role = new.place.role
        if role == old.place.role and (not old.hidden or self.stored_by(role)):
            self.findings.note(
                self._conflict("MissingFence", f"{text} (Triton 3.9 inserts one within a role)", new, old)
            )
        else:
            self.findings.add(self._conflict("MissingFence", text, new, old))

    def stored_by(self, role: str) -> bool:
        """Whether the compiler knows of a store of this role here: it puts a barrier and a fence before a read."""
        return any(old.writes and not old.hidden and old.place.role == role for old in self.records)

    def _conflict(self, kind: Kind, text: str, new: Access, old: Access) -> Finding:
        box = (max(new.view.low, old.view.low), min(new.view.high, old.view.high))
        return Finding(kind, text, (new.place, old.place), self.name, box)

    def named(self, access: Access) -> str:
        """Return the name of an access's buffer in messages."""
        return self.name if len(self.data) == 1 else f"{self.name} of CTA {access.cta}"

    def read(self, access: Access, clock: Clock) -> tuple[np.ndarray, Missing | None]:
        """Read the bits of a view; return them and which were never written."""
        missing = self.unwritten(access)
        self.touch(access, clock)
        return access.view.array[access.cta].reshape(access.view.shape), missing

    def unwritten(self, access: Access) -> Missing | None:
        """Return the elements of a view that were never written."""
        view = access.view
        if view.known[access.cta] or view.written[access.cta].all():
            view.known[access.cta] = True
            return None
        where = view.written[access.cta] != np.iinfo(view.written.dtype).max
        if not where.any():
            return None
        where = where.reshape(view.shape)
        if self.fault is not None:
            return Missing(where, self.fault)
        text = f"{access.place} reads {view.extent} of {self.named(access)}, which were never written"
        fault = Finding("UninitialisedRead", text, (access.place,), self.name, (view.low, view.high))
        return Missing(where, fault)

    def write(self, access: Access, clock: Clock, bits: Any, missing: Missing | None = None) -> None:
        """Store bits into a view, checked; those that are missing stay undefined."""
        self.touch(access, clock)
        view, cta = access.view, access.cta
        tile = view.array.shape[1:]
        view.array[cta] = np.reshape(bits, tile)
        if missing is not None:
            self.fault = missing.fault
            view.written[cta] = np.where(np.reshape(missing.where, tile), 0, np.iinfo(view.written.dtype).max)
            for each in self.views:
                each.known[cta] = False
        elif not view.known[cta]:
            view.written[cta] = np.iinfo(view.written.dtype).max
            view.known[cta] = True


class MemDesc:
    """A view of a shared buffer: [ctas, *shape] bits of elements of type `elem`.

    A reshape that is no NumPy view, such as one after a permutation, does not change the array: `folded` is the shape
    that users see, and no further view can be made.
    """

    __slots__ = ("_children", "array", "buffer", "dense", "elem", "folded", "high", "known", "low", "stray", "written")

    def __init__(self, buffer: SharedBuffer, elem: str, array: np.ndarray, written: np.ndarray) -> None:
        self.buffer, self.elem, self.array = buffer, elem, array
        marks = written.view(f"u{written.dtype.itemsize}") if written.dtype != np.bool_ else written
        self.written = marks
        start = array[0].__array_interface__["data"][0] - buffer.data.__array_interface__["data"][0]
        extent = sum((n - 1) * s for n, s in zip(array.shape[1:], array.strides[1:], strict=False)) + array.itemsize
        self.low, self.high = start, start + extent
        self.dense = extent == array[0].nbytes
        self.known = [False] * len(array)  # of each CTA: all has been written, or a read has been reported
        self._children: dict[Any, MemDesc] = {}
        buffer.views.append(self)
        self.stray = ""  # of a tile that the buffer does not have: which; it shows another one's bytes
        self.folded: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape[1:] if self.folded is None else self.folded

    @property
    def extent(self) -> str:
        """The place of this view in messages."""
        return f"bytes {self.low}..{self.high}"

    def meets(self, other: MemDesc) -> bool:
        """Whether the two views have a byte in common."""
        if self.low >= other.high or other.low >= self.high:
            return False
        if self.dense and other.dense:
            return True
        return bool(np.shares_memory(self.array[0], other.array[0]))

    def covers(self, other: MemDesc) -> bool:
        """Whether this view holds every byte of the other (False if unsure)."""
        return self.dense and self.low <= other.low and other.high <= self.high

    def outside(self, i: int) -> MemDesc:
        """Return tile `i`, which the buffer does not have: a fault only if something accesses it."""
        tiles = self.shape[0]
        child = MemDesc(self.buffer, self.elem, self.array[:, i % tiles], self.written[:, i % tiles])
        child.stray = self.stray or f"tile {i} of {self.buffer.name}, which has {tiles}"
        return child

    def derived(self, key: Any, change: Callable[[np.ndarray], np.ndarray], elem: str | None = None) -> MemDesc:
        """Return the view that `change` makes of the array; the same key gives the same object again."""
        child = self._children.get(key)
        if child is None:
            if self.folded is not None:
                raise SimulationError(f"{key[0]} of {self.buffer.name} after permuting and reshaping is not simulated")
            arrays = [change(array) for array in (self.array, self.written)]
            shape = arrays[0].shape[1:]
            folds = key[0] == "reshape" and not np.shares_memory(arrays[0], self.array)
            if folds:
                arrays = [self.array, self.written]
            if not np.shares_memory(arrays[0], self.array):
                raise SimulationError(f"{key[0]} of {self.buffer.name} {self.shape} is no view of its bytes")
            child = self._children[key] = MemDesc(self.buffer, elem or self.elem, arrays[0], arrays[1])
            child.folded = shape if folds else None
            child.stray = self.stray
        return child
