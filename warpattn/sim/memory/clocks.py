"""Vector clocks: what each role knows to have happened.

Every thread of control has a lane: a role of a program, the wgmma queue of a role, an asynchronous copy. A clock holds
two epochs for each lane that it knows: what has happened before, and what of it the asynchronous proxy may see, because
a fence came between. An access (lane, epoch) happened before a clock that holds at least that epoch.

A copy takes a lane that is free *for its issuer*: one whose last copy the issuer knows to be over. So lanes stay few,
and none orders two copies that nothing else orders. A program's lanes are neighbours, and most programs learn nothing
of others: a clock has room from its program's first lane on, and for earlier ones when it learns of them. So the last
of many programs costs what the first one does.
"""

from __future__ import annotations

import numpy as np

PRECEDING = 0  # the lane of the preceding launch, which any program may learn of
_STEP = 32


class Clock:
    """What is known of each lane: `rows` are [2, lanes] epochs from lane `first` on; nothing of the others."""

    __slots__ = ("first", "preceded", "rows")

    def __init__(self, first: int, rows: np.ndarray, preceded: bool = False) -> None:
        self.first, self.rows, self.preceded = first, rows, preceded

    def copy(self) -> Clock:
        return Clock(self.first, self.rows.copy(), self.preceded)

    def empty(self) -> Clock:
        """A clock of the same lanes that knows nothing."""
        return Clock(self.first, np.zeros_like(self.rows))

    def epoch(self, lane: int) -> int:
        """The epoch that a lane of this program is in."""
        return int(self.rows[0, lane - self.first])

    def advance(self, lane: int) -> None:
        """Begin a new epoch of a lane of this program."""
        self.rows[0, lane - self.first] += 1

    def fence(self) -> None:
        """The asynchronous proxy may see everything that is known."""
        self.rows[1] = self.rows[0]

    def mark(self, lane: int, epoch: int, fenced: bool = True) -> None:
        """Learn of one epoch of a lane."""
        if lane == PRECEDING:
            self.preceded = True
            return
        if not 0 <= lane - self.first < self.rows.shape[1]:
            self._cover(lane, lane + 1)
        column = self.rows[: 2 if fenced else 1, lane - self.first]
        np.maximum(column, epoch, out=column)

    def join(self, other: Clock) -> None:
        """Learn everything that another clock knows."""
        last = other.first + other.rows.shape[1]
        if other.first < self.first or last > self.first + self.rows.shape[1]:
            self._cover(other.first, last)
        part = self.rows[:, other.first - self.first : last - self.first]
        np.maximum(part, other.rows, out=part)
        self.preceded |= other.preceded

    def knows(self, lane: int, epoch: int, row: int = 0) -> bool:
        """Whether an epoch of a lane happened before (row 1: and a fence made it visible)."""
        at = lane - self.first
        if 0 <= at < self.rows.shape[1]:
            return bool(self.rows[row, at] >= epoch)
        return lane == PRECEDING and self.preceded

    def known(self, lanes: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """The same of many epochs at once."""
        at, row = lanes - self.first, self.rows[0]
        inside = (at >= 0) & (at < len(row))
        found = inside & (row[np.where(inside, at, 0)] >= epochs)
        return found | (lanes == PRECEDING) if self.preceded else found

    def covers(self, other: Clock) -> bool:
        """Whether everything that another clock knows happened before."""
        return other.preceded <= self.preceded and not other.since(self)

    def since(self, before: Clock) -> list[tuple[int, int]]:
        """(lane, epoch) of what this clock knows and an earlier one did not."""
        mine, theirs = self.rows[0], before.rows[0]
        if before.first != self.first or len(theirs) != len(mine):
            theirs = np.zeros_like(mine)
            low = max(self.first, before.first)
            high = min(self.first + len(mine), before.first + before.rows.shape[1])
            if low < high:
                theirs[low - self.first : high - self.first] = before.rows[0, low - before.first : high - before.first]
        new = np.flatnonzero(mine > theirs)
        return list(zip((new + self.first).tolist(), mine[new].tolist(), strict=True))

    def _cover(self, low: int, high: int) -> None:
        """Make room for the lanes low..high."""
        first = min(self.first, low)
        last = max(self.first + self.rows.shape[1], first + -(-(high - first) // _STEP) * _STEP)
        rows = np.zeros((2, last - first), np.int32)
        rows[:, self.first - first : self.first - first + self.rows.shape[1]] = self.rows
        self.first, self.rows = first, rows


class Lanes:
    """Gives out lanes."""

    def __init__(self) -> None:
        self.count = PRECEDING + 1

    def new(self) -> int:
        self.count += 1
        return self.count - 1

    def clock(self) -> Clock:
        """A clock that knows nothing, of a program that is about to get its first lane."""
        return Clock(self.count, np.zeros((2, _STEP), np.int32))


class Pool:
    """Lanes for asynchronous copies of one program."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._last: dict[int, int] = {}

    def take(self, clock: Clock) -> tuple[int, int]:
        """(lane, epoch) for a copy that is issued at `clock`."""
        for lane, epoch in self._last.items():
            if clock.knows(lane, epoch):
                self._last[lane] = epoch + 1
                return lane, epoch + 1
        lane = self._lanes.new()
        self._last[lane] = 1
        return lane, 1
