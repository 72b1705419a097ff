"""Draws the README's first chart, tokens per second in a real engine, and writes the rows of the page of vLLM.

Both are from the record of `python -m bench.engine`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from docs.figures.svg import DARK, RED, box, picture, words

HERE = Path(__file__).parent
RECORD = HERE.parents[1] / "bench" / "results" / "h200" / "2026-11-22-engine.json"
PAGE = HERE.parents[1] / "docs" / "integrations" / "vllm.md"
START, END = "<!-- engine: `make docs` writes these rows -->\n\n", "<!-- end of engine -->"
MODELS = {"llama": "Llama 3 8B", "gpt-oss": "gpt-oss"}
PEER, OWN = "FLASH_ATTN", "WARPATTN"
COLOURS = {OWN: RED, PEER: DARK}
NAMES = {OWN: "warpattn", PEER: "FlashAttention 3"}
CASES = {"1 x 4k": (1, 4096), "32 x 4k": (32, 4096), "1 x 32k": (1, 32000), "128 x 1k": (128, 1024)}


class Row(NamedTuple):
    """A figure of a case: tokens per second of each backend, and the median ratio of the times, ours over theirs."""

    model: str
    case: str
    what: str  # decode, prefill or mixed
    figures: dict[str, float]  # as recorded
    tokens: dict[str, float]  # per second
    ratio: float

    @property
    def title(self) -> str:
        """For people."""
        case = self.case.replace("x", "×")
        return f"{MODELS[self.model]}, {case}" if self.what != "mixed" else f"{MODELS[self.model]}, mixed steps"


def rows(record: dict[str, Any]) -> list[Row]:
    """Every figure of the record, decode first."""
    found = []
    for key, what in (("ms a token", "decode"), ("s of prefill", "prefill"), ("tokens/s", "mixed")):
        for name, results in record["cases"].items():
            model, case = name.split(" ", 1)
            if key not in results[OWN]:
                continue
            figures = {backend: results[backend][key] for backend in (OWN, PEER)}
            ratios = sorted(results[OWN]["ratios"][key])
            middle = (ratios[len(ratios) // 2] + ratios[(len(ratios) - 1) // 2]) / 2
            tokens = {backend: _per_second(what, case, value) for backend, value in figures.items()}
            found.append(Row(model, case, what, figures, tokens, middle if what != "mixed" else 1 / middle))
    order = list(CASES)
    return sorted(found, key=lambda row: (row.what, list(MODELS).index(row.model), row.case != "mixed" and order.index(row.case)))


def _per_second(what: str, case: str, figure: float) -> float:
    if what == "mixed":
        return figure
    requests, length = CASES[case]
    return 1000 * requests / figure if what == "decode" else requests * length / figure


def table(record: dict[str, Any]) -> str:
    """The rows as Markdown, with the command and the date."""
    units = {"decode": "ms a token", "prefill": "s of prefill", "mixed": "tokens/s, chunks beside decoding"}
    lines = ["| model, requests × prompt | | FlashAttention 3 | warpattn | time, ours over theirs |", "|---|---|---|---|---|"]
    for row in rows(record):
        shown = " | ".join(f"{row.figures[backend]:,.4g}" if row.what != "mixed" else f"{row.figures[backend]:,.0f}" for backend in (PEER, OWN))
        lines.append(f"| {row.title} | {units[row.what]} | {shown} | {row.ratio:.3f} |")
    return "\n".join([*lines, "", f"`{record['command']}`, {record['date'][:10]}."]) + "\n"


def in_page(text: str, record: dict[str, Any]) -> str:
    """The page with the rows of the record."""
    head, start, rest = text.partition(START)
    return head + start + table(record) + "\n" + rest[rest.index(END) :]


def chart(record: dict[str, Any]) -> str:
    """Bars of tokens per second, a panel for decoding and one for prompts; each case has a scale of its own."""
    left, full, parts, y = 220, 380, [], 26
    panels = ("decode", "Decoding: tokens per second"), ("prefill mixed", "Prompts, and prompts beside decoding: tokens per second")
    for kinds, title in panels:
        parts.append(words(10, y, title, 16))
        y += 14
        for row in (row for row in rows(record) if row.what in kinds):
            most = max(row.tokens.values())
            parts.append(words(left - 12, y + 23, row.title, 13, anchor="end"))
            for backend, value in row.tokens.items():
                wide = full * value / most
                shown = f"{value:,.0f}  {NAMES[backend]}" + (f"  {1 / row.ratio:.2f}×" if backend == OWN else "")
                parts += [box(left, y, wide, 15, COLOURS[backend]), words(left + wide + 6, y + 12, shown, 12, "#555")]
                y += 18
            y += 10
        y += 24
    return picture(left + full + 190, y - 16, parts)


def files() -> dict[Path, str]:
    """The chart, and the page with its rows."""
    record = json.loads(RECORD.read_text())
    return {HERE / "engine.svg": chart(record), PAGE: in_page(PAGE.read_text(), record)}
