"""The rungs by name, each with what launching it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import naive, specialised, tma


class Rung(NamedTuple):
    """A kernel for bf16 (batch, seq, heads, 128), contiguous, seq a multiple of 128."""

    what: str
    kernel: Any
    rows: int  # queries of a program
    arguments: Callable[[Tensor, Tensor, Tensor, Tensor], dict[str, Any]]

    def grid(self, q: Tensor) -> tuple[int, int]:
        """Programs of a launch."""
        batch, seq, heads, _ = q.shape
        return seq // self.rows, batch * heads

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Callable[[], Tensor]:
        """A call that launches the kernel and returns its output, always the same tensor."""
        out = outputs(q)
        args, grid = self.arguments(q, k, v, out), self.grid(q)

        def call() -> Tensor:
            self.kernel[grid](**args, causal=causal, num_warps=4, enable_fp_fusion=True)
            return out

        return call


RUNGS = {
    "naive": Rung("one warpgroup, one step after the other", naive.attention_kernel, naive.ROWS, naive.arguments),
    "tma": Rung("TMA into two slots, beside the arithmetic", tma.attention_kernel, tma.ROWS, tma.arguments),
    "specialised": Rung(
        "a producer warp, two warpgroups, Q·K of the next tile before P·V",
        specialised.attention_kernel, specialised.ROWS, tma.arguments,
    ),
}  # fmt: skip


def outputs(q: Tensor) -> Tensor:
    """Room for the output, NaN until it is written."""
    return torch.full_like(q, float("nan"))
