"""Draws the ring and the zig-zag of docs/distributed.md, its chart, and writes its table, from the record of two cards.

What was measured and what `bench/distributed/ring_model.py` computes are told apart by colour and by line.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from bench.distributed import ring_model
from docs.figures.svg import BLUE, DARK, GREEN, GREY, ORANGE, PALE, RED, arrow, box, dot, picture, words
from warpattn.distributed.placement import Placement

HERE = Path(__file__).parent
PAGE = HERE.parent / "distributed.md"
START, END = "<!-- measured: `make docs` writes these rows -->\n\n", "<!-- end of measured -->"
RANKS = 4
COLOURS = (BLUE, GREEN, ORANGE, RED)
CELL = 26


def placements() -> str:
    """Who holds which chunk, the pairs that a causal mask shows, and the way of the keys."""
    parts: list[str] = []
    for column, name in enumerate(("contiguous", "zigzag")):
        left, placement = 20 + column * 300, Placement(name, RANKS)
        owner = {number: rank for rank in range(RANKS) for number in placement.numbers(rank)}
        size = CELL * 8 / placement.total
        work = [0.0] * RANKS
        parts.append(words(left, 26, f"{name}: keys →, queries ↓", 14))
        for query in range(placement.total):
            for key in range(query + 1):
                share = 0.5 if query == key else 1.0
                work[owner[query]] += share
                shade = COLOURS[owner[query]]
                parts.append(box(left + key * size + 1, 40 + query * size + 1, size - 2, size - 2, shade))
                if query == key:
                    parts.append(half(left + key * size, 40 + query * size, size))
        mean = sum(work) / RANKS
        for rank in range(RANKS):
            y = 40 + CELL * 8 + 24 + 20 * rank
            parts.append(box(left, y - 11, 12, 12, COLOURS[rank]))
            parts.append(words(left + 18, y, f"rank {rank}: {work[rank] / mean:.2f} of the mean work", 13))
    return picture(600, 350, parts)


def half(x: float, y: float, size: float) -> str:
    """The hidden half of a pair on the diagonal."""
    low, right, end = y + 1, x + size - 1, y + size - 1
    return f'<path d="M{x + 1:g},{low:g} L{right:g},{low:g} L{right:g},{end:g} z" fill="white"/>'


def ring(top: float) -> list[str]:
    """Four ranks, and what each does in each step."""
    parts = [words(20, top + 24, "each step: attention of the keys at hand, while the next ones arrive", 14)]
    for step in range(RANKS):
        y = top + 44 + step * 64
        parts.append(words(20, y + 24, f"step {step}", 13))
        for rank in range(RANKS):
            x, source = 90 + rank * 150, (rank - step) % RANKS
            parts.append(box(x, y, 110, 38, PALE, DARK))
            parts.append(box(x + 8, y + 8, 22, 22, COLOURS[rank]))
            parts.append(words(x + 38, y + 24, "sees", 12))
            parts.append(box(x + 74, y + 8, 22, 22, COLOURS[source]))
            if step + 1 < RANKS:
                to = 90 + (rank + 1) % RANKS * 150
                parts.append(arrow(x + 85, y + 40, to + 85, y + 62) if rank + 1 < RANKS else "")
    parts.append(words(90, top + 44 + RANKS * 64 + 10, "keys of the last rank go on at rank 0", 12, GREY))
    return parts


def way_of_keys() -> str:
    """The ring alone."""
    return picture(700, 330, ring(0))


def chart() -> str:
    """Efficiency against ranks: lines are the model, points are measured."""
    found, rates = ring_model.record(), ring_model.rates()
    left, top, wide, tall = 70, 40, 560, 260

    def at(ranks: int, efficiency: float) -> tuple[float, float]:
        return left + wide * math.log2(ranks / 2) / 9, top + tall * (1 - (efficiency - 0.5) / 0.5)

    parts = [words(left, 24, "attention's share of the time, causal, 32/8 heads of 128", 15)]
    for tenth in range(5, 11):
        _, y = at(2, tenth / 10)
        parts += [box(left, y, wide, 0.5, "#ddd"), words(left - 8, y + 4, f"{tenth / 10:.1f}", 12, anchor="end")]
    for step in range(10):
        x, _ = at(2 << step, 1.0)
        parts.append(words(x, top + tall + 18, str(2 << step), 12, anchor="middle"))
    parts.append(words(left + wide / 2, top + tall + 38, "ranks", 13, anchor="middle"))
    for tokens, colour in ((1 << 17, ORANGE), (1 << 20, BLUE), (1 << 23, GREEN)):
        for backward, dash in ((False, ""), (True, ' stroke-dasharray="5 4"')):
            line = [(n, ring_model.Ring(tokens, n).efficiency(rates, backward)) for n in powers(tokens)]
            points = " ".join("{:.1f},{:.1f}".format(*at(n, e)) for n, e in line if e >= 0.5)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
    legend = (("model, 128k tokens", ORANGE), ("model, 1M", BLUE), ("model, 8M", GREEN))
    for i, (text, colour) in enumerate(legend):
        x = left + i * 170
        parts += [box(x, top + tall + 54, 14, 4, colour), words(x + 20, top + tall + 60, text)]
    low = top + tall + 84
    parts += [words(left, low, "dashed: with the backward"), dot(left + 196, low - 4, RED)]
    parts.append(words(left + 208, low, "measured, 128k tokens on two H200"))
    for backward in (False, True):
        result = ring_model.timed(found, "ring", found["settings"]["tokens"], backward)
        parts.append(dot(*at(2, efficiency(found, result, 32, backward)), RED))
    return picture(left + wide + 30, top + tall + 100, parts)


def powers(tokens: int) -> list[int]:
    """Ranks with at least 2k tokens each."""
    return [2 << step for step in range(10) if tokens >> (step + 1) >= 2048]


def efficiency(found: dict[str, Any], result: dict[str, Any], heads: int, backward: bool) -> float:
    """TFLOP/s of a card among two over that of one alone with half of the tokens."""
    alone = ring_model.timed(found, "one card", found["settings"]["tokens"] // 2, backward, heads)
    return result["tflops"] / alone["tflops"]


def table() -> str:
    """Every case of 128k tokens, beside one card and beside torch."""
    found = ring_model.record()
    tokens = found["settings"]["tokens"]
    lines = ["| 128k tokens on two H200, causal, D 128, bf16 | TFLOP/s a card | of one card at 64k | GiB a rank |",
             "|---|---|---|---|"]  # fmt: skip
    for entry in found["cases"]:
        case, result = entry["case"], entry["results"]
        again = any(line.startswith(f"| {title(case)} ") for line in lines)
        if case["tokens"] != tokens or result["status"] != "timed" or again:
            continue
        share = efficiency(found, result, case["heads"], case["backward"])
        lines.append(f"| {title(case)} | {result['tflops']:.0f} | {share:.3f} | {result['memory_gib']:.2f} |")
    speeds = [against_torch(found, backward) for backward in (False, True)]
    decoded = found["decode"]
    said = (
        f"In turn with torch's context_parallel and cuDNN the ring is {speeds[0]:.2f} × as fast forward and\n"
        f"{speeds[1]:.2f} × with the backward. One query over 1M tokens of 32/8 heads in pages takes\n"
        f"{decoded['one card']:.3f} ms on one card and {decoded['shared']:.3f} ms on two "
        f"({decoded['one card'] / decoded['shared']:.2f} ×). The cards exchanged {found['link_gb_s']:.0f} GB/s\n"
        f"in each direction. `{found['command']}` ({found['date'][:10]})."
    )
    return "\n".join([*lines, "", said]) + "\n"


def title(case: dict[str, Any]) -> str:
    """A row's name."""
    what = "both passes" if case["backward"] else "forward"
    return f"{case['way']}, {case['heads']}/{case['heads_kv']} heads, {what}"


def against_torch(found: dict[str, Any], backward: bool) -> float:
    """torch's time over the ring's in the group that has both."""
    cases = found["cases"]
    places = [i for i, entry in enumerate(cases) if entry["case"]["way"] == "torch and cuDNN"]
    at = next(i for i in places if cases[i]["case"]["backward"] == backward)
    return cases[at]["results"]["ms"] / cases[at + 1]["results"]["ms"]


def in_page(text: str) -> str:
    """The page with the rows of the newest record."""
    head, start, rest = text.partition(START)
    return head + start + table() + "\n" + rest[rest.index(END) :]


def files() -> dict[Path, str]:
    """Three pictures and the page."""
    return {
        HERE / "zigzag.svg": placements(),
        HERE / "ranks.svg": way_of_keys(),
        HERE / "ranks-efficiency.svg": chart(),
        PAGE: in_page(PAGE.read_text()),
    }
