"""The JSON record of a run: its shape, how it is written and read, and the verdict on every requirement.

    {"schema": 1, "command", "date", "machine": {…}, "versions": {…}, "settings": {…},
     "peers":   {name: {"available", "reason", "version"}},
     "cases":   [{"group", "case": {…}, "flops", "results": {name: {"status", "reason", "error", "mode", "calls",
                  "ms": {median, q1, q3, n}, "tflops", "speed": {median, q1, q3, n}}}}],
     "host": {…} | null, "first_call": {…} | null, "ncu": [{…}]}

In memory it also has "verdicts", [{"requirement", "group", "case", "measured", "sense", "must", "aim", "met",
"aim_met"}], which follow from the rest and are not written.

`status` is timed, wrong, unsupported, failed or unavailable; only timed has numbers. `speed` of a peer is its time over
warpattn's, paired by round: 1.03 means that warpattn is 3 % faster. `met` is null where nothing was measured.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.cases import REQUIREMENTS, LimitRequirement, Requirement, SpeedRequirement, TimeRequirement, groups
from bench.measure import machine
from bench.peers import OWN

SCHEMA = 1

Record = dict[str, Any]


def start(module: str, argv: Sequence[str], settings: dict[str, Any]) -> Record:
    """An empty record of the command `python -m module argv…`; where the output goes is left out of the command."""
    kept = [arg for i, arg in enumerate(argv) if not arg.startswith("--json") and (i == 0 or argv[i - 1] != "--json")]
    return {
        "schema": SCHEMA,
        "command": shlex.join(["python", "-m", module, *kept]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "settings": settings,
        "peers": {},
        "cases": [],
        "host": None,
        "first_call": None,
        "ncu": [],
        "verdicts": [],
    }


def write(record: Record, path: Path) -> None:
    """Adds the verdicts and writes the record; called after every case: an interrupted run keeps its numbers."""
    record["verdicts"] = verdicts(record)
    save(record, path)


def save(record: Record, path: Path | None) -> None:
    """Writes a record of any shape, where a path is given: a line for each case and fact."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(record), encoding="utf-8")


def text_of(record: Record) -> str:
    """A record as JSON without its verdicts, with a line for each entry of its lists and mappings."""
    lines = ",\n".join(f" {_json(key)}: {_entries(value)}" for key, value in record.items() if key != "verdicts")
    return f"{{\n{lines}\n}}\n"


def _entries(value: Any) -> str:
    if isinstance(value, dict) and value:
        lines = ",\n".join(f"  {_json(key)}: {_json(entry)}" for key, entry in value.items())
        return f"{{\n{lines}\n }}"
    if isinstance(value, list) and value:
        lines = ",\n".join(f"  {_json(entry)}" for entry in value)
        return f"[\n{lines}\n ]"
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(rounded(value), ensure_ascii=False, separators=(",", ":"))


def rounded(value: Any) -> Any:
    """The same with five significant digits of each number that is not whole: timers have fewer."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    return float(f"{value:.5g}") if isinstance(value, float) and not value.is_integer() else value


def read(path: Path) -> Record:
    """Reads a record and judges it; raises ValueError if it is none or of another schema."""
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ValueError(f"{path.name} is not a benchmark record of schema {SCHEMA}")
    return record | {"verdicts": verdicts(record)}


def verdicts(record: Record) -> list[dict[str, Any]]:
    """One entry for every requirement and case that this record touches."""
    found: list[dict[str, Any]] = []
    for requirement in REQUIREMENTS:
        found += _judge(requirement, record)
    return found


def median_ms(record: Record, case: str, peer: str = OWN) -> float | None:
    """Median milliseconds of a peer on a case, or None if it was not timed."""
    for entry in record["cases"]:
        if entry["case"]["name"] == case:
            result = entry["results"].get(peer, {})
            return result["ms"]["median"] if result.get("status") == "timed" else None
    return None


def _judge(requirement: Requirement, record: Record) -> list[dict[str, Any]]:
    if isinstance(requirement, SpeedRequirement):
        return _judge_speed(requirement, record)
    if isinstance(requirement, TimeRequirement):
        if all(entry["group"] != requirement.group for entry in record["cases"]):
            return []
        own, against = (median_ms(record, name) for name in (requirement.case, requirement.against))
        measured = own / against if own is not None and against is not None else None
        text = f"time ≤ {requirement.at_most} × {requirement.against}"
        return [_verdict(text, requirement.group, requirement.case, measured, at_most=requirement.at_most)]
    return _judge_limit(requirement, record)


def _judge_limit(requirement: LimitRequirement, record: Record) -> list[dict[str, Any]]:
    section = record.get(requirement.section)
    if section is None:
        return []
    text = f"{requirement.section} {requirement.key} ≤ {requirement.at_most} {requirement.unit}"
    measured = section.get(requirement.key)
    return [_verdict(text, requirement.section, None, measured, at_most=requirement.at_most)]


def _judge_speed(requirement: SpeedRequirement, record: Record) -> list[dict[str, Any]]:
    found = []
    text = f"speed ≥ {requirement.must if requirement.must is not None else requirement.aim} × {requirement.peer}"
    names = {case.name for case in groups()[requirement.group]}
    for entry in record["cases"]:
        if entry["case"]["name"] not in names:
            continue
        speed = (entry["results"].get(requirement.peer) or {}).get("speed")
        measured = speed["median"] if speed else None
        verdict = _verdict(text, requirement.group, entry["case"]["name"], measured, at_least=requirement.must)
        verdict["aim"] = requirement.aim
        verdict["aim_met"] = None if measured is None or requirement.aim is None else measured >= requirement.aim
        found.append(verdict)
    return found


def _verdict(
    text: str,
    group: str,
    case: str | None,
    measured: float | None,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> dict[str, Any]:
    met = None
    if measured is not None:
        met = (measured >= at_least) if at_least is not None else (measured <= at_most) if at_most is not None else None
    must = at_least if at_least is not None else at_most
    return {
        "requirement": text,
        "group": group,
        "case": case,
        "measured": measured,
        "sense": "<=" if at_most is not None else ">=",
        "must": must,
        "aim": None,
        "met": met,
        "aim_met": None,
    }
