"""Writes what the pages of transformers, diffusers and SGLang say of speed.

The records of `python -m bench.frameworks` are bench/results/*/*-frameworks*.json; where two of a card have a case,
the later file counts. A page whose framework is in no record keeps what stands between its marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers import OWN

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "bench" / "results"
PAGES = {name: ROOT / "docs" / "integrations" / f"{name}.md" for name in ("transformers", "diffusers", "sglang")}
START, END = "<!-- frameworks: `make docs` writes this -->\n", "<!-- end of frameworks -->"
INTRODUCTIONS = {
    "transformers": "Models with random weights in bf16, as a user calls them, the host's share included",
    "diffusers": "One call of a transformer with random weights in bf16, the host's share included",
    "sglang": (
        "SGLang's own classes around a step of attention: the step's tables, then layers that write their keys and "
        "values and attend, bf16, pages of 16; beside SGLang's Triton backend"
    ),
}
SPEED = "The last column is the other's time over warpattn's, the median of the rounds."
Record = Mapping[str, Any]


def records() -> dict[str, list[Record]]:
    """By card, oldest first."""
    found: dict[str, list[Record]] = {}
    for path in sorted(FOLDER.glob("*/*-frameworks*.json")):
        found.setdefault(path.parent.name.upper(), []).append(json.loads(path.read_text(encoding="utf-8")))
    return found


def rows(framework: str, given: Sequence[Record]) -> list[str]:
    """A row of Markdown for each peer of each case in which warpattn was timed, and a sentence for each other one."""
    cases: dict[str, Any] = {}
    for record in given:
        cases |= {name: case for name, case in record["cases"].items() if name.startswith(f"{framework}: ")}
    lines, reasons = [], {}
    for name, case in cases.items():
        title = name.removeprefix(f"{framework}: ").replace(": ", ", ")
        title = re.sub(r"(?<=\d) x (?=\d|up)", " × ", title).replace(" heads x ", " heads × ")
        results, own = case["results"], case["results"].get(OWN, {"status": "absent", "reason": "it did not run"})
        for peer, found in results.items():
            if peer != OWN and found["status"] == own["status"] == "timed":
                shown = " | ".join(figure(one, case["tokens"]) for one in (found, own))
                lines.append(f"| {title} | `{peer}` | {shown} | {found['speed']['median']:.2f} × |")
            elif found["status"] != "timed":
                reasons[f"{title}: `{peer}` was not timed ({found['status']}: {found['reason'].rstrip('.')})."] = None
    head = ["| case | beside | its time | warpattn's | speed |", "|---" * 5 + "|"]
    return ([*head, *lines] if lines else []) + (["", *reasons] if reasons else [])


def figure(found: Mapping[str, Any], tokens: int) -> str:
    """Milliseconds of a call, and tokens per second where they were counted."""
    ms = found["ms"]["median"]
    return f"{ms:.4g} ms" + (f" ({tokens / ms * 1e3:,.0f} tokens/s)" if tokens else "")


def section(framework: str, of_cards: Mapping[str, Sequence[Record]]) -> str | None:
    """What stands between the marks; None where no record has the framework."""
    parts = []
    for card, given in of_cards.items():
        used = [record for record in given if any(name.startswith(f"{framework}: ") for name in record["cases"])]
        if used:
            version = used[-1]["versions"].get(framework)
            commands = "; ".join(f"`{record['command']}`, {record['date'][:10]}" for record in used)
            named = f"One {card}, {framework} {version}, torch {used[-1]['versions']['torch']}:"
            parts.append("\n".join([named, "", *rows(framework, used), "", f"{commands}."]))
    if not parts:
        return None
    return "\n\n".join([f"{INTRODUCTIONS[framework]}. {SPEED}", *parts]) + "\n"


def in_page(text: str, written: str | None) -> str:
    """The page with the section, or as it is."""
    head, start, rest = text.partition(START)
    return text if written is None else head + start + "\n" + written + "\n" + rest[rest.index(END) :]


def files() -> dict[Path, str]:
    """The three pages."""
    found = records()
    return {path: in_page(path.read_text(encoding="utf-8"), section(name, found)) for name, path in PAGES.items()}
