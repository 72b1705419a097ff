"""Draws the README's first chart, tokens per second in a real engine, and writes the rows of the page of vLLM.

Both are from the records of `python -m bench.engine`; where two of a card have a case, the later one counts. The chart
shows the first card, the page has rows of each.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from bench.engine.cases import CASES
from docs.figures.svg import DARK, RED, box, picture, words

HERE = Path(__file__).parent
FOLDER = HERE.parents[2] / "bench" / "results"
CHARTED = "H200"
RECORDS = {
    CHARTED: ("2026-11-27-engine.json", "2026-11-27-engine-gpt-oss.json", "2026-11-27-engine-latent.json"),
    "H100": ("2026-11-26-engine.json", "2026-11-26-engine-latent.json"),
}
PAGE = HERE.parents[2] / "docs" / "integrations" / "vllm.md"
START, END = "<!-- engine: `make docs` writes these rows -->\n\n", "<!-- end of engine -->"
MODELS = {"llama": "Llama 3 8B", "gpt-oss": "gpt-oss", "latent": "latent"}
PEER, OWN = "FLASH_ATTN", "WARPATTN"
COLOURS = {OWN: RED, PEER: DARK}
NAMES = {OWN: "warpattn", PEER: "FlashAttention 3"}
KINDS = {
    "ms a token": "Decoding: tokens per second",
    "tokens/s": "Prompts in chunks beside decoding requests: tokens per second",
    "s of prefill": "Prompts: tokens per second",
}


class Row(NamedTuple):
    """A figure of a case: tokens per second of each backend, and the median ratio of the times, ours over theirs."""

    title: str
    kind: str  # of KINDS
    figures: dict[str, float]  # as recorded
    tokens: dict[str, float]  # per second
    ratio: float  # of the times


def rows(records: list[dict[str, Any]]) -> list[Row]:
    """Every figure of the records, decoding first, Llama first."""
    cases: dict[str, Any] = {}
    for record in records:
        cases |= record["cases"]
    found = []
    for kind in KINDS:
        for model, shown in MODELS.items():
            for case, (requests, length) in (CASES | {"mixed": (0, 0)}).items():
                found_by = cases.get(f"{model} {case}", {PEER: {}, OWN: {}})
                peer, own = found_by[PEER], found_by[OWN]
                if kind not in own:
                    continue
                figures, ratio = {OWN: own[kind], PEER: peer[kind]}, statistics.median(own["ratios"][kind])
                if kind == "tokens/s":
                    tokens, ratio = figures, 1 / ratio
                else:
                    work = 1000 * requests if kind == "ms a token" else requests * length
                    tokens = {backend: work / figure for backend, figure in figures.items()}
                title = f"{shown}, {case.replace(' x ', ' × ')}"
                found.append(Row(title, kind, figures, tokens, ratio))
    return found


def table(records: list[dict[str, Any]]) -> str:
    """The rows as Markdown, with the commands and the date."""
    lines = ["| model, requests × prompt | | FlashAttention 3 | warpattn | time, ours over theirs |", "|---" * 5 + "|"]
    for row in rows(records):
        shown = ",.0f" if row.kind == "tokens/s" else ".4g"
        figures = " | ".join(f"{row.figures[backend]:{shown}}" for backend in (PEER, OWN))
        lines.append(f"| {row.title} | {row.kind} | {figures} | {row.ratio:.3f} |")
    commands = [f"`{record['command']}`, {record['date'][:10]}" for record in records]
    return "\n".join([*lines, "", "; ".join(commands) + "."]) + "\n"


def in_page(text: str, of_cards: dict[str, list[dict[str, Any]]]) -> str:
    """The page with the rows of each card's records."""
    head, start, rest = text.partition(START)
    tables = [f"One {card}:\n\n{table(records)}\n" for card, records in of_cards.items()]
    return head + start + "".join(tables) + rest[rest.index(END) :]


def chart(records: list[dict[str, Any]]) -> str:
    """Bars of tokens per second, a panel for decoding and one for prompts; each case has a scale of its own."""
    left, full, parts, y = 180, 400, [], 26
    for kind, title in KINDS.items():
        parts.append(words(10, y, title, 16))
        y += 14
        for row in (row for row in rows(records) if row.kind == kind):
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
    of_cards = {
        card: [json.loads((FOLDER / card.lower() / name).read_text()) for name in names]
        for card, names in RECORDS.items()
    }
    return {HERE / "engine.svg": chart(of_cards[CHARTED]), PAGE: in_page(PAGE.read_text(), of_cards)}
