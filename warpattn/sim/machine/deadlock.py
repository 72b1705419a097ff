"""Reports a deadlock or a livelock: which role waits for what, and which lines could still arrive.

A livelock is found exactly: every role waits in vain or has done one round of a loop without changing its own values or
state that a role could see (`Run.state`), so it repeats that for ever.
"""

from __future__ import annotations

from typing import NoReturn

from ..errors import StopRun
from ..memory.findings import Finding, many
from .arrivals import arriving_ops
from .roles import Role, RolesEnd, Run
from .sync import BarrierWait, NamedWait


def deadlock(run: Run) -> NoReturn:
    """Report that no role can continue, and end the run."""
    stuck = [role for role in run.roles if role.wait is not None]
    causes = [role for role in stuck if not isinstance(role.wait, RolesEnd)] or stuck
    sentences = [_sentence(role, run) for role in causes[:6]]
    if len(causes) > 6:
        sentences.append(f"and {len(causes) - 6} more roles wait")
    first = causes[0].wait
    barrier, phase = "", None
    if isinstance(first, BarrierWait):
        barrier, phase = first.barrier.name, first.target - 1
    elif isinstance(first, NamedWait):
        barrier, phase = str(first.barrier.number), first.generation
    places = tuple(role.place() for role in causes)
    run.findings.add(Finding("Deadlock", "; ".join(sentences), places, barrier=barrier, phase=phase))
    raise StopRun


def livelock(run: Run) -> NoReturn:
    """Report that roles only repeat loops that change nothing, and end the run."""
    text = f"nothing changes any more: {run.whereabouts()}"
    if run.waiting:
        waiting = many(len(run.waiting), "program")
        text += f"; in_flight lets no more run side by side, so {waiting} did not start"
    run.findings.add(Finding("Livelock", text, tuple(role.at() for role in run.roles)))
    raise StopRun


def _sentence(role: Role, run: Run) -> str:
    wait = role.wait
    assert wait is not None
    text = f"{role.place()} waits for {wait.describe()}"
    if not isinstance(wait, BarrierWait):
        return text
    helpers = _helpers(role, wait, run)
    if helpers:
        return text + "; could still be arrived on by " + ", ".join(helpers)
    return text + "; nothing in the kernel arrives on it"


def _helpers(role: Role, wait: BarrierWait, run: Run) -> list[str]:
    """List the roles with lines that arrive on a barrier, and where each role is."""
    roles = {other.name: other for other in run.roles}
    lines: dict[str, list[str]] = {}
    for region, op in arriving_ops(run.module, wait.barrier.allocation):
        line = str(op.frames[0].line) if op.frames else "?"
        for name in role.program.cluster.names:
            found = lines.setdefault(run.role_names.get(region, run.module.entry) + name, [])
            if line not in found:
                found.append(line)
    helpers = []
    for name, places in lines.items():
        where = f"line{'s' if len(places) > 1 else ''} {', '.join(places)}"
        other = roles.get(name)
        if other is None:
            helpers.append(f"{name} ({where}), which has ended")
        elif other is role:
            helpers.append(f"{name} itself ({where})")
        else:
            helpers.append(f"{name} ({where}), which waits at line {other.place().line}")
    return helpers
