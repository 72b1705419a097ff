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

from warpattn.distributed.placement import Placement
from warpattn.distributed.ranks import Ranks

__all__ = ["key_heads", "to_heads", "to_rows"]


def key_heads(heads_q: int, heads_kv: int, ranks: int) -> list[int]:
    """The key heads that each rank's query heads read, rank after rank, as many for each.

    Within a rank query head h reads key head h // (its query heads / its key heads), as everywhere.
    """
    shared, mine = heads_q // heads_kv, heads_q // ranks
    together = math.gcd(shared, mine)
    return [head // shared for head in range(0, heads_q, together)]


def to_heads(x: Tensor, ranks: Ranks, placement: Placement) -> Tensor:
    """(B, S, H, D) of all heads and this rank's rows to (B, ranks * S, H / ranks, D), rows in their order."""
    return _Exchange.apply(x, ranks, placement, True)


def to_rows(x: Tensor, ranks: Ranks, placement: Placement) -> Tensor:
    """The inverse of `to_heads`."""
    return _Exchange.apply(x, ranks, placement, False)


class _Exchange(torch.autograd.Function):
    """One all-to-all, whose gradient is the one back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, placement: Placement, heads: bool) -> Tensor:
        ctx.given = ranks, placement, heads
        return (_heads_for_rows if heads else _rows_for_heads)(x, ranks, placement)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ranks, placement, heads = ctx.given
        return _Exchange.apply(gradients[0], ranks, placement, not heads), None, None, None


def _heads_for_rows(x: Tensor, ranks: Ranks, placement: Placement) -> Tensor:
    batch, rows, heads, dim = x.shape
    arrived = _all_to_all(torch.stack(x.chunk(ranks.size, 2)), ranks)
    whole = x.new_empty((batch, rows * ranks.size, heads // ranks.size, dim))
    for rank, part in enumerate(arrived):
        for chunk in placement.chunks(rank, rows * ranks.size):
            whole[:, chunk.whole] = part[:, chunk.local]
    return whole


def _rows_for_heads(x: Tensor, ranks: Ranks, placement: Placement) -> Tensor:
    batch, rows, heads, dim = x.shape
    parts = x.new_empty((ranks.size, batch, rows // ranks.size, heads, dim))
    for rank, part in enumerate(parts):
        for chunk in placement.chunks(rank, rows):
            part[:, chunk.local] = x[:, chunk.whole]
    return torch.cat(_all_to_all(parts, ranks).unbind(0), 2)


def _all_to_all(parts: Tensor, ranks: Ranks) -> Tensor:
    """What every rank has for this one, from what this one has for every rank [ranks, ...]."""
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=ranks.group)
    return arrived
