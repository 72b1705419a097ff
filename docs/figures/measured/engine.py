"""Draws the README's first chart, tokens per second in vLLM, and writes the rows of the pages of vLLM and SGLang.

All are from the records of `python -m bench.engine`; where two of a table have a case, the later one counts. The chart
shows the first table, the pages have all.
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
PAGES = HERE.parents[2] / "docs" / "integrations"
START, END = "<!-- engine: `make docs` writes these rows -->\n\n", "<!-- end of engine -->"
MODELS = {"llama": "Llama 3 8B", "gpt-oss": "gpt-oss", "latent": "latent"}


class Records(NamedTuple):
    """The records of a table."""

    title: str
    folder: str  # of the card
    names: tuple[str, ...]


class Engine(NamedTuple):
    """Its page, its names for FlashAttention 3 and for warpattn, and the records of its tables."""

    page: Path
    peer: str
    own: str
    tables: tuple[Records, ...]


VLLM = Engine(
    PAGES / "vllm.md", "FLASH_ATTN", "WARPATTN",
    (
        Records("One H200", "h200", (
            "2026-11-29-engine.json", "2026-11-29-engine-gpt-oss-128.json", "2026-11-27-engine-latent.json",
        )),
        Records("One H200, graphs of all steps (`FULL`), steps of 1,024 tokens", "h200", (
            "2026-11-29-engine-full.json",
        )),
        Records("The same with drafts of 3 tokens from n-grams, first runner", "h200", (
            "2026-11-29-engine-drafts.json",
        )),
        Records("One H100", "h100", ("2026-11-26-engine.json", "2026-11-26-engine-latent.json")),
    ),
)  # fmt: skip
SGLANG = Engine(
    PAGES / "sglang.md", "fa3", "warpattn",
    (Records("One H200", "h200", ("2026-11-28-engine-sglang-128.json", "2026-11-28-engine-sglang.json")),),
)  # fmt: skip
PEER, OWN = "FlashAttention 3", "warpattn"
COLOURS = {OWN: RED, PEER: DARK}
KINDS = {
    "ms a token": "Decoding: tokens per second",
    "tokens/s": "Prompts in chunks beside decoding requests: tokens per second",
    "s of prefill": "Prompts: tokens per second",
}
TIMES = ("ms a token", "ms a step")  # of decoding; a step with drafts gives a request several tokens


class Row(NamedTuple):
    """A figure of a case: tokens per second of each backend, and the median ratio of the times, ours over theirs."""

    title: str
    kind: str  # of KINDS, or of TIMES
    figures: dict[str, float]  # of PEER and OWN, as recorded
    tokens: dict[str, float]  # per second
    ratio: float  # of the times


def read(records: Records) -> list[dict[str, Any]]:
    """The records of a table."""
    return [json.loads((FOLDER / records.folder / name).read_text()) for name in records.names]


def rows(engine: Engine, records: Records) -> list[Row]:
    """Every figure of the records, decoding first, Llama first."""
    cases: dict[str, Any] = {}
    for record in read(records):
        cases |= record["cases"]
    found = []
    for kind in dict.fromkeys((*TIMES, *KINDS)):
        for model, shown in MODELS.items():
            for case, (requests, length) in (CASES | {"mixed": (0, 0)}).items():
                found_by = cases.get(f"{model} {case}", {engine.peer: {}, engine.own: {}})
                peer, own = found_by[engine.peer], found_by[engine.own]
                if kind not in own:
                    continue
                figures, ratio = {OWN: own[kind], PEER: peer[kind]}, statistics.median(own["ratios"][kind])
                if kind == "tokens/s":
                    tokens, ratio = figures, 1 / ratio
                else:
                    work = 1000 * requests if kind in TIMES else requests * length
                    tokens = {backend: work / figure for backend, figure in figures.items()}
                title = f"{shown}, {case.replace(' x ', ' × ')}"
                found.append(Row(title, kind, figures, tokens, ratio))
    return found


def table(engine: Engine, records: Records) -> str:
    """The rows as Markdown, with the commands and the date."""
    lines = ["| model, requests × prompt | | FlashAttention 3 | warpattn | time, ours over theirs |", "|---" * 5 + "|"]
    for row in rows(engine, records):
        shown = ",.0f" if row.kind == "tokens/s" else ".4g"
        figures = " | ".join(f"{row.figures[backend]:{shown}}" for backend in (PEER, OWN))
        lines.append(f"| {row.title} | {row.kind} | {figures} | {row.ratio:.3f} |")
    commands = [f"`{record['command']}`, {record['date'][:10]}" for record in read(records)]
    return "\n".join([*lines, "", "; ".join(commands) + "."]) + "\n"


def in_page(text: str, engine: Engine) -> str:
    """The engine's page with its tables."""
    head, start, rest = text.partition(START)
    tables = [f"{records.title}:\n\n{table(engine, records)}\n" for records in engine.tables]
    return head + start + "".join(tables) + rest[rest.index(END) :]


def chart(engine: Engine) -> str:
    """Bars of tokens per second, a panel for decoding and one for prompts; each case has a scale of its own."""
    left, full, parts, y = 180, 400, [], 26
    for kind, title in KINDS.items():
        parts.append(words(10, y, title, 16))
        y += 14
        for row in (row for row in rows(engine, engine.tables[0]) if row.kind == kind):
            most = max(row.tokens.values())
            parts.append(words(left - 12, y + 23, row.title, 13, anchor="end"))
            for backend, value in row.tokens.items():
                wide = full * value / most
                shown = f"{value:,.0f}  {backend}" + (f", {1 / row.ratio:.2f}×" if backend == OWN else "")
                parts += [box(left, y, wide, 15, COLOURS[backend]), words(left + wide + 6, y + 12, shown, 12, "#555")]
                y += 18
            y += 10
        y += 24
    return picture(left + full + 190, y - 16, parts)


def files() -> dict[Path, str]:
    """The chart, and the pages with their rows."""
    pages = {engine.page: in_page(engine.page.read_text(), engine) for engine in (VLLM, SGLANG)}
    return {HERE / "engine.svg": chart(VLLM), **pages}
