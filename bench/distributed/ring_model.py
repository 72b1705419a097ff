"""A model, not a measurement: how much of a ring's time is attention, for more ranks than there are cards here.

    a step     max(attention of a block, transfer of the next keys) + one pass over the output to merge it
    backward   the same with 2.5 times the products; keys and their sums in fp32 travel; the last sums travel alone

It is fed with what was measured: TFLOP/s of one card by the length of a block, and the rate of the link between two
cards of a host. The rate between hosts is assumed. Causal calls in zig-zag placement: each step has the same work.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "h200"
DIM, BYTES, SUM_BYTES = 128, 2, 4
HOST = 8  # cards of a host
BETWEEN_HOSTS = 50e9  # bytes per second a card and direction: one 400 Gb/s port each; assumed
MEMORY = 4.0e12  # bytes per second of an H200's memory, of 4.8 by its data sheet
BACKWARD = 2.5  # products of the backward, in those of the forward
# What a rank of two takes beyond its operands, by (way, both passes): in its keys and values, in its queries, when it
# takes most. With heads exchanged that is one of two moments: before the kernels of a pass, or after them.
PARTS = {
    ("ring", False): [(1, 2.5)],
    ("ring", True): [(7, 3.5)],
    ("ulysses", False): [(1.5, 1.5), (0, 2.5)],
    ("ulysses", True): [(2, 7), (3.5, 4.5)],
}


@dataclass(frozen=True)
class Rates:
    """What was measured on one host."""

    forward: dict[int, float]  # FLOP/s by the tokens of a block
    backward: float  # FLOP/s relative to the forward's
    link: float  # bytes per second

    def of_block(self, tokens: int) -> float:
        """FLOP/s of a block of so many tokens: of the nearest shorter one that was measured."""
        known = sorted(self.forward)
        return self.forward[known[max(0, bisect_left(known, tokens + 1) - 1)]]


@dataclass(frozen=True)
class Ring:
    """A causal call over `tokens` in all, on `ranks`."""

    tokens: int
    ranks: int
    heads: int = 32
    heads_kv: int = 8

    def efficiency(self, rates: Rates, backward: bool) -> float:
        """Time of the attention alone over the time of everything, for the forward or for both passes."""
        rows = self.tokens // self.ranks
        attention = 2.0 * self.heads * DIM * rows**2 / rates.of_block(rows)  # seconds a step
        link = rates.link if self.ranks <= HOST else BETWEEN_HOSTS
        keys = 2 * rows * self.heads_kv * DIM  # elements of K and V
        merge = 3 * rows * self.heads * DIM * BYTES / MEMORY
        ideal = attention * self.ranks
        spent = self.ranks * max(attention, keys * BYTES / link) + (self.ranks - 1) * merge
        if not backward:
            return ideal / spent
        attention *= BACKWARD / rates.backward
        sums = 3 * (rows * self.heads * DIM + keys) * SUM_BYTES / MEMORY  # gradients of queries and keys
        spent += self.ranks * (max(attention, keys * (BYTES + SUM_BYTES) / link) + sums) + keys * BYTES / link
        return (ideal + attention * self.ranks) / spent


def memory(way: str, backward: bool, rows: int, heads: int, heads_kv: int) -> float:
    """GiB that a rank of two takes at most beyond its operands of `rows` rows, docs/distributed.md says for what."""
    heads_taken = max(keys * 2 * heads_kv + queries * heads for keys, queries in PARTS[way, backward])
    return heads_taken * rows * DIM * BYTES / 2**30


def record() -> dict[str, Any]:
    """The newest record of several cards."""
    return json.loads(sorted(RESULTS.glob("*-distributed.json"))[-1].read_text())


def timed(found: dict[str, Any], way: str, tokens: int, backward: bool, heads: int = 32) -> dict[str, Any]:
    """The first result of a case."""
    wanted = {"way": way, "tokens": tokens, "backward": backward, "heads": heads}
    return next(x["results"] for x in found["cases"] if wanted.items() <= x["case"].items())


def rates() -> Rates:
    """From the records: blocks of 1k to 16k tokens without a mask, and one card's causal calls of 64k."""
    blocks = json.loads((RESULTS / "2026-11-28.json").read_text())["cases"]
    named = {entry["case"]["name"]: entry["results"]["warpattn"] for entry in blocks}
    forward = {1024 * n: named[f"d128-{16 // n}x{n}k-full"]["tflops"] * 1e12 for n in (1, 2, 4, 8, 16)}
    found = record()
    one, both = (timed(found, "one card", found["settings"]["tokens"] // 2, backward) for backward in (False, True))
    forward[found["settings"]["tokens"] // 2] = one["tflops"] * 1e12
    backward = BACKWARD / ((1 + BACKWARD) * one["tflops"] / both["tflops"] - 1)
    return Rates(forward, backward, found["link_gb_s"] * 1e9)
