"""Draws the README's chart and writes its table of speed (`make docs`), both from records in bench/results/h200.

Eight rows, four of prefill and four of decode. Those where a peer comes closest, or is ahead, are among them;
docs/benchmarks.md has all cases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from docs.figures.measured.benchmarks import faster, records
from docs.figures.svg import BLUE, DARK, ORANGE, RED, box, picture, words

HERE = Path(__file__).parent
README = HERE.parents[2] / "README.md"
START, END = "<!-- speed: `make docs` writes these rows -->\n\n", "<!-- end of speed -->"

NAMES = {"warpattn": "warpattn", "cudnn": "cuDNN", "fa4": "flash-attn-4", "flashinfer": "FlashInfer"}
COLOURS = {"warpattn": RED, "cudnn": BLUE, "fa4": DARK, "flashinfer": ORANGE}
PREFILL = {
    "d128-16x1k-causal": "causal prefill, D 128, 16 × 1k",
    "d128-1x16k-causal": "causal prefill, D 128, 1 × 16k",
    "d64-1x16k-causal": "causal prefill, D 64, 1 × 16k",
    "d256-1x16k-full": "full prefill, D 256, 1 × 16k",
}
DECODE = {
    "dense-16x8k-32/32": "decode, 16 × 8k, 32/32 heads",
    "dense-1x16k-32/8": "decode, 1 × 16k, 32/8 heads",
    "page16-32x4k-32/8": "decode, pages of 16, 32 × 4k, 32/8 heads",
    "mla-128x4k-128": "latent decode (MLA), 128 × 4k, 128 heads",
}


class Row(NamedTuple):
    """One case: what warpattn reached, and how much faster it is than each peer that was timed."""

    title: str
    unit: str
    reached: dict[str, float]  # by peer, in `unit`
    speeds: dict[str, float]  # by peer: its time over warpattn's
    microseconds: float


def rows(found: dict[str, dict[str, Any]]) -> list[Row]:
    """The eight rows, from the records."""
    cases = {entry["case"]["name"]: entry["results"] for kind in ("times", "decode") for entry in found[kind]["cases"]}
    prefill = [_row(title, "TFLOP/s", "tflops", cases[name]) for name, title in PREFILL.items()]
    return prefill + [_row(title, "TB/s", "tb_s", cases[name]) for name, title in DECODE.items()]


def _row(title: str, unit: str, figure: str, results: dict[str, Any]) -> Row:
    timed = {peer: result for peer, result in faster(results).items() if result["status"] == "timed"}
    peers = [peer for peer in NAMES if peer in timed]
    reached = {peer: timed[peer][figure] for peer in peers}
    speeds = {peer: timed[peer]["speed"]["median"] for peer in peers if peer != "warpattn"}
    return Row(title, unit, reached, speeds, timed["warpattn"]["ms"]["median"] * 1e3)


def table(found: dict[str, dict[str, Any]]) -> str:
    """The rows as Markdown, with the commands and dates that made them."""
    lines = ["| one H200, bf16, forward | warpattn | over cuDNN | over the other peer |", "|---|---|---|---|"]
    for row in rows(found):
        own = row.reached["warpattn"]
        shown = f"{own:.0f} TFLOP/s" if row.unit == "TFLOP/s" else f"{row.microseconds:.0f} µs, {own:.2f} TB/s"
        others = [f"{NAMES[peer]} {speed:.2f}×" for peer, speed in row.speeds.items() if peer != "cudnn"]
        cudnn = f"{row.speeds['cudnn']:.2f}×" if "cudnn" in row.speeds else "–"
        lines.append(f"| {row.title} | {shown} | {cudnn} | {others[0] if others else '–'} |")
    sources = (f"`{found[kind]['command']}` ({found[kind]['date'][:10]})" for kind in ("times", "decode"))
    return "\n".join([*lines, "", f"Rounds are interleaved: {', '.join(sources)}."]) + "\n"


def in_readme(text: str, found: dict[str, dict[str, Any]]) -> str:
    """The README with the rows of today's records."""
    head, start, rest = text.partition(START)
    return head + start + table(found) + "\n" + rest[rest.index(END) :]


def chart(found: dict[str, dict[str, Any]]) -> str:
    """Bars of every peer, a panel for prefill and one for decode."""
    left, full, parts, y = 300, 420, [], 26
    for unit, title in (("TFLOP/s", "Prefill, 16 k tokens: TFLOP/s"), ("TB/s", "Decode, one token: TB/s read")):
        panel = [row for row in rows(found) if row.unit == unit]
        most = max(value for row in panel for value in row.reached.values())
        parts.append(words(10, y, title, 16))
        y += 14
        for row in panel:
            parts.append(words(left - 12, y + 9 * len(row.reached) + 5, row.title, 13, anchor="end"))
            for peer, value in row.reached.items():
                shown = f"{value:.0f}" if unit == "TFLOP/s" else f"{value:.2f}"
                parts.append(box(left, y, full * value / most, 15, COLOURS[peer]))
                parts.append(words(left + full * value / most + 6, y + 12, f"{shown}  {NAMES[peer]}", 12, "#555"))
                y += 18
            y += 10
        y += 24
    return picture(left + full + 140, y - 16, parts)


def files() -> dict[Path, str]:
    """The chart, and the README with its rows."""
    found = records()
    return {HERE / "speed.svg": chart(found), README: in_readme(README.read_text(), found)}
