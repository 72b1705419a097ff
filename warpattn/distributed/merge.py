"""Merges attention over disjoint sets of keys, by the log-sum-exp of each.

    lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

A row that sees none of a set's keys has an LSE of -inf there and weighs nothing. Sums are kept in fp32 (fp64).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Merged", "exact_dtype"]


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over operands of a dtype are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class Merged:
    """The softmax over all keys so far: out (B, S, H, Dv) and lse (B, H, S); no keys, before the first."""

    out: Tensor | None = None
    lse: Tensor | None = None

    @classmethod
    def nothing(cls, out: tuple[int, ...], like: Tensor) -> Merged:
        """No keys yet, in results of shape `out`."""
        batch, rows, heads, _ = out
        dtype = exact_dtype(like.dtype)
        lse = torch.full((batch, heads, rows), -torch.inf, dtype=dtype, device=like.device)
        return cls(torch.zeros(out, dtype=dtype, device=like.device), lse)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Take in the result of more keys for some rows."""
        assert self.out is not None and self.lse is not None
        self.out = self.out.to(self.lse.dtype)
        mine = self.lse[..., rows]
        whole = torch.logaddexp(mine, lse)
        old, new = (weight(part, whole).mT[..., None] for part in (mine, lse))
        self.out[:, rows].mul_(old).addcmul_(out.to(self.lse.dtype), new)
        self.lse[..., rows] = whole

    def add_sinks(self, sinks: Tensor) -> None:
        """Count one logit (H,) per head, which has no value, in every row's denominator."""
        assert self.out is not None and self.lse is not None
        whole = torch.logaddexp(self.lse, sinks.to(self.lse.dtype)[:, None])
        self.out = self.out.to(self.lse.dtype) * weight(self.lse, whole).mT[..., None]
        self.lse = whole


def weight(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part - whole), 0 where the part is empty."""
    return torch.exp(part - whole).masked_fill(part == -torch.inf, 0.0)
