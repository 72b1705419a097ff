"""All to all: from a part of the sequence of every head to the whole sequence of some heads, and back.

    rank r holds rows r of all heads   ── rows_of_heads ──▶   rank r holds all rows of its heads
                                       ◀── heads_of_rows ──

All tensors of an exchange leave before the first is waited for, so one is copied while another travels. None travels
beside an attention kernel: it holds every SM, and NCCL's kernels would wait for one.
Where query heads of a rank share key heads with those of another, both get them (`key_heads`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.distributed.exchange import Messages, trade
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
        exchanged = _exchanged([g for g in gradients if g is not None], ctx.back)
        return None, None, *(None if g is None else next(exchanged) for g in gradients)


def _exchanged(tensors: Sequence[Tensor], way: Way) -> Iterator[Tensor]:
    """What tensors become. All leave at once; results and messages take memory one tensor after the other."""
    left = [_leave(x, way) for x in tensors][::-1]
    for x in tensors:
        yield _arrive(x, way, left.pop())


def _leave(x: Tensor, way: Way) -> Messages:
    """Start to send a tensor's pieces and to receive the others'."""
    others = _others(way.ranks)
    return trade([_message(way.pieces(x, rank)) for rank in others], others, way.ranks)


def _arrive(x: Tensor, way: Way, passing: Messages) -> Tensor:
    """What the tensor becomes: its own pieces, copied while others travel, and those that arrive."""
    whole, mine = way.result(x), way.ranks.rank
    _fill(way.places(whole, mine), way.pieces(x, mine))
    for message, rank in zip(passing.wait(), _others(way.ranks), strict=True):
        places = way.places(whole, rank)
        _fill(places, message.chunk(len(places), 1))
    return whole


def _others(ranks: Ranks) -> list[int]:
    return [rank for rank in range(ranks.size) if rank != ranks.rank]


def _message(pieces: list[Tensor]) -> Tensor:
    """Pieces as one contiguous tensor: (B, S, heads, D), S the rows of all pieces, which have equally many."""
    if len(pieces) == 1 and pieces[0].is_contiguous():
        return pieces[0]
    batch, rows, heads, dim = pieces[0].shape
    message = pieces[0].new_empty((batch, rows * len(pieces), heads, dim))
    _fill(message.chunk(len(pieces), 1), pieces)
    return message


def _fill(places: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
    for place, piece in zip(places, pieces, strict=True):
        _copy(place, piece)


def _copy(into: Tensor, x: Tensor) -> None:
    """Copy by 16 bytes where addresses allow it: torch's kernel for strided tensors moves one element a thread."""
    if _is_wide(into) and _is_wide(x):
        into, x = into.view(WIDE), x.view(WIDE)
    into.copy_(x)


def _is_wide(x: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes and is a multiple of 16 bytes long."""
    steps = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and all(step * x.element_size() % WIDE.itemsize == 0 for step in steps)
