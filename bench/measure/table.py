"""The record as text: TFLOP/s per case and peer, speed against each peer, the verdicts, and why a peer is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.cases import Case
from bench.measure.record import Record
from bench.peers import OWN

MARK = {True: "met", False: "NOT MET", None: "-"}


def render(record: Record) -> str:
    """The whole report; what matters most comes last, since long output is often read from its end."""
    parts = [_missing(record), _speeds(record), _numbers(record), _verdicts(record)]
    return "\n\n".join(part for part in parts if part)


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first one to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _missing(record: Record) -> str:
    """Every reason why something has no number, each once."""
    peers = record["peers"].items()
    reasons = {f"{name}: unavailable: {peer['reason']}": None for name, peer in peers if peer["reason"]}
    for entry in record["cases"]:
        for name, result in entry["results"].items():
            if result["status"] not in ("timed", "unavailable"):
                reasons[f"{name} on {entry['case']['name']}: {result['status']}: {result['reason']}"] = None
            elif result.get("note"):
                reasons[f"{name} on {entry['case']['name']}: {result['note']}"] = None
    return "\n".join(reasons)


def _speeds(record: Record) -> str:
    """One line per case: TFLOP/s of each peer, and in brackets warpattn's speed relative to it."""
    names = [name for name, peer in record["peers"].items() if peer["available"]]
    if not record["cases"] or not names:
        return ""
    rows = [["TFLOP/s (× = warpattn's speed over it)", *names]]
    for entry in record["cases"]:
        case = Case(**entry["case"])
        cells = [_cell(entry["results"].get(name)) for name in names]
        rows.append([f"{entry['group']} D{case.dim} {case.shape()}", *cells])
    return grid(rows)


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "-"
    if result["status"] != "timed":
        return result["status"]
    speed = f" ({result['speed']['median']:.3f}×)" if result["speed"] else ""
    return f"{result['tflops']:.1f}{speed}"


def _numbers(record: Record) -> str:
    """The host's and the first call's numbers, and the counters, where they were taken."""
    lines = []
    for section in ("host", "first_call"):
        values = record[section] or {}
        shown = [f"{key} {value:.3g}" for key, value in values.items() if isinstance(value, float)]
        if values:
            lines.append(f"{section}: " + (", ".join(shown) or str(values.get("reason"))))
    for row in record["ncu"]:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in row.get("metrics", {}).items())
        lines.append(f"ncu {row['peer']} {row['case']}: {shown or row.get('reason')}")
    return "\n".join(lines)


def _verdicts(record: Record) -> str:
    """One line per requirement: how many cases meet it, and the worst one."""
    rows = [["requirement", "met", "aim met", "worst", "on"]]
    by_text: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for verdict in record["verdicts"]:
        by_text.setdefault((verdict["group"], verdict["requirement"]), []).append(verdict)
    for (group, text), found in by_text.items():
        measured = [v for v in found if v["measured"] is not None]
        if not measured:
            rows.append([f"{group}: {text}", "not measured", "-", "-", "-"])
            continue
        worst = (max if found[0]["sense"] == "<=" else min)(measured, key=lambda v: v["measured"])
        rows.append(
            [
                f"{group}: {text}",
                _count([v["met"] for v in found]),
                _count([v["aim_met"] for v in found]),
                f"{worst['measured']:.3f}",
                worst["case"] or OWN,
            ]
        )
    return grid(rows) if len(rows) > 1 else ""


def _count(marks: Sequence[bool | None]) -> str:
    """`7/10`, `met` for a single one, `-` where the requirement does not ask."""
    if all(mark is None for mark in marks):
        return "-"
    if len(marks) == 1:
        return MARK[marks[0]]
    return f"{sum(mark is True for mark in marks)}/{len(marks)}"
