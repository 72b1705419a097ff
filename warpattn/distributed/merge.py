"""Merges attention over disjoint sets of keys, by the log-sum-exp of each.

    lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

A row that sees none of a set's keys has an LSE of -inf there and weighs nothing. Sums are kept in fp32 (fp64).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Merged", "Sum", "exact_dtype", "merged", "weight"]


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

    def add(self, rows: slice, out: Tensor, lse: Tensor, dtype: torch.dtype) -> None:
        """Take in the result of more keys for some rows; from then on the output is kept in `dtype`.

        One product and one fused sum, which read and write the output's own dtype: on a card these are bound by memory.
        """
        assert self.out is not None and self.lse is not None
        mine = self.lse[..., rows]
        whole = torch.logaddexp(mine, lse)
        old, new = (weight(part, whole).mT[..., None] for part in (mine, lse))
        scaled = self.out[:, rows] * old  # in the dtype of the LSE
        self.out = self.out.to(dtype)
        torch.addcmul(scaled, out, new, out=self.out[:, rows])
        self.lse[..., rows] = whole

    def add_sinks(self, sinks: Tensor) -> None:
        """Count one logit (H,) per head, which has no value, in every row's denominator."""
        assert self.out is not None and self.lse is not None
        whole = torch.logaddexp(self.lse, sinks.to(self.lse.dtype)[:, None])
        self.out = self.out.to(self.lse.dtype) * weight(self.lse, whole).mT[..., None]
        self.lse = whole


@dataclass
class Sum:
    """A sum of parts (B, S, ...) in fp32 (fp64), in the parts' own dtype while there is one that covers all."""

    like: Tensor  # shape, dtype and device of the sum once rounded
    total: Tensor | None = None

    def add(self, rows: slice, part: Tensor | None) -> None:
        """Add a part to some of dimension 1; None adds nothing."""
        if part is None:
            return
        if self.total is None and part.shape == self.like.shape:
            self.total = part
            return
        self.total = self.exact()
        index = (slice(None), rows) if part.ndim > 1 else rows
        self.total[index] += part

    def exact(self) -> Tensor:
        """The sum, to be added to."""
        dtype = exact_dtype(self.like.dtype)
        return torch.zeros_like(self.like, dtype=dtype) if self.total is None else self.total.to(dtype)

    def rounded(self) -> Tensor:
        """The sum in the dtype of what it is the gradient of."""
        return self.exact().to(self.like.dtype)


def merged(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Results over n disjoint sets of keys, out (n, B, S, H, Dv) and lse (n, B, H, S), as one in the dtype of lse.

    Summed as a binary tree over n filled up to a power of two, so that empty sets at the end change no bit.
    """
    logit = None if sinks is None else sinks.to(lse.dtype)[:, None]
    peak = lse.amax(0) if logit is None else torch.maximum(lse.amax(0), logit)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    p = weight(lse, peak.expand_as(lse))
    total = _tree_sum(p) if logit is None else _tree_sum(p) + torch.exp(logit - peak)
    sums = _tree_sum(p.mT[..., None] * out)
    return sums / total.masked_fill(total == 0, 1.0).mT[..., None], peak + torch.log(total)


def _tree_sum(x: Tensor) -> Tensor:
    """The sum over the first dimension, neighbours first."""
    while len(x) > 1:
        x = torch.cat([x, torch.zeros_like(x[:1])]) if len(x) % 2 else x
        x = x[0::2] + x[1::2]
    return x[0]


def weight(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part - whole), 0 where the part is empty."""
    return torch.exp(part - whole).masked_fill(part == -torch.inf, 0.0)
