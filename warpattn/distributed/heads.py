"""All to all: from a part of the sequence of every head to the whole sequence of some heads, and back.

    rank r holds rows r of all heads   ── rows_of_heads ──▶   rank r holds all rows of its heads
                                       ◀── heads_of_rows ──

All tensors of an exchange travel at once, while a rank copies its own rows. None travels beside an attention kernel: it
holds every SM, and NCCL's kernels would wait for one.
Where query heads of a rank share key heads with those of another, both get them (`copies_of_key_heads`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


class _Trade(NamedTuple):
    """What `rank` gets, and where the piece of the same shape belongs that it gives for it."""

    rank: int
    piece: Tensor
    place: Tensor


def _exchanged(tensors: Sequence[Tensor], way: Way) -> list[Tensor]:
    """What tensors become. Pieces of all travel as one batch, which uses the link better than one after the other.

    They arrive where they belong if that is contiguous memory, else by way of a copy.
    """
    wholes = [way.result(x) for x in tensors]
    both = list(zip(tensors, wholes, strict=True))
    others = [rank for rank in range(way.ranks.size) if rank != way.ranks.rank]
    trades = [each for x, whole in both for rank in others for each in _trades(way, x, whole, rank)]
    leaving = [_contiguous(each.piece) for each in trades]
    arriving = [each.place if each.place.is_contiguous() else each.piece.new_empty(each.place.shape) for each in trades]
    passing = trade(leaving, arriving, [each.rank for each in trades], way.ranks)
    del leaving  # the messages keep it until they are there
    for each in (each for x, whole in both for each in _trades(way, x, whole, way.ranks.rank)):
        _copy(each.place, each.piece)
    for each, arrived in zip(trades, passing.wait(), strict=True):
        if arrived is not each.place:
            _copy(each.place, arrived)
    return wholes


def _trades(way: Way, x: Tensor, whole: Tensor, rank: int) -> list[_Trade]:
    """What is exchanged with a rank, which may be this one."""
    return [_Trade(rank, *pair) for pair in zip(way.pieces(x, rank), way.places(whole, rank), strict=True)]


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
