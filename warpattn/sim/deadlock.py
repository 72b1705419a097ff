"""The report of a deadlock: who waits for what, and who could still end it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from .errors import StopRun
from .findings import Finding
from .sync import BarrierWait, NamedWait, TasksWait

if TYPE_CHECKING:
    from .machine import Machine, Task


def deadlock(machine: Machine) -> NoReturn:
    """Report that nobody can go on, and end the run."""
    stuck = [task for task in machine.tasks if task.wait is not None]
    causes = [task for task in stuck if not isinstance(task.wait, TasksWait)] or stuck
    sentences = [_sentence(task, stuck) for task in causes[:6]]
    if len(causes) > 6:
        sentences.append(f"and {len(causes) - 6} more roles wait")
    first = causes[0].wait
    barrier, phase = "", None
    if isinstance(first, BarrierWait):
        barrier, phase = first.barrier.name, first.target - 1
    elif isinstance(first, NamedWait):
        barrier, phase = str(first.barrier.number), first.generation
    places = tuple(task.place() for task in causes)
    machine.findings.add(Finding("Deadlock", "; ".join(sentences), places, barrier=barrier, phase=phase))
    raise StopRun


def _sentence(task: Task, stuck: list[Task]) -> str:
    wait = task.wait
    assert wait is not None
    text = f"{task.place()} waits for {wait.describe()}"
    if not isinstance(wait, BarrierWait):
        return text
    by_role = {other.role: other for other in stuck}
    helpers = []
    for role, place in wait.barrier.arrivers.items():
        other = by_role.get(role)
        where = f"line {place.line}"
        if other is None:
            helpers.append(f"{role} (arrived at {where} before, has ended)")
        elif other is task:
            helpers.append(f"{role} itself (at {where})")
        else:
            helpers.append(f"{role} (at {where}, now waiting at line {other.place().line})")
    if helpers:
        return text + "; could still be arrived on by " + ", ".join(helpers)
    return text + "; nobody has ever arrived on it"
