"""When Hopper's prefill multiplies 8-bit queries as they are, and what it converts. Nothing here imports Triton."""

from __future__ import annotations

import torch

from warpattn.errors import AttentionError
from warpattn.problem import Problem
from warpattn.problem.scales import EightBit, eight_bit_of

PRODUCT_SCALES = (None, "tensor", "head")  # of products of 8 bits


def multiplies_bytes(problem: Problem) -> bool:
    """Whether prefill multiplies 8-bit queries as they are: values are transposed before, which pages cannot be, and
    fp32 sums leave no place for a factor of each token."""
    scaled = all(scale in PRODUCT_SCALES for scale in problem.scales)
    return problem.q_dtype == torch.float8_e4m3fn and problem.kind in ("dense", "ragged") and scaled


def converted(problem: Problem) -> EightBit | None:
    """The 8-bit keys and values that prefill makes 16-bit ones of. AttentionError for scales of blocks of columns, also
    where a plan gives prefill what decode would take."""
    if any(isinstance(per, int) for per in problem.scales):
        what = f"k has a scale per {problem.scales.k} and v per {problem.scales.v}"
        raise AttentionError(f"{what}; scales per block of columns are of decode, and this call or plan needs prefill")
    return eight_bit_of(problem)
