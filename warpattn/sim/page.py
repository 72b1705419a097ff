"""Writes reports as JSON or one HTML page: findings with source lines, barriers, and roles' last operations."""

from __future__ import annotations

import json
import linecache
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from .errors import SimulationError
from .ir.locations import Frame
from .machine.states import ProgramState, RoleState
from .memory.findings import Finding, Place, many


class Reported(Protocol):
    """The part of `report.Report` that a page needs."""

    kernel: str
    grid: tuple[int, ...]
    schedule: str
    seed: int
    steps: int
    findings: list[Finding]
    notes: list[Finding]
    programs: tuple[ProgramState, ...]

    @property
    def runs(self) -> Sequence[Reported]:
        """The report of each run of a sweep."""
        ...


_AROUND = 2  # lines to show before and after a finding's
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --found: #c62828; --right: #2e7d32; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
table { border-collapse: collapse; margin: .5rem 0; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .2rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; }
pre { background: var(--soft); padding: .5rem .7rem; overflow-x: auto; margin: .3rem 0; }
code, pre { font: 13px/1.45 ui-monospace, monospace; } mark { background: #fd06; color: inherit; }
.finding { border-left: 4px solid var(--found); padding: .1rem 0 .1rem .9rem; margin: 1rem 0; }
.found { color: var(--found); } .right { color: var(--right); }
"""


def save(reports: Sequence[Reported], path: str | PathLike[str]) -> None:
    """Write the reports of some launches to a .json or .html file."""
    suffix = Path(path).suffix
    if suffix not in (".json", ".html"):
        raise SimulationError(f"the report's path is {str(path)!r}; write a name that ends with .html or .json")
    text = json.dumps([as_dict(report) for report in reports], indent=1) if suffix == ".json" else page(reports)
    Path(path).write_text(text, encoding="utf-8")


def as_dict(report: Reported) -> dict[str, Any]:
    """Convert a report to JSON values."""
    return {
        "kernel": report.kernel,
        "grid": list(report.grid),
        "runs": [
            {"schedule": run.schedule, "seed": run.seed, "steps": run.steps, "findings": len(run.findings)}
            for run in _runs(report)
        ],
        "findings": [_finding(finding) for finding in report.findings],
        "notes": [_finding(finding) for finding in report.notes],
        "programs": [_program(program) for program in report.programs],
    }


def _runs(report: Reported) -> Sequence[Reported]:
    return report.runs or (report,)


def _finding(finding: Finding) -> dict[str, Any]:
    places = [{"role": place.role, "lines": _lines(place.frames)} for place in finding.places]
    return {
        "kind": finding.kind, "message": finding.message, "count": finding.count, "places": places,
        "buffer": finding.buffer, "bytes": finding.box, "barrier": finding.barrier, "phase": finding.phase,
        "seen": None if finding.seen is None else finding.seen._asdict(),
    }  # fmt: skip


def _lines(frames: Iterable[Frame]) -> list[dict[str, Any]]:
    """List source lines, the innermost first, with their text."""
    return [{"file": f.file, "line": f.line, "text": linecache.getline(f.file, f.line).strip()} for f in frames]


def _program(program: ProgramState) -> dict[str, Any]:
    roles = [
        {
            "role": role.role,
            "ended": role.ended,
            "waits": role.waits,
            "events": [{"step": e.step, "op": e.op, "lines": _lines(e.frames[:1])} for e in role.events],
        }
        for role in program.roles
    ]
    barriers = [barrier._asdict() for barrier in program.barriers]
    return {"index": list(program.index), "cta": program.cta, "roles": roles, "barriers": barriers}


def page(reports: Sequence[Reported]) -> str:
    """Make one self-contained HTML page."""
    body = "".join(piece for report in reports for piece in _launch(report)) or "<p>No kernel was launched.</p>"
    title = "Simulated launches"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    head += f"<style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body><h1>{title}</h1>{body}</body></html>\n"


def _launch(report: Reported) -> Iterator[str]:
    grid = ", ".join(map(str, report.grid))
    found = many(len(report.findings), "finding") if report.findings else "no findings"
    mood = "found" if report.findings else "right"
    yield f"<h2>{escape(report.kernel)}[{grid}]: <span class={mood}>{found}</span></h2>"
    rows = [(r.schedule, r.seed, r.steps, len(r.findings)) for r in _runs(report)]
    yield _table(("schedule", "seed", "steps", "findings"), rows)
    for finding in report.findings:
        yield from _found(finding)
    for note in report.notes:
        yield f"<p>Note: {escape(str(note))}</p>"
    for program in report.programs:
        yield from _left(program)


def _found(finding: Finding) -> Iterator[str]:
    """A finding and its source lines."""
    yield f"<div class=finding><h3>{escape(finding.kind)}</h3><p>{escape(str(finding).partition(': ')[2])}</p>"
    for place in finding.places:
        yield from _source(place)
    yield "</div>"


def _source(place: Place) -> Iterator[str]:
    """Show the lines of a place with their neighbours, and one line for each caller."""
    for number, frame in enumerate(place.frames[:4]):
        around = _AROUND if number == 0 else 0
        lines = [(n, linecache.getline(frame.file, n)) for n in range(frame.line - around, frame.line + around + 1)]
        text = "".join(_numbered(n, line, n == frame.line) for n, line in lines if line)
        what = escape(place.role) if number == 0 else "called from"
        yield f"<div>{what}, <code>{escape(str(frame))}</code></div><pre>{text}</pre>"


def _numbered(number: int, line: str, marked: bool) -> str:
    text = f"{number:5} {escape(line.rstrip())}"
    return (f"<mark>{text}</mark>" if marked else text) + "\n"


def _left(program: ProgramState) -> Iterator[str]:
    """Show the state in which the run has left a program."""
    cta = f", CTA {program.cta}" if program.cta else ""
    yield f"<h3>Program {program.index}{cta} at the end</h3>"
    if program.barriers:
        rows = [
            (b.name, b.phase, f"{b.arrived} of {b.count}", f"{b.landed} of {b.expected}", "yes" if b.live else "no")
            for b in program.barriers
        ]
        yield _table(("barrier", "phases complete", "arrivals", "bytes", "initialised"), rows)
    for role in program.roles:
        yield from _role(role)


def _role(role: RoleState) -> Iterator[str]:
    waits = f"waits for {escape(role.waits)}" if role.waits else "was running"
    yield f"<details><summary>{escape(role.role)} {'has ended' if role.ended else waits}</summary>"
    rows = []
    for event in role.events:
        frame = event.frames[0] if event.frames else None
        text = "" if frame is None else linecache.getline(frame.file, frame.line).strip()
        rows.append((event.step, event.op, "" if frame is None else frame, text))
    yield _table(("step", "operation", "line", ""), rows) + "</details>"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    def row(cells: Sequence[Any], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + row(head, "th") + "".join(row(cells, "td") for cells in rows) + "</table>"
