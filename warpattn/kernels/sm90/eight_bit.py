"""What Hopper's configs say of 8-bit keys and values. Nothing in this file imports Triton."""

from __future__ import annotations

from dataclasses import dataclass

from warpattn.problem import Problem
from warpattn.problem.element import ELEMENT_OF, Element
from warpattn.problem.problem import Scales


@dataclass(frozen=True)
class EightBit:
    """8-bit keys and values, which become 16-bit operands on the way (prefill/convert.py, decode/eight_bit.py) unless
    queries have 8 bits, too (bytes.py)."""

    element: Element
    scales: Scales

    @property
    def by_token(self) -> bool:
        """Whether each token of a head has a scale of its own, of its key or its value."""
        return "token" in self.scales


def eight_bit_of(problem: Problem) -> EightBit | None:
    """The 8-bit keys and values of a problem."""
    return None if problem.kv_dtype is None else EightBit(ELEMENT_OF[problem.kv_dtype], problem.scales)
