"""What Hopper's configs say of 8-bit keys and values. Nothing in this file imports Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warpattn.problem import Problem
from warpattn.problem.element import ELEMENT_OF, Element
from warpattn.problem.problem import Scales

PRODUCT_SCALES = (None, "tensor", "head")  # of products of 8 bits


@dataclass(frozen=True)
class EightBit:
    """8-bit keys and values, and perhaps queries: they become 16-bit operands on the way (prefill/convert.py,
    decode/eight_bit.py) unless products have 8 bits (bytes.py)."""

    element: Element
    scales: Scales
    queries: bool = False  # whether these have 8 bits, too

    @property
    def by_token(self) -> bool:
        """Whether each token of a head has a scale of its own, of its key or its value."""
        return "token" in self.scales


def eight_bit_of(problem: Problem) -> EightBit | None:
    """The 8-bit keys and values of a problem."""
    if problem.kv_dtype is None:
        return None
    return EightBit(ELEMENT_OF[problem.kv_dtype], problem.scales, problem.q_dtype is not None)


def multiplies_bytes(problem: Problem) -> bool:
    """Whether prefill multiplies 8-bit queries as they are: values are transposed before, which pages cannot be, and
    fp32 sums leave no place for a factor of each token."""
    scaled = all(scale in PRODUCT_SCALES for scale in problem.scales)
    return problem.q_dtype == torch.float8_e4m3fn and problem.kind in ("dense", "ragged") and scaled
