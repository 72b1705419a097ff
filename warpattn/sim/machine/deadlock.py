"""Reports a deadlock or a livelock: which role waits for what, and which lines could still arrive.

A livelock is found exactly: every role waits in vain or has done one round of a loop without changing its own values or
state that a role could see (`Run.state`), so it repeats that for ever.
"""

from __future__ import annotations

from typing import NoReturn

from ..errors import StopRun
from ..memory.findings import Finding, many
from .arrivals import arriving_ops
from .roles import Run, Task, TasksWait
from .sync import BarrierWait, NamedWait


def deadlock(run: Run) -> NoReturn:
    """Report that no role can continue, and end the run."""
    stuck = [task for task in run.tasks if task.wait is not None]
    causes = [task for task in stuck if not isinstance(task.wait, TasksWait)] or stuck
    sentences = [_sentence(task, run) for task in causes[:6]]
    if len(causes) > 6:
        sentences.append(f"and {len(causes) - 6} more roles wait")
    first = causes[0].wait
    barrier, phase = "", None
    if isinstance(first, BarrierWait):
        barrier, phase = first.barrier.name, first.target - 1
    elif isinstance(first, NamedWait):
        barrier, phase = str(first.barrier.number), first.generation
    places = tuple(task.place() for task in causes)
    run.findings.add(Finding("Deadlock", "; ".join(sentences), places, barrier=barrier, phase=phase))
    raise StopRun


def livelock(run: Run) -> NoReturn:
    """Report that roles only repeat loops that change nothing, and end the run."""
    text = f"nothing changes any more: {run.whereabouts()}"
    if run.waiting:
        waiting = many(len(run.waiting), "program")
        text += f"; in_flight lets no more run side by side, so {waiting} did not start"
    run.findings.add(Finding("Livelock", text, tuple(task.at() for task in run.tasks)))
    raise StopRun


def _sentence(task: Task, run: Run) -> str:
    wait = task.wait
    assert wait is not None
    text = f"{task.place()} waits for {wait.describe()}"
    if not isinstance(wait, BarrierWait):
        return text
    helpers = _helpers(task, wait, run)
    if helpers:
        return text + "; could still be arrived on by " + ", ".join(helpers)
    return text + "; nothing in the kernel arrives on it"


def _helpers(task: Task, wait: BarrierWait, run: Run) -> list[str]:
    """List the roles with lines that arrive on a barrier, and where each role is."""
    tasks = {other.role: other for other in run.tasks}
    lines: dict[str, list[str]] = {}
    for region, op in arriving_ops(run.module, wait.barrier.allocation):
        line = str(op.frames[0].line) if op.frames else "?"
        for name in task.program.cluster.names:
            found = lines.setdefault(run.roles.get(region, run.module.entry) + name, [])
            if line not in found:
                found.append(line)
    helpers = []
    for role, places in lines.items():
        where = f"line{'s' if len(places) > 1 else ''} {', '.join(places)}"
        other = tasks.get(role)
        if other is None:
            helpers.append(f"{role} ({where}), which has ended")
        elif other is task:
            helpers.append(f"{role} itself ({where})")
        else:
            helpers.append(f"{role} ({where}), which waits at line {other.place().line}")
    return helpers
