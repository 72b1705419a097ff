"""Accesses by the warps of one role, between which the warps do not meet.

On a card, what one warp stores another one may load before or after, and Triton inserts barriers for shared memory
only, and not for assembly's stores there. So a load or store of global memory is compared with the last ones since an
operation that may have a barrier in it, and what reads shared memory with assembly's stores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from .findings import Finding, Place, many
from .global_memory import GlobalMemory
from .shared import Access, MemDesc

_KEPT = 64  # accesses that are compared at most


class Touched(NamedTuple):
    """An access: address and warp of each element, bytes of one."""

    addresses: np.ndarray
    owners: np.ndarray
    size: int
    writes: bool
    place: Place


class WarpAccesses:
    """The last accesses of a role, with their lowest and highest address."""

    def __init__(self) -> None:
        self._seen: deque[tuple[Touched, int, int]] = deque(maxlen=_KEPT)
        self._meeting = 0

    def add(self, memory: GlobalMemory, new: Touched, meeting: int) -> None:
        """Compare an access with those before it; `meeting`: how often the warps may have met."""
        if meeting != self._meeting:
            self._seen.clear()
            self._meeting = meeting
        if not new.addresses.size:
            return
        low, high = int(new.addresses.min()), int(new.addresses.max())
        for old, first, last in self._seen:
            if (new.writes or old.writes) and new.size == old.size and first <= high and low <= last:
                _compare(memory, new, old)
        self._seen.append((new, low, high))


class AssemblyStores:
    """What the warps of a role have stored to shared memory by assembly since they may have met."""

    def __init__(self) -> None:
        self.seen: list[Access] = []
        self._meeting = 0

    def add(self, access: Access, meeting: int) -> None:
        """Note a store; `meeting`: `Meetings.anyway`."""
        self._forget(meeting)
        self.seen.append(access)

    def check(self, operands: Iterable[Any], place: Place, meeting: int) -> None:
        """Report an operation of the role that reads such bytes, unless Triton puts a barrier before it."""
        views = [view for view in operands if isinstance(view, MemDesc)]
        self._forget(meeting)
        if any(view.buffer.stored_by(place.role) for view in views):
            self.seen.clear()
        for old in self.seen:
            for view in views:
                if view.buffer is old.view.buffer and view.meets(old.view):
                    text = f"{place} reads {view.extent} of {view.buffer.name}, which the warps write by assembly at "
                    text += f"{old.place}; no barrier of the role is between the two (gl.barrier)"
                    view.buffer.findings.add(Finding("Race", text, (place, old.place), view.buffer.name))

    def _forget(self, meeting: int) -> None:
        if meeting != self._meeting:
            self.seen.clear()
            self._meeting = meeting


def _compare(memory: GlobalMemory, new: Touched, old: Touched) -> None:
    order = np.argsort(old.addresses)
    found = np.searchsorted(old.addresses, new.addresses, sorter=order)
    at = order[np.minimum(found, len(order) - 1)]
    bad = np.flatnonzero((old.addresses[at] == new.addresses) & (old.owners[at] != new.owners))
    buffer = memory.find(int(new.addresses[bad[0]])) if bad.size else None
    if buffer is not None:
        verbs = ["writes" if each.writes else "reads" for each in (new, old)]
        text = f"{new.place} {verbs[0]} {many(bad.size, 'element')} of {buffer.name} that another warp of the role "
        text += f"{verbs[1]} at {old.place}; no barrier of the role is between the two (gl.barrier, tl.debug_barrier)"
        memory.findings.add(Finding("Race", text, (new.place, old.place), buffer.name))
