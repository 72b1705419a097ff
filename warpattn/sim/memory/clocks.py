"""Vector clocks: what each role knows to have happened.

Every thread of control has a lane: a role of a program, the wgmma queue of a role, an asynchronous copy. A clock holds
four epochs for each lane that it knows: what happened before; which part of that the asynchronous proxy may see,
because of a fence; and for tensor memory, which part a fence has ordered before a signal, and what of this a fence
after the wait has let its role see. An access (lane, epoch) happened before a clock that holds at least that epoch.

A copy takes a lane that is free *for its issuer*: the issuer knows that the lane's last copy is over. So lanes stay
few, and none orders two copies that nothing else orders. A program's lanes are neighbours, and most programs learn
nothing of others: a clock has arrays for the lanes around its program's first. Other lanes are in blocks that clocks
share until one of them learns more. So the last of many programs costs about as much as the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

PRECEDING = 0  # the lane of the preceding launch, which any program may learn of
SEEN, SIGNALLED, ADMITTED = 1, 2, 3  # rows of a clock: by the asynchronous proxy; by the fences of tensor memory
_ROWS = 4
_CARRIED = slice(ADMITTED)  # rows that a role passes on: a fence after a wait is for its own role only
_STEP = 32
_NEAR = 1024  # lanes in a clock's own arrays
_FAR: Mapping[int, np.ndarray] = MappingProxyType({})

Blocks = Mapping[int, np.ndarray]  # number -> epochs of as many lanes; neither changes once it is made


class Clock:
    """What is known of each lane: `rows` are [4, lanes] epochs from lane `first` on; of others `far` and `far_seen`.
    Roles that share tensor memory are near."""

    __slots__ = ("far", "far_seen", "first", "preceded", "rows")

    def __init__(
        self, first: int, rows: np.ndarray, preceded: bool = False, far: Blocks = _FAR, far_seen: Blocks = _FAR
    ) -> None:
        self.first, self.rows, self.preceded, self.far, self.far_seen = first, rows, preceded, far, far_seen

    def copy(self) -> Clock:
        return Clock(self.first, self.rows.copy(), self.preceded, self.far, self.far_seen)

    def empty(self) -> Clock:
        """Make a clock of the same lanes that knows nothing."""
        return Clock(self.first, np.zeros_like(self.rows))

    def epoch(self, lane: int) -> int:
        """Return the current epoch of a lane of this program."""
        return int(self.rows[0, lane - self.first])

    def advance(self, lane: int) -> None:
        """Begin a new epoch of a lane of this program."""
        self.rows[0, lane - self.first] += 1

    def fence(self) -> None:
        """Let the asynchronous proxy see everything that is known."""
        self.rows[SEEN] = self.rows[0]
        self.far_seen = self.far

    def signal(self, lane: int) -> None:
        """Order what a lane of this program has done to tensor memory before its next arrival."""
        self.rows[SIGNALLED, lane - self.first] = self.rows[0, lane - self.first]

    def admit(self) -> None:
        """Let the role see what others have ordered before arrivals that it has learned of."""
        self.rows[ADMITTED] = self.rows[SIGNALLED]

    def admit_own(self, lane: int) -> None:
        """Let a product see what a lane of this program, its issuer, has done."""
        self.rows[ADMITTED, lane - self.first] = self.rows[0, lane - self.first]

    def synchronise(self) -> None:
        """Signal and admit all that is known."""
        self.rows[SIGNALLED:] = self.rows[0]

    def mark(self, lane: int, epoch: int, fenced: bool = True) -> None:
        """Learn of one epoch of a lane."""
        if lane == PRECEDING:
            self.preceded = True
            return
        at = lane - self.first
        if not 0 <= at < self.rows.shape[1]:
            if not self._cover(lane, lane + 1):
                self._join_row(lane, np.array([[epoch], [epoch if fenced else 0]], np.int32))
                return
            at = lane - self.first
        for row in self.rows[_CARRIED] if fenced else self.rows[:1]:
            if row[at] < epoch:
                row[at] = epoch

    def join(self, other: Clock) -> None:
        """Learn everything that another clock knows."""
        last = other.first + other.rows.shape[1]
        inside = other.first >= self.first and last <= self.first + self.rows.shape[1]
        if inside or self._cover(other.first, last):
            part = self.rows[_CARRIED, other.first - self.first : last - self.first]
            np.maximum(part, other.rows[_CARRIED], out=part)
        else:
            self._join_row(other.first, other.rows[: SEEN + 1])
        self.far, self.far_seen = _both(self.far, other.far), _both(self.far_seen, other.far_seen)
        self.preceded |= other.preceded

    def knows(self, lane: int, epoch: int, row: int = 0) -> bool:
        """Whether an epoch of a lane happened before (row SEEN, ADMITTED: and fences made it visible)."""
        at = lane - self.first
        if 0 <= at < self.rows.shape[1] and self.rows[row, at] >= epoch:
            return True
        block = (self.far_seen if row == SEEN else self.far).get(lane // _NEAR)
        if block is not None and block[lane % _NEAR] >= epoch:
            return True
        return lane == PRECEDING and self.preceded

    def known(self, lanes: np.ndarray, epochs: np.ndarray, fenced: bool = False) -> np.ndarray:
        """Do the same for many epochs."""
        at, row, far = lanes - self.first, self.rows[int(fenced)], self.far_seen if fenced else self.far
        inside = (at >= 0) & (at < len(row))
        found = inside & (row[np.where(inside, at, 0)] >= epochs)
        if far:
            numbers = lanes // _NEAR
            for number in np.unique(numbers[~found]).tolist():
                block = far.get(number)
                if block is not None:
                    found |= (numbers == number) & (block[lanes % _NEAR] >= epochs)
        return found | (lanes == PRECEDING) if self.preceded else found

    def covers(self, other: Clock) -> bool:
        """Whether everything that another clock knows happened before."""
        return other.preceded <= self.preceded and not other.since(self)

    def since(self, before: Clock) -> list[tuple[int, int]]:
        """List (lane, epoch) that this clock knows and an earlier one did not."""
        parts = [(self.first, self.rows[0])]
        parts += [(n * _NEAR, block) for n, block in self.far.items() if before.far.get(n) is not block]
        found: dict[int, int] = {}
        for first, row in parts:
            for at in np.flatnonzero(row > before._row(first, len(row))).tolist():
                found[first + at] = max(int(row[at]), found.get(first + at, 0))
        return list(found.items())

    def _row(self, first: int, length: int) -> np.ndarray:
        """Return what is known of `length` lanes from `first` on."""
        row = np.zeros(length, np.int32)
        for start, known in ((self.first, self.rows[0]), *((n * _NEAR, block) for n, block in self.far.items())):
            low, high = max(first, start), min(first + length, start + len(known))
            if low < high:
                part = row[low - first : high - first]
                np.maximum(part, known[low - start : high - start], out=part)
        return row

    def _cover(self, low: int, high: int) -> bool:
        """Make room for the lanes low..high; false if they are too far away."""
        first = min(self.first, low)
        last = max(self.first + self.rows.shape[1], first + -(-(high - first) // _STEP) * _STEP)
        if last - first > _NEAR:
            return False
        rows = np.zeros((_ROWS, last - first), np.int32)
        rows[:, self.first - first : self.first - first + self.rows.shape[1]] = self.rows
        self.first, self.rows = first, rows
        return True

    def _join_row(self, first: int, rows: np.ndarray) -> None:
        """Learn two rows of epochs [2, lanes] of far lanes, from one on."""
        found: tuple[dict, dict] = ({}, {})
        for number in range(first // _NEAR, (first + rows.shape[1] - 1) // _NEAR + 1):
            low, high = max(first, number * _NEAR), min(first + rows.shape[1], (number + 1) * _NEAR)
            for blocks, row in zip(found, rows, strict=True):
                block = blocks[number] = np.zeros(_NEAR, np.int32)
                block[low - number * _NEAR : high - number * _NEAR] = row[low - first : high - first]
        self.far, self.far_seen = _both(self.far, found[0]), _both(self.far_seen, found[1])


def _both(mine: Blocks, theirs: Blocks) -> Blocks:
    """The later epochs of two sets of blocks."""
    if mine is theirs or not theirs:
        return mine
    if not mine:
        return theirs
    joined = dict(mine)
    for number, block in theirs.items():
        own = joined.get(number)
        if own is not block:
            joined[number] = block if own is None else np.maximum(own, block)
    return joined


class Lanes:
    """Gives out lanes."""

    def __init__(self) -> None:
        self.count = PRECEDING + 1

    def new(self) -> int:
        self.count += 1
        return self.count - 1

    def clock(self) -> Clock:
        """Make an empty clock for a program that is about to get its first lane."""
        return Clock(self.count, np.zeros((_ROWS, _STEP), np.int32))


class Pool:
    """Lanes for asynchronous copies of one program."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._last: dict[int, int] = {}

    def take(self, clock: Clock) -> tuple[int, int]:
        """Return (lane, epoch) for a copy that is issued at `clock`."""
        for lane, epoch in self._last.items():
            if clock.knows(lane, epoch):
                self._last[lane] = epoch + 1
                return lane, epoch + 1
        lane = self._lanes.new()
        self._last[lane] = 1
        return lane, 1
