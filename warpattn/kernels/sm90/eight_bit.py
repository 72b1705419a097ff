"""When Hopper's prefill multiplies 8-bit queries as they are, and what it converts. Nothing here imports Triton."""

from __future__ import annotations

from dataclasses import replace

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
    """The 8-bit keys and values that prefill makes 16-bit ones of, times their scales of blocks of columns if they have
    such, which bf16 holds. AttentionError for others, also where a plan gives prefill what decode would take."""
    found = eight_bit_of(problem)
    if found is None or not (found.columns("k") or found.columns("v")):
        return found
    if problem.dtype != torch.bfloat16 or found.queries:
        what = f"q has dtype {problem.q_dtype or problem.dtype}"
        raise AttentionError(f"{what}; with scales per block of columns prefill takes torch.bfloat16")
    return replace(found, scaled=True)
