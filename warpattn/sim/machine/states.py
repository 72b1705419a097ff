"""The state of programs at a run's end: each role's last operations, what it waits for, and each barrier's phase."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..ir.locations import Frame
from .sync import Barrier

LAST = 12  # operations of a role
KEPT = 8  # programs of a run: the first, and those with findings


class Event(NamedTuple):
    """An operation of a role, with the run's step number."""

    step: int
    op: str
    frames: tuple[Frame, ...]


class RoleState(NamedTuple):
    """A role at the end of the run: whether it has ended, else what it waits for, and its last operations."""

    role: str
    ended: bool
    waits: str
    events: tuple[Event, ...]


class BarrierState(NamedTuple):
    """A barrier at the end of the run, in its current phase: arrivals and bytes that it has and needs."""

    name: str
    live: bool
    phase: int
    arrived: int
    count: int
    landed: int
    expected: int


class ProgramState(NamedTuple):
    """A CTA of a program of the grid."""

    index: tuple[int, int, int]
    cta: int
    roles: tuple[RoleState, ...]
    barriers: tuple[BarrierState, ...]


class Ended(NamedTuple):
    """A role that has ended, with (step, op) of its last operations."""

    role: str
    last: tuple[tuple[int, Any], ...]

    def state(self) -> RoleState:
        """Return its state for a report."""
        return RoleState(self.role, True, "", _listed(self.last))


def _listed(last: Iterable[tuple[int, Any]]) -> tuple[Event, ...]:
    return tuple(Event(step, op.name, op.frames) for step, op in last)


def _running(role: Any) -> RoleState:
    """Return a role's current state."""
    return RoleState(role.name, False, "" if role.wait is None else role.wait.describe(), _listed(role.events))


def keep(run: Any, program: Any) -> None:
    """Keep a program for the report, when one of its roles ends, if it is the first or has findings."""
    new = not run.kept or run.findings.added != program.findings_before
    if new and len(run.kept) < KEPT and program not in run.kept:
        run.kept.append(program)


def states(run: Any) -> tuple[ProgramState, ...]:
    """Return the states of kept programs, and of those that have not ended."""
    running: dict[int, list[RoleState]] = {}
    programs = {id(program): program for program in run.kept}
    for role in run.roles:
        if id(role.program) in programs or len(programs) < 2 * KEPT:
            programs.setdefault(id(role.program), role.program)
            running.setdefault(id(role.program), []).append(_running(role))
    return tuple(
        ProgramState(
            program.index,
            program.cta,
            (*running.get(key, ()), *(ended.state() for ended in program.ended)),
            tuple(map(_barrier, program.barriers)),
        )
        for key, program in programs.items()
    )


def _barrier(barrier: Barrier) -> BarrierState:
    b = barrier
    return BarrierState(b.name, b.live, b.phase, b.count - b.pending, b.count, b.landed, b.expected)
