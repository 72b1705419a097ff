"""A resource with concurrent users, such as the banks of shared memory: each slice of time has a fixed capacity.

slice    │ 0 ··· 63 │ 64 ·· 127 │ 128 · 191 │
used     │ ████████ │ ███       │           │   the next request gets the free rest, from its start on
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

SLICE = 64.0  # cycles


class Drawn(NamedTuple):
    """When a request is finished, and the times at which the resource worked for it."""

    end: float
    pieces: list[tuple[float, float]]


class Bandwidth:
    """The used capacity of slices of time, in cycles of the whole resource."""

    def __init__(self) -> None:
        self.given: defaultdict[int, float] = defaultdict(float)

    def draw(self, when: float, cycles: float, rate: float = 1.0) -> Drawn:
        """Serve `cycles` of the whole resource from `when` on, at most `rate` of it at a time."""
        pieces: list[tuple[float, float]] = []
        time, left = when, cycles
        while left > 1e-6:
            number = int(time // SLICE)
            start, stop = number * SLICE, (number + 1) * SLICE
            free = SLICE - self.given[number]
            taken = min(left, free, rate * (stop - time))
            if taken > 1e-6:
                first = start + self.given[number]
                pieces.append((first, first + taken))
                self.given[number] += taken
                left -= taken
            time = stop if left > 1e-6 else min(stop, time + taken / min(rate, free / SLICE))
        return Drawn(time, pieces)
