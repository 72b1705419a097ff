"""All to all: from a part of the sequence of every head to the whole sequence of some heads, and back.

    rank r holds rows r of all heads   ── rows_of_heads ──▶   rank r holds all rows of its heads
                                       ◀── heads_of_rows ──

All tensors of an exchange leave before the first is waited for, so one is copied while another travels. None travels
beside an attention kernel: it holds every SM, and NCCL's kernels would wait for one.
Where query heads of a rank share key heads with those of another, both get them (`copies_of_key_heads`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.distributed.exchange import trade
from warpattn.distributed.placement import Placement
from warpattn.distributed.ranks import Ranks

WIDE = torch.complex128  # 16 bytes


def copies_of_key_heads(heads_q: int, heads_kv: int, ranks: int) -> int:
    """How often every key head is sent, so that each rank gets those which its query heads read, and as many as others.

    Within a rank query head h reads key head h // (its query heads / its key heads), as everywhere.
    """
    shared, mine = heads_q // heads_kv, heads_q // ranks
    return shared // math.gcd(shared, mine)


def rows_of_heads(ranks: Ranks, placement: Placement, *tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, S, H, D) of all heads and this rank's rows to (B, ranks * S, H / ranks, D), rows in their order."""
    return _Exchange.apply(HeadsToRows(ranks, placement), RowsToHeads(ranks, placement), *tensors)


def heads_of_rows(ranks: Ranks, placement: Placement, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The inverse of `rows_of_heads`."""
    return _Exchange.apply(RowsToHeads(ranks, placement), HeadsToRows(ranks, placement), *tensors)


class HeadsToRows(NamedTuple):
    """The way from heads to rows: what travels between two ranks are pieces of (B, S, heads of a rank, D)."""

    ranks: Ranks
    placement: Placement

    def result(self, x: Tensor) -> Tensor:
        """Room for what `x` becomes."""
        batch, rows, heads, dim = x.shape
        return x.new_empty((batch, rows * self.ranks.size, heads // self.ranks.size, dim))

    def pieces(self, x: Tensor, rank: int) -> list[Tensor]:
        """What a rank gets of `x`, as views."""
        heads = x.chunk(self.ranks.size, 2)[rank]
        return [heads[:, chunk.local] for chunk in self.placement.chunks(rank, x.shape[1] * self.ranks.size)]

    def places(self, whole: Tensor, rank: int) -> list[Tensor]:
        """Where the pieces of a rank belong in the result, as views."""
        return [whole[:, chunk.whole] for chunk in self.placement.chunks(rank, whole.shape[1])]


class RowsToHeads(NamedTuple):
    """The way back."""

    ranks: Ranks
    placement: Placement

    def result(self, x: Tensor) -> Tensor:
        """Room for what `x` becomes."""
        batch, rows, heads, dim = x.shape
        return x.new_empty((batch, rows // self.ranks.size, heads * self.ranks.size, dim))

    def pieces(self, x: Tensor, rank: int) -> list[Tensor]:
        """What a rank gets of `x`, as views."""
        return [x[:, chunk.whole] for chunk in self.placement.chunks(rank, x.shape[1])]

    def places(self, whole: Tensor, rank: int) -> list[Tensor]:
        """Where the pieces of a rank belong in the result, as views."""
        heads = whole.chunk(self.ranks.size, 2)[rank]
        return [heads[:, chunk.local] for chunk in self.placement.chunks(rank, whole.shape[1] * self.ranks.size)]


Way = HeadsToRows | RowsToHeads


class _Exchange(torch.autograd.Function):
    """Tensors on one way; their gradients take the other."""

    @staticmethod
    def forward(ctx: Any, there: Way, back: Way, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        ctx.set_materialize_grads(False)
        return tuple(_exchanged(tensors, there))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        exchanged = iter(_exchanged([g for g in gradients if g is not None], ctx.back))
        return None, None, *(None if g is None else next(exchanged) for g in gradients)


def _exchanged(tensors: Sequence[Tensor], way: Way) -> list[Tensor]:
    """What tensors become. All leave before the first is waited for."""
    started = [_start(x, way) for x in tensors]
    return [arrive() for arrive in started]


def _start(x: Tensor, way: Way) -> Callable[[], Tensor]:
    """Start to exchange a tensor; the function waits for the others' pieces and returns what it has become.

    Pieces leave from where they are and arrive where they belong if that is contiguous memory, else by way of a copy.
    """
    whole, mine = way.result(x), way.ranks.rank
    others = [rank for rank in range(way.ranks.size) if rank != mine]
    leaving = [_contiguous(piece) for rank in others for piece in way.pieces(x, rank)]
    places = [place for rank in others for place in way.places(whole, rank)]
    arriving = [place if place.is_contiguous() else place.new_empty(place.shape) for place in places]
    passing = trade(leaving, arriving, [rank for rank in others for _ in range(way.placement.per_rank)], way.ranks)
    for place, piece in zip(way.places(whole, mine), way.pieces(x, mine), strict=True):
        _copy(place, piece)

    def arrive() -> Tensor:
        for place, arrived in zip(places, passing.wait(), strict=True):
            if arrived is not place:
                _copy(place, arrived)
        return whole

    return arrive


def _contiguous(x: Tensor) -> Tensor:
    """The tensor, or a contiguous copy."""
    if x.is_contiguous():
        return x
    into = x.new_empty(x.shape)
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
