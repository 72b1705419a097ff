"""All to all: from a part of the sequence of every head to the whole sequence of some heads, and back.

    rank r holds rows r of all heads   ── rows_of_heads ──▶   rank r holds all rows of its heads
                                       ◀── heads_of_rows ──

All tensors of an exchange leave before the first is waited for, so one is copied while another travels. None travels
beside an attention kernel: it holds every SM, and NCCL's kernels would wait for one.
Where query heads of a rank share key heads with those of another, both get them (`key_heads`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.distributed.exchange import trade
from warpattn.distributed.placement import Placement
from warpattn.distributed.ranks import Ranks

WIDE = torch.complex128  # 16 bytes


def key_heads(heads_q: int, heads_kv: int, ranks: int) -> list[int]:
    """The key heads that each rank's query heads read, rank after rank, as many for each.

    Within a rank query head h reads key head h // (its query heads / its key heads), as everywhere.
    """
    shared, mine = heads_q // heads_kv, heads_q // ranks
    together = math.gcd(shared, mine)
    return [head // shared for head in range(0, heads_q, together)]


def rows_of_heads(ranks: Ranks, placement: Placement, *tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, S, H, D) of all heads and this rank's rows to (B, ranks * S, H / ranks, D), rows in their order."""
    return _Exchange.apply(HeadsToRows(ranks, placement), RowsToHeads(ranks, placement), *tensors)


def heads_of_rows(ranks: Ranks, placement: Placement, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The inverse of `rows_of_heads`."""
    return _Exchange.apply(RowsToHeads(ranks, placement), HeadsToRows(ranks, placement), *tensors)


class HeadsToRows(NamedTuple):
    """What travels between two ranks on the way from heads to rows: (B, S, heads of a rank, D)."""

    ranks: Ranks
    placement: Placement

    def result(self, x: Tensor) -> Tensor:
        """Room for what `x` becomes."""
        batch, rows, heads, dim = x.shape
        return x.new_empty((batch, rows * self.ranks.size, heads // self.ranks.size, dim))

    def message(self, x: Tensor, rank: int) -> Tensor:
        """What a rank gets of `x`, as a view."""
        return x.chunk(self.ranks.size, 2)[rank]

    def take(self, message: Tensor, whole: Tensor, rank: int) -> None:
        """Put what a rank sent where it belongs in the result."""
        for chunk in self.placement.chunks(rank, whole.shape[1]):
            _copy(whole[:, chunk.whole], message[:, chunk.local])


class RowsToHeads(NamedTuple):
    """The way back: (B, S, heads of a rank, D), too."""

    ranks: Ranks
    placement: Placement

    def result(self, x: Tensor) -> Tensor:
        """Room for what `x` becomes."""
        batch, rows, heads, dim = x.shape
        return x.new_empty((batch, rows // self.ranks.size, heads * self.ranks.size, dim))

    def message(self, x: Tensor, rank: int) -> Tensor:
        """What a rank gets of `x`: a copy where its rows are not neighbours."""
        parts = [x[:, chunk.whole] for chunk in self.placement.chunks(rank, x.shape[1])]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def take(self, message: Tensor, whole: Tensor, rank: int) -> None:
        """Put what a rank sent where it belongs in the result."""
        _copy(whole.chunk(self.ranks.size, 2)[rank], message)


Way = HeadsToRows | RowsToHeads


class _Exchange(torch.autograd.Function):
    """Tensors on one way; their gradients take the other."""

    @staticmethod
    def forward(ctx: Any, there: Way, back: Way, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        ctx.set_materialize_grads(False)
        return tuple(arrive() for arrive in [_leave(x, there) for x in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        started = [None if g is None else _leave(g, ctx.back) for g in gradients]
        return None, None, *(None if arrive is None else arrive() for arrive in started)


def _leave(x: Tensor, way: Way) -> Callable[[], Tensor]:
    """Start to exchange a tensor; the function waits for the others' parts and returns what it has become."""
    ranks = way.ranks
    others = [rank for rank in range(ranks.size) if rank != ranks.rank]
    passing = trade([_contiguous(way.message(x, rank)) for rank in others], others, ranks)
    whole = way.result(x)
    way.take(way.message(x, ranks.rank), whole, ranks.rank)

    def arrive() -> Tensor:
        for message, rank in zip(passing.wait(), others, strict=True):
            way.take(message, whole, rank)
        return whole

    return arrive


def _contiguous(x: Tensor) -> Tensor:
    """The tensor, or a contiguous copy."""
    if x.is_contiguous():
        return x
    into = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _copy(into, x)
    return into


def _copy(into: Tensor, x: Tensor) -> None:
    """Copy by 16 bytes where addresses allow it: torch's kernel for strided tensors moves one element a thread."""
    if _is_wide(into) and _is_wide(x):
        into, x = into.view(WIDE), x.view(WIDE)
    into.copy_(x)


def _is_wide(x: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes and is a multiple of 16 bytes long."""
    steps = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and all(step * x.element_size() % WIDE.itemsize == 0 for step in steps)
