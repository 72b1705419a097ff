"""When Hopper's prefill multiplies 8-bit queries as they are. Nothing in this file imports Triton."""

from __future__ import annotations

import torch

from warpattn.problem import Problem

PRODUCT_SCALES = (None, "tensor", "head")  # of products of 8 bits


def multiplies_bytes(problem: Problem) -> bool:
    """Whether prefill multiplies 8-bit queries as they are: values are transposed before, which pages cannot be, and
    fp32 sums leave no place for a factor of each token."""
    scaled = all(scale in PRODUCT_SCALES for scale in problem.scales)
    return problem.q_dtype == torch.float8_e4m3fn and problem.kind in ("dense", "ragged") and scaled
