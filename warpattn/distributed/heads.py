"""All to all: from a part of the sequence of every head to the whole sequence of some heads, and back.

    rank r holds rows r of all heads   ── all_to_all ──▶   rank r holds all rows of its heads

Where query heads of a rank share key heads with those of another, both get them (`key_heads`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from warpattn.distributed.ranks import Ranks

__all__ = ["key_heads", "to_heads", "to_rows"]


def key_heads(heads_q: int, heads_kv: int, ranks: int) -> list[int]:
    """The key heads that each rank's query heads read, rank after rank, as many for each.

    Within a rank query head h reads key head h // (its query heads / its key heads), as everywhere.
    """
    shared, mine = heads_q // heads_kv, heads_q // ranks
    together = math.gcd(shared, mine)
    return [head // shared for head in range(0, heads_q, together)]


def to_heads(x: Tensor, ranks: Ranks) -> Tensor:
    """(B, S, H, D) of all heads and this rank's rows to (B, ranks * S, H / ranks, D), rows rank after rank."""
    return _Exchange.apply(x, ranks, True)


def to_rows(x: Tensor, ranks: Ranks) -> Tensor:
    """The inverse of `to_heads`."""
    return _Exchange.apply(x, ranks, False)


class _Exchange(torch.autograd.Function):
    """One all-to-all, whose gradient is the one back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, heads: bool) -> Tensor:
        ctx.given = ranks, heads
        return _exchanged(x, ranks, heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ranks, heads = ctx.given
        return _Exchange.apply(gradients[0], ranks, not heads), None, None


def _exchanged(x: Tensor, ranks: Ranks, heads: bool) -> Tensor:
    split, joined = (2, 1) if heads else (1, 2)
    parts = torch.stack(x.chunk(ranks.size, split))  # [rank, B, S, H, D], what each rank gets
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=ranks.group)
    return torch.cat(arrived.unbind(0), joined)
