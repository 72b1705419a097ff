"""Runs one launch many times: under every schedule, under `random` with several seeds, always from the same memory.

A wrong kernel may be right under most orders, so one run proves little. The findings of a sweep are those of all its
runs, each once, with the first schedule and seed that show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

from .errors import SimulationError
from .machine.agents import SCHEDULES
from .machine.progress import silent
from .memory.findings import Finding, Seen
from .options import Order, is_integer
from .report import Report
from .saved import SavedMemory


def orders_of(schedules: str | Sequence[str], seeds: int | Sequence[int]) -> tuple[Order, ...]:
    """Return the orders of runs: "all" schedules, one or several; `random` once per seed (a count or a list)."""
    listed = SCHEDULES if schedules == "all" else (schedules,) if isinstance(schedules, str) else schedules
    if not isinstance(listed, Sequence) or not listed:
        raise SimulationError(f"schedules is {schedules!r}; it must be 'all' or of {', '.join(SCHEDULES)}")
    for name in listed:
        if name not in SCHEDULES:
            raise SimulationError(f"schedules has {name!r}; it must be 'all' or of {', '.join(SCHEDULES)}")
    drawn = range(seeds) if is_integer(seeds) else seeds
    if not isinstance(drawn, Sequence) or not drawn or not all(map(is_integer, drawn)):
        raise SimulationError(f"seeds is {seeds!r}; it must be an integer from 1 on, or a list of seeds")
    return tuple(Order(name, seed) for name in listed for seed in (drawn if name == "random" else (0,)))


def sweep(orders: Sequence[Order], run: Callable[[Order, bool], Report], memory: Iterable[Any] = ()) -> Report:
    """Merge the reports of a run under each order; `run(order, whether it is the first)` makes one.

    memory: tensors that are restored before each run. The first order runs last, so that its results stay, and only it
    prints.
    """
    saved = SavedMemory(memory) if len(orders) > 1 else None
    reports = []
    for number, order in reversed(list(enumerate(orders))):
        with redirect_stdout(StringIO()) if number else nullcontext():
            reports.append(run(order, number == 0))
        if saved is not None and number:
            saved.restore()
    return merged(reports[::-1])


def merged(reports: Sequence[Report]) -> Report:
    """Merge reports of several runs: each finding and note once, with the first run that shows it."""
    first = reports[0]
    return replace(
        first,
        programs=next((report.programs for report in reports if report.findings), first.programs),
        findings=_distinct(reports, [report.findings for report in reports]),
        notes=_distinct(reports, [report.notes for report in reports]),
        steps=sum(report.steps for report in reports),
        seconds=sum(report.seconds for report in reports),
        runs=tuple(reports),
    )


def _distinct(reports: Sequence[Report], listed: Sequence[Sequence[Finding]]) -> list[Finding]:
    """List each finding of several runs once."""
    runs: dict[Any, list[int]] = {}
    found: dict[Any, Finding] = {}
    for number, findings in enumerate(listed):
        for finding in findings:
            key = finding.kind, finding.buffer, finding.lines
            found.setdefault(key, finding)
            if number not in runs.setdefault(key, []):
                runs[key].append(number)
    return [replace(finding, seen=_seen(reports, runs[key])) for key, finding in found.items()]


def _seen(reports: Sequence[Report], numbers: Sequence[int]) -> Seen:
    first = reports[numbers[0]]
    return Seen(first.schedule, first.seed, len(numbers), len(reports))


__all__ = ["SCHEDULES", "Order", "merged", "orders_of", "silent", "sweep"]
