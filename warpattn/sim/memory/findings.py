"""The findings of a run, each with its places: roles, source lines, buffer, bytes, barrier and phase."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..ir.locations import Frame

Kind = Literal[
    "Race",
    "Deadlock",
    "Livelock",
    "PhaseError",
    "PhaseRace",
    "UninitialisedRead",
    "OutOfBounds",
    "PendingAtExit",
    "NotReset",
    "MissingFence",
    "StepLimit",
    "AssertionFailed",
    "DivisionByZero",
]


class Place(NamedTuple):
    """Who did something, and where in the Python source: the innermost line first, then its callers."""

    role: str
    frames: tuple[Frame, ...]

    @property
    def line(self) -> int:
        """The innermost line; 0 if unknown."""
        return self.frames[0].line if self.frames else 0

    @property
    def short(self) -> str:
        """Role and line, without the file's folder."""
        return f"{self.role} at {self.frames[0].file.rsplit('/', 1)[-1]}:{self.line}" if self.frames else self.role

    def __str__(self) -> str:
        if not self.frames:
            return self.role
        callers = ", ".join(f"{frame.file.rsplit('/', 1)[-1]}:{frame.line}" for frame in self.frames[1:4])
        return f"{self.role} at {self.frames[0]}" + (f" (called from {callers})" if callers else "")


class Seen(NamedTuple):
    """Which runs of a sweep have a finding: the first schedule and seed that repeat it, and the number of runs."""

    schedule: str
    seed: int
    runs: int
    of: int

    def __str__(self) -> str:
        return f"schedule {self.schedule!r}, seed {self.seed}; in {self.runs} of {self.of} runs"


def many(count: int, noun: str) -> str:
    """Say a number of things: "1 finding", "2 findings"."""
    return f"{count} {noun}{'s' * (count != 1)}"


@dataclass
class Finding:
    """One fault. `places` are the accesses or waits that make it, the later one first."""

    kind: Kind
    message: str
    places: tuple[Place, ...] = ()
    buffer: str = ""
    box: tuple[int, int] | None = None  # bytes of the buffer (columns of tensor memory), first to one past the last
    barrier: str = ""
    phase: int | None = None
    count: int = field(default=1, compare=False)
    seen: Seen | None = field(default=None, compare=False)  # of a sweep

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(place.role for place in self.places)

    @property
    def lines(self) -> tuple[int, ...]:
        """Innermost source line of each place."""
        return tuple(place.line for place in self.places)

    def __str__(self) -> str:
        again = f" ({self.count} times)" if self.count > 1 else ""
        where = f" ({self.seen})" if self.seen is not None else ""
        return f"{self.kind}: {self.message}{again}{where}"


class Findings:
    """The findings of a run; the same fault at the same lines counts, but is listed once."""

    def __init__(self) -> None:
        self._found: dict[tuple, Finding] = {}
        self._notes: dict[tuple, Finding] = {}
        self.added = 0

    def add(self, finding: Finding) -> None:
        """Report a fault."""
        self.added += 1
        self._add(finding, self._found)

    def note(self, finding: Finding) -> None:
        """Report something that is no fault with the compiler in use."""
        self._add(finding, self._notes)

    def _add(self, finding: Finding, known: dict[tuple, Finding]) -> None:
        lines = tuple(place.frames for place in finding.places)
        roles = tuple(role.rpartition(" of ")[0] for role in finding.roles)
        key = (finding.kind, finding.buffer, finding.barrier.partition("[")[0], lines, roles)
        if key in known:
            known[key].count += 1
        else:
            known[key] = finding

    def listed(self) -> list[Finding]:
        return list(self._found.values())

    def notes(self) -> list[Finding]:
        return list(self._notes.values())
