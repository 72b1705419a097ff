"""What engines are given: requests, the lengths of their prompts, and for which model."""

from __future__ import annotations

import random
from typing import NamedTuple

from bench.engine.process import MODELS

CASES = {"1 x 4k": (1, 4096), "32 x 4k": (32, 4096), "1 x 32k": (1, 32000), "128 x 1k": (128, 1024)}
PREFILLS = ("32 x 4k", "1 x 32k")  # whose prompts are timed
MIXED = (64, 500, 3500, 128)  # requests, shortest and longest prompt, new tokens: chunks beside decoding requests


class Case(NamedTuple):
    """A case of one model, or of all."""

    model: str | None
    name: str

    def of(self, model: str) -> bool:
        return self.model in (None, model)


def case_of(text: str) -> Case:
    """From "CASE" or "MODEL CASE"; ValueError for others."""
    first, _, rest = text.partition(" ")
    case = Case(first, rest) if first in MODELS else Case(None, text)
    if case.name not in (*CASES, "mixed"):
        raise ValueError(text)
    return case


def lengths_of(case: str) -> tuple[int, ...]:
    """Of the prompts."""
    if case == "mixed":
        requests, shortest, longest, _ = MIXED
        chance = random.Random(0)
        return tuple(chance.randint(shortest, longest) for _ in range(requests))
    requests, length = CASES[case]
    return (length,) * requests
