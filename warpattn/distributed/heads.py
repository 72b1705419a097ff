"""All-to-all from a part of the sequence for every head to the whole sequence for some heads, and back.

    rank r holds rows r of all heads   ── rows_of_heads ──▶   rank r holds all rows of its heads
                                       ◀── heads_of_rows ──

All tensors of an exchange are sent at once, while a rank copies its own rows. None is sent beside an attention kernel:
that occupies every SM, and NCCL's kernels would wait for one.
Key heads that query heads of two ranks share are sent to both (`copies_of_key_heads`).
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
    """Return how often each key head is sent, so that ranks get the key heads that they read, equally many each.

    Within a rank query head h reads key head h // (its query heads / its key heads), as everywhere.
    """
    shared, mine = heads_q // heads_kv, heads_q // ranks
    return shared // math.gcd(shared, mine)


def rows_of_heads(ranks: Ranks, placement: Placement, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert (B, S, H, D), all heads of this rank's rows, to (B, ranks * S, H / ranks, D), rows in sequence order."""
    return _Exchange.apply(HeadsToRows(ranks, placement), RowsToHeads(ranks, placement), *tensors)


def heads_of_rows(ranks: Ranks, placement: Placement, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Invert `rows_of_heads`."""
    return _Exchange.apply(RowsToHeads(ranks, placement), HeadsToRows(ranks, placement), *tensors)


class HeadsToRows(NamedTuple):
    """The direction from heads to rows; ranks exchange pieces (B, S, heads of a rank, D)."""

    ranks: Ranks
    placement: Placement

    def result(self, x: Tensor) -> Tensor:
        """Allocate the result for `x`."""
        batch, rows, heads, dim = x.shape
        return x.new_empty((batch, rows * self.ranks.size, heads // self.ranks.size, dim))

    def pieces(self, x: Tensor, rank: int) -> list[Tensor]:
        """Return the pieces of `x` for a rank, as views."""
        heads = x.chunk(self.ranks.size, 2)[rank]
        return [heads[:, chunk.local] for chunk in self.placement.chunks(rank, x.shape[1] * self.ranks.size)]

    def places(self, whole: Tensor, rank: int) -> list[Tensor]:
        """Return the places of a rank's pieces in the result, as views."""
        return [whole[:, chunk.whole] for chunk in self.placement.chunks(rank, whole.shape[1])]


class RowsToHeads(NamedTuple):
    """The direction back."""

    ranks: Ranks
    placement: Placement

    def result(self, x: Tensor) -> Tensor:
        """Allocate the result for `x`."""
        batch, rows, heads, dim = x.shape
        return x.new_empty((batch, rows // self.ranks.size, heads * self.ranks.size, dim))

    def pieces(self, x: Tensor, rank: int) -> list[Tensor]:
        """Return the pieces of `x` for a rank, as views."""
        return [x[:, chunk.whole] for chunk in self.placement.chunks(rank, x.shape[1])]

    def places(self, whole: Tensor, rank: int) -> list[Tensor]:
        """Return the places of a rank's pieces in the result, as views."""
        heads = whole.chunk(self.ranks.size, 2)[rank]
        return [heads[:, chunk.local] for chunk in self.placement.chunks(rank, whole.shape[1] * self.ranks.size)]


Way = HeadsToRows | RowsToHeads


class _Exchange(torch.autograd.Function):
    """Exchanges tensors in one direction, their gradients in the other."""

    @staticmethod
    def forward(ctx: Any, there: Way, back: Way, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ways = back, there
        ctx.set_materialize_grads(False)
        return tuple(_exchanged(tensors, there))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        exchanged = iter(_Exchange.apply(*ctx.ways, *(g for g in gradients if g is not None)))
        return None, None, *(None if g is None else next(exchanged) for g in gradients)


class _Trade(NamedTuple):
    """The piece that `rank` gets, and the place of the equally shaped piece that it sends in return."""

    rank: int
    piece: Tensor
    place: Tensor


def _exchanged(tensors: Sequence[Tensor], way: Way) -> list[Tensor]:
    """Exchange tensors. All pieces are sent as one batch, which uses the link better than one after the other.

    A piece is received in its place if that is contiguous, else in a buffer that is copied.
    """
    wholes = [way.result(x) for x in tensors]
    both = list(zip(tensors, wholes, strict=True))
    others = [rank for rank in range(way.ranks.size) if rank != way.ranks.rank]
    trades = [each for x, whole in both for rank in others for each in _trades(way, x, whole, rank)]
    leaving = [_contiguous(each.piece) for each in trades]
    arriving = [each.place if each.place.is_contiguous() else each.piece.new_empty(each.place.shape) for each in trades]
    passing = trade(leaving, arriving, [each.rank for each in trades], way.ranks)
    del leaving  # the messages keep it until they are received
    for each in (each for x, whole in both for each in _trades(way, x, whole, way.ranks.rank)):
        _copy(each.place, each.piece)
    for each, arrived in zip(trades, passing.wait(), strict=True):
        if arrived is not each.place:
            _copy(each.place, arrived)
    return wholes


def _trades(way: Way, x: Tensor, whole: Tensor, rank: int) -> list[_Trade]:
    """List the pieces to exchange with a rank, which may be this one."""
    return [_Trade(rank, *pair) for pair in zip(way.pieces(x, rank), way.places(whole, rank), strict=True)]


def _contiguous(x: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy."""
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
