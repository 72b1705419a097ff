"""Events that roles wait for: mbarriers, named barriers, asynchronous work, other roles.

An mbarrier counts phases. A phase completes when its pending arrivals are zero and as many bytes have landed as were
expected; completion starts the next phase. `wait(parity)` passes unless the phase with that parity is the current one.

So a parity only distinguishes the current phase from the last one. A wait sees the same phase in every run if

    phase n−1 completes  ─▶  wait for phase n  ─▶  phase n+1 completes

are ordered; otherwise the wait may pass at once, on phase n−2, or miss two phases and keep waiting: a phase race. A use
that is not ordered after the initialisation, or before the invalidation, is one, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from ..memory.clocks import Clock
from ..memory.findings import Finding, Findings, Place
from .agents import Agent

T = TypeVar("T")


class Participant(Protocol):
    """A role, as barriers see it: its lane, its clock and where it is."""

    lane: int
    clock: Clock

    def place(self) -> Place:
        """Return where it is."""
        ...

    def advance(self) -> None:
        """Begin a new epoch."""
        ...

    def learn(self, other: Clock | None) -> None:
        """Add the knowledge of `other`."""
        ...


class Use(NamedTuple):
    """When and where a barrier was used: the lane and epoch by which clocks know it, and the place."""

    lane: int
    epoch: int
    place: Place

    @classmethod
    def now(cls, role: Participant) -> Use:
        """Describe a use at this moment."""
        return cls(role.lane, role.clock.epoch(role.lane), role.place())

    def known_to(self, clock: Clock) -> bool:
        """Whether it happened before what a clock describes."""
        return clock.knows(self.lane, self.epoch)


class Barrier:
    """One mbarrier in shared memory."""

    def __init__(self, name: str, findings: Findings, allocation: int = 0) -> None:
        self.name, self.findings, self.allocation = name, findings, allocation
        self.live = False
        self.count = self.pending = self.expected = self.landed = self.phase = 0
        self.collected: Clock | None = None  # what this phase's arrivals know
        self.released: Clock | None = None  # what a waiter on a completed phase learns
        self._past: dict[int, Clock] = {}  # what the waiters on each of the last two completed phases learn
        self._waits: dict[tuple[int, int], Use] = {}  # (lane, phase) -> the lane's last wait for it
        self._begun: Use | None = None  # the initialisation, if all users must be ordered after it

    def init(self, count: int, role: Participant, alone: bool = True) -> None:
        """Begin to count; `alone`: no other CTA takes part, so every user must be ordered after it."""
        place = role.place()
        if self.live:
            self._fault(f"{place} initialises barrier {self.name}, which is initialised already", place)
        self.live = True
        self.count = self.pending = count
        self.expected = self.landed = self.phase = 0
        self.collected = self.released = None
        self._past.clear()
        self._waits.clear()
        self._begun = Use.now(role) if alone else None

    def invalidate(self, role: Participant) -> None:
        place = role.place()
        if not self.live:
            self._fault(f"{place} invalidates barrier {self.name}, which is not initialised", place)
        elif self.expected != self.landed:
            self._fault(f"{place} invalidates barrier {self.name} while {self.missing} bytes are under way", place)
        else:
            self._check_over(role)
        self.live = False

    def _check_over(self, role: Participant) -> None:
        """Check that all arrivals and waits are over when a role invalidates the barrier."""
        text = f"{role.place()} invalidates barrier {self.name}, and nothing orders that after "
        for (_, phase), wait in self._waits.items():
            if not wait.known_to(role.clock):
                ended = f"{text}the wait of {wait.place} for {_spelled(phase)}"
                self._misplaced(ended, (role.place(), wait.place), phase)
        if any(known is not None and not role.clock.covers(known) for known in (self.collected, self.released)):
            self._misplaced(f"{text}all arrivals", (role.place(),), self.phase)

    def usable(self, place: Place, verb: str, clock: Clock) -> bool:
        """Whether the barrier is live for a user with the knowledge in `clock`."""
        if not self.live:
            self._fault(f"{place} {verb} barrier {self.name}, which is not initialised", place)
        elif self._begun is not None and not self._begun.known_to(clock):
            begun = self._begun.place
            text = f"{place} {verb} barrier {self.name}, and nothing orders that after {begun} initialises it"
            self._misplaced(text, (place, begun), self.phase)
        return self.live

    @property
    def missing(self) -> int:
        """Return the bytes that are expected and have not landed."""
        return self.expected - self.landed

    def arrive(self, arrivals: int, clock: Clock, place: Place) -> None:
        """Count arrivals of a role, which release what it knows."""
        if not self.usable(place, "arrives on", clock):
            return
        self._arrive(arrivals, clock, place)

    def _arrive(self, arrivals: int, clock: Clock, place: Place) -> None:
        if arrivals > self.pending:
            text = f"{place} arrives {arrivals} times on barrier {self.name}, whose phase needs {self.pending} more"
            self._fault(text, place)
            arrivals = self.pending
        self.pending -= arrivals
        self.collected = _added(self.collected, clock)
        self._advance(place)

    def expect(self, nbytes: int) -> None:
        self.expected += nbytes

    def follow(self, arrivals: int, role: Participant) -> None:
        """Let the phase need more arrivals: those of copies under way."""
        if self.usable(role.place(), "counts copies on", role.clock):
            self.pending += arrivals

    def arrive_after(self, arrivals: int, copies: list[Agent], before: Clock | None, agent: Agent) -> None:
        """Count arrivals after finished copies: they release what these wrote, and what happened `before` the last was
        issued, including the role's waits, but not what the role has done since."""
        known = agent.clock.empty() if before is None else before.copy()
        for copy in copies:
            known.mark(copy.lane, copy.epoch, fenced=False)
        if self.usable(agent.place, "arrives on", agent.clock):
            self._arrive(arrivals, known, agent.place)

    def land(self, nbytes: int, agent: Agent) -> None:
        """Count landed bytes of a copy."""
        if not self.usable(agent.place, "completes bytes on", agent.clock):
            return
        self.landed += nbytes
        if self.collected is None:
            self.collected = agent.clock.empty()
        self.collected.mark(agent.lane, agent.epoch)
        self._advance(agent.place)

    def awaited(self, parity: int, role: Participant) -> int:
        """Note a role's wait for the phase of this parity, the current one or the last; return the phase."""
        phase, place = self.phase - ((self.phase ^ parity) & 1), role.place()
        before = self._past.get(phase - 1)
        if before is not None and not role.clock.covers(before):
            text = f"{place} waits for {_spelled(phase)} of barrier {self.name}, and nothing orders it after the end of"
            text += f" phase {phase - 1}: on the card it may pass at once, as if {_spelled(phase - 2)} were meant"
            self._misplaced(text, (place,), phase)
        self._waits[role.lane, phase] = Use.now(role)
        return phase

    def _advance(self, place: Place) -> None:
        if self.pending or self.expected != self.landed or not self.live:
            return
        self._check_waits(place)
        self.phase += 1
        self.pending = self.count
        self.expected = self.landed = 0
        if self.collected is not None:
            if self.released is not None:
                self.collected.join(self.released)
            self.released = self.collected
        if self.released is not None:
            self._past[self.phase - 1] = self.released
        self._past.pop(self.phase - 3, None)
        self.collected = None

    def _check_waits(self, place: Place) -> None:
        """Check that waits for the previous phase are over when the current one completes at `place`."""
        for (lane, phase), wait in list(self._waits.items()):
            if phase == self.phase:
                continue
            del self._waits[lane, phase]
            if self.collected is None or not wait.known_to(self.collected):
                text = f"{wait.place} waits for {_spelled(phase)} of barrier {self.name}, and nothing orders the end of"
                text += f" phase {self.phase} by {place} after that: on the card the wait may miss both"
                self._misplaced(text, (wait.place, place), phase)

    def _misplaced(self, text: str, places: tuple[Place, ...], phase: int) -> None:
        self.findings.add(Finding("PhaseRace", text, places, barrier=self.name, phase=phase))

    def _fault(self, text: str, place: Place) -> None:
        self.findings.add(Finding("PhaseError", text, (place,), barrier=self.name, phase=self.phase))


def _spelled(phase: int) -> str:
    return f"phase {phase}" if phase >= 0 else "the phase before the first"


class NamedBarrier:
    """A hardware barrier `bar.sync id, threads`: completes when that many threads have arrived."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.arrived = self.needed = self.generation = 0
        self.collected: Clock | None = None
        self.released: Clock | None = None

    def follows(self, clock: Clock) -> bool:
        """Whether everyone who completed the barrier last had arrived before."""
        return self.released is None or clock.covers(self.released)

    def arrive(self, threads: int, needed: int, clock: Clock) -> bool:
        """Count `threads` more arrivals; False if that exceeds what the barrier takes."""
        fits, self.needed = self.arrived + threads <= needed, needed
        self.arrived += threads
        self.collected = _added(self.collected, clock)
        if self.arrived >= needed:
            self.arrived = 0
            self.generation += 1
            self.released, self.collected = self.collected, None
        return fits


def _added(collected: Clock | None, clock: Clock) -> Clock:
    """Add one more arrival's knowledge to that of others."""
    if collected is None:
        return clock.copy()
    collected.join(clock)
    return collected


def all_but_newest(items: list[T], allowed: int) -> list[T]:
    """Return the items, oldest first, covered by a wait that leaves at most `allowed` under way."""
    return items[: max(0, len(items) - allowed)]


class Wait:
    """The event that a blocked role waits for."""

    def ready(self) -> bool:
        raise NotImplementedError

    def describe(self) -> str:
        raise NotImplementedError


class BarrierWait(Wait):
    """A phase of an mbarrier."""

    def __init__(self, barrier: Barrier) -> None:
        self.barrier, self.target = barrier, barrier.phase + 1

    def ready(self) -> bool:
        return self.barrier.phase >= self.target or not self.barrier.live

    def describe(self) -> str:
        b = self.barrier
        text = (
            f"barrier {b.name}, parity {(self.target - 1) & 1} (phase {self.target - 1}; {b.phase} phases are complete)"
        )
        text += f"; it has {b.count - b.pending} of {b.count} arrivals"
        if b.expected or b.landed:
            text += f" and {b.landed} of {b.expected} bytes"
        return text


class NamedWait(Wait):
    """A generation of a named barrier."""

    def __init__(self, barrier: NamedBarrier, needed: int) -> None:
        self.barrier, self.needed, self.generation = barrier, needed, barrier.generation

    def ready(self) -> bool:
        return self.barrier.generation > self.generation

    def describe(self) -> str:
        return f"named barrier {self.barrier.number}; {self.barrier.arrived} of {self.needed} threads have arrived"


class AgentWait(Wait):
    """Asynchronous work of the role itself."""

    def __init__(self, agents: Sequence[Agent], what: str) -> None:
        self.agents, self.what = agents, what

    def ready(self) -> bool:
        return all(agent.done for agent in self.agents)

    def describe(self) -> str:
        return self.what
