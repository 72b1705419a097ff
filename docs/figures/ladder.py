"""Draws docs/figures/ladder.svg and makes the table of docs/ladder.md from cycles that bench/notes.md records.

`CASES` names rows of notes.md and the thousands of SM cycles that stand there; a test holds each number against its
row. The floor of a case is arithmetic: its key tiles times the cycles that the tensor core needs for one, over the
SMs of an H200; utilisation is floor over measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from docs.figures.svg import BLUE, GREY, box, picture, words

HERE = Path(__file__).parent
SMS, CYCLES = 132, 2048  # of an H200; of both products of a tile of 128 × 128 at head dim 128 (or 128 × 64 at 256)


class Case(NamedTuple):
    """A shape in bf16."""

    name: str
    batch: int
    length: int
    heads: int
    keys: int  # of a tile
    causal: bool

    @property
    def floor(self) -> float:
        """Cycles that the products alone take, spread evenly over all SMs; whole tiles on the diagonal."""
        rows, wide = self.length // 128, 128 // self.keys
        tiles = rows * (rows + 1) / 2 * wide if self.causal else rows * rows * wide
        return self.batch * self.heads * tiles * CYCLES / SMS


class Step(NamedTuple):
    """One measurement: row of bench/notes.md, what was new, thousands of cycles."""

    row: int
    what: str
    kilocycles: int

    def use(self, case: Case) -> float:
        """Part of the time in which the tensor cores had to work."""
        return case.floor / (self.kilocycles * 1000)


CASES = {
    Case("D 128, 1 × 8k, full", 1, 8192, 16, 128, False): [
        Step(1, "two warpgroups, rings, Q·K of the next tile before P·V", 1442),
        Step(2, "P carried in fp32", 1367),
        Step(4, "lazy maximum, row sums per lane, P packed in pairs", 1289),
    ],
    Case("D 128, 16 × 1k, full", 16, 1024, 16, 128, False): [
        Step(1, "two warpgroups, rings, Q·K of the next tile before P·V", 429),
        Step(7, "before: with the softmax of rows 4 and 5", 394),
        Step(7, "the producer asks, divides and loads ahead", 380),
        Step(8, "Q given back early, tail test in the tail only", 373),
        Step(9, "as few heads at a time as fill the SMs", 360),
        Step(11, "one loop over key tiles, as shipped", 355),
    ],
    Case("D 128, 1 × 16k, causal", 1, 16384, 16, 128, True): [
        Step(10, "before: tiles claimed two ahead", 2707),
        Step(10, "a tile is asked for late; even sections", 2466),
        Step(11, "one loop over key tiles, as shipped", 2537),
    ],
    Case("D 256, 1 × 16k, causal", 1, 16384, 8, 64, True): [
        Step(10, "before: tiles claimed two ahead", 2459),
        Step(10, "a tile is asked for late; even sections", 2147),
        Step(11, "one loop over key tiles, as shipped", 2172),
    ],
}


def table() -> str:
    """The steps as Markdown."""
    lines = ["| case | step | row | k cycles | tensor cores in use |", "|---|---|---|---|---|"]
    for case, steps in CASES.items():
        for i, step in enumerate(steps):
            name = case.name if i == 0 else ""
            lines.append(f"| {name} | {step.what} | {step.row} | {step.kilocycles} | {step.use(case):.0%} |")
    return "\n".join(lines) + "\n"


def chart() -> str:
    """A bar for each step, as long as the tensor cores are in use."""
    left, full, parts, y = 20, 400, [], 10
    for case, steps in CASES.items():
        parts.append(words(left, y + 16, f"{case.name}: floor {case.floor / 1000:.0f} k cycles", 13))
        y += 24
        for step in steps:
            parts += [box(left, y, full, 18), box(left, y, full * step.use(case), 18, BLUE)]
            parts.append(words(left + 6, y + 13, f"{step.use(case):.0%}", 12, "white"))
            parts.append(words(left + full + 10, y + 13, f"{step.kilocycles} k · {step.what}", 12, GREY))
            y += 22
        y += 12
    return picture(left + full + 440, y, parts)


def main() -> None:
    """Write the picture; the table is pasted into docs/ladder.md, where a test compares it."""
    (HERE / "ladder.svg").write_text(chart())


if __name__ == "__main__":
    main()
