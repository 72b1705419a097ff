"""Draws the README's first chart, tokens per second in a real engine, and writes the rows of the page of vLLM.

Both are from the record of `python -m bench.engine`.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from bench.engine import CASES
from docs.figures.svg import DARK, RED, box, picture, words

HERE = Path(__file__).parent
RECORD = HERE.parents[1] / "bench" / "results" / "h200" / "2026-11-22-engine.json"
PAGE = HERE.parents[1] / "docs" / "integrations" / "vllm.md"
START, END = "<!-- engine: `make docs` writes these rows -->\n\n", "<!-- end of engine -->"
MODELS = {"llama": "Llama 3 8B", "gpt-oss": "gpt-oss"}
PEER, OWN = "FLASH_ATTN", "WARPATTN"
COLOURS = {OWN: RED, PEER: DARK}
NAMES = {OWN: "warpattn", PEER: "FlashAttention 3"}
KINDS = {"ms a token": "Decoding: tokens per second", "s of prefill": "Prompts: tokens per second"}


class Row(NamedTuple):
    """A figure of a case: tokens per second of each backend, and the median ratio of the times, ours over theirs."""

    title: str
    kind: str  # of KINDS
    figures: dict[str, float]  # as recorded
    tokens: dict[str, float]  # per second
    ratio: float


def rows(record: dict[str, Any]) -> list[Row]:
    """Every figure of the record, decoding first, Llama first."""
    found = []
    for kind in KINDS:
        for model, shown in MODELS.items():
            for case, (requests, length) in CASES.items():
                results = record["cases"].get(f"{model} {case}", {OWN: {}})
                if kind not in results[OWN]:
                    continue
                figures = {backend: results[backend][kind] for backend in (OWN, PEER)}
                work = 1000 * requests if kind == "ms a token" else requests * length
                tokens = {backend: work / figure for backend, figure in figures.items()}
                title = f"{shown}, {case.replace('x', '×')}"
                found.append(Row(title, kind, figures, tokens, statistics.median(results[OWN]["ratios"][kind])))
    return found


def table(record: dict[str, Any]) -> str:
    """The rows as Markdown, with the command and the date."""
    lines = ["| model, requests × prompt | | FlashAttention 3 | warpattn | ours over theirs |", "|---|---|---|---|---|"]
    for row in rows(record):
        figures = " | ".join(f"{row.figures[backend]:.4g}" for backend in (PEER, OWN))
        lines.append(f"| {row.title} | {row.kind} | {figures} | {row.ratio:.3f} |")
    return "\n".join([*lines, "", f"`{record['command']}`, {record['date'][:10]}."]) + "\n"


def in_page(text: str, record: dict[str, Any]) -> str:
    """The page with the rows of the record."""
    head, start, rest = text.partition(START)
    return head + start + table(record) + "\n" + rest[rest.index(END) :]


def chart(record: dict[str, Any]) -> str:
    """Bars of tokens per second, a panel for decoding and one for prompts; each case has a scale of its own."""
    left, full, parts, y = 180, 400, [], 26
    for kind, title in KINDS.items():
        parts.append(words(10, y, title, 16))
        y += 14
        for row in (row for row in rows(record) if row.kind == kind):
            most = max(row.tokens.values())
            parts.append(words(left - 12, y + 23, row.title, 13, anchor="end"))
            for backend, value in row.tokens.items():
                wide = full * value / most
                shown = f"{value:,.0f}  {NAMES[backend]}" + (f", {1 / row.ratio:.2f}×" if backend == OWN else "")
                parts += [box(left, y, wide, 15, COLOURS[backend]), words(left + wide + 6, y + 12, shown, 12, "#555")]
                y += 18
            y += 10
        y += 24
    return picture(left + full + 190, y - 16, parts)


def files() -> dict[Path, str]:
    """The chart, and the page with its rows."""
    record = json.loads(RECORD.read_text())
    return {HERE / "engine.svg": chart(record), PAGE: in_page(PAGE.read_text(), record)}
