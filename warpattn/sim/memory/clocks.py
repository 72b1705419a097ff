"""Vector clocks: what each role knows to have happened.

Every thread of control has a lane: a role of a program, the wgmma queue of a role, an asynchronous copy. A clock is a
[2, lanes] array of epochs: row 0 says what has happened before, row 1 what of it the asynchronous proxy may see,
because a fence came between. An access (lane, epoch) happened before a clock that holds at least that epoch.

A copy takes a lane that is free *for its issuer*: one whose last copy the issuer knows to be over. So lanes stay few,
and none orders two copies that nothing else orders.
"""

from __future__ import annotations

import numpy as np

Clock = np.ndarray
_STEP = 64


class Lanes:
    """Gives out lanes and remembers their last epochs."""

    def __init__(self) -> None:
        self.count = 0
        self.names: list[str] = []

    def new(self, name: str) -> int:
        self.names.append(name)
        self.count += 1
        return self.count - 1

    def clock(self) -> Clock:
        """A clock that knows nothing."""
        return np.zeros((2, (self.count // _STEP + 1) * _STEP), np.int32)


class Pool:
    """Lanes for asynchronous copies of one program."""

    def __init__(self, lanes: Lanes, name: str) -> None:
        self._lanes, self._name = lanes, name
        self._last: dict[int, int] = {}

    def take(self, clock: Clock) -> tuple[int, int]:
        """(lane, epoch) for a copy that is issued at `clock`."""
        known = clock[0]
        for lane, epoch in self._last.items():
            if lane < len(known) and known[lane] >= epoch:
                self._last[lane] = epoch + 1
                return lane, epoch + 1
        lane = self._lanes.new(self._name)
        self._last[lane] = 1
        return lane, 1


def joined(mine: Clock, other: Clock) -> Clock:
    """`mine` with everything that `other` knows; in place where it fits."""
    if mine.shape[1] < other.shape[1]:
        mine = widened(mine, other.shape[1])
    part = mine[:, : other.shape[1]]
    np.maximum(part, other, out=part)
    return mine


def widened(clock: Clock, lanes: int) -> Clock:
    """A copy of a clock with room for at least `lanes` lanes."""
    wide = np.zeros((2, -(-max(lanes, clock.shape[1]) // _STEP) * _STEP), np.int32)
    wide[:, : clock.shape[1]] = clock
    return wide


def marked(clock: Clock, lane: int, epoch: int, fenced: bool = True) -> Clock:
    """`clock` with the knowledge of one epoch of a lane; in place where it fits."""
    if lane >= clock.shape[1]:
        clock = widened(clock, lane + 1)
    column = clock[: 2 if fenced else 1, lane]
    np.maximum(column, epoch, out=column)
    return clock


def knows(clock: Clock, lane: int, epoch: int, row: int = 0) -> bool:
    """Whether an epoch of a lane happened before the clock (row 1: and a fence made it visible)."""
    return lane < clock.shape[1] and bool(clock[row, lane] >= epoch)


def covers(clock: Clock, other: Clock) -> bool:
    """Whether everything that `other` knows happened before the clock."""
    lanes = min(clock.shape[1], other.shape[1])
    return bool((clock[0, :lanes] >= other[0, :lanes]).all()) and not other[0, lanes:].any()
