"""Accesses of global memory by the warps of one role, between which the warps do not meet.

On a card, what one warp stores another one may load before or after, and Triton inserts barriers for shared memory
only. So a load or store is compared with the last ones since an operation that may have a barrier in it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from .findings import Finding, Place, many
from .global_memory import GlobalMemory

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
