"""All to all: from a part of the sequence of every head to the whole sequence of some heads, and back.

    rank r holds rows r of all heads   ── all to all ──▶   rank r holds all rows of its heads

A rank's heads travel in batches, each by messages of its own, so that one batch arrives while another is computed:

    send_heads ─┬─ of batch 0 ─▶ receive_rows ─▶ attention ─▶ send_rows ─┬─▶ receive_heads
                └─ of batch 1 ─▶ receive_rows ─▶ attention ─▶ send_rows ─┘

Gradients take the same way back: that of `receive_heads` sends, that of `send_rows` receives, and so on. Where query
heads of a rank share key heads with those of another, both get them (`key_heads`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from warpattn.distributed.placement import Placement
from warpattn.distributed.ranks import Ranks

MOST_BATCHES = 4
LEAST_ROWS = 1 << 17  # of all query heads of a batch: a thousand tiles

__all__ = ["Transfer", "batches_of", "key_heads", "receive_heads", "receive_rows", "send_heads", "send_rows"]


def key_heads(heads_q: int, heads_kv: int, ranks: int) -> list[int]:
    """The key heads that each rank's query heads read, rank after rank, as many for each.

    Within a rank query head h reads key head h // (its query heads / its key heads), as everywhere.
    """
    shared, mine = heads_q // heads_kv, heads_q // ranks
    together = math.gcd(shared, mine)
    return [head // shared for head in range(0, heads_q, together)]


def batches_of(rows: int, heads: int, heads_kv: int) -> int:
    """In how many batches a rank's heads travel: more leave fewer messages unhidden, if each still fills a card."""
    fitting = [n for n in range(1, MOST_BATCHES + 1) if heads_kv % n == 0 and rows * heads >= n * LEAST_ROWS]
    return fitting[-1] if fitting else 1


class Transfer:
    """One all-to-all, started and waited for: of what this rank has for every rank, [ranks, ...]."""

    def __init__(self, ranks: Ranks, placement: Placement) -> None:
        self.ranks = ranks
        self.placement = placement
        self.work: dist.Work | None = None
        self.leaving: Tensor | None = None  # has to live until it has left

    def start(self, parts: Tensor) -> Tensor:
        """What will have arrived after `wait`."""
        self.leaving, arriving = parts, torch.empty_like(parts)
        self.work = dist.all_to_all_single(arriving, parts, group=self.ranks.group, async_op=True)
        return arriving

    def wait(self) -> None:
        """On a card, for kernels that torch's current stream is given from now on."""
        if self.work is not None:
            self.work.wait()
        self.work = self.leaving = None


def send_heads(batches: list[list[Transfer]], *tensors: Tensor) -> list[list[Tensor]]:
    """Send heads of tensors (B, S, H, D): for each batch what arrives of each tensor, for `receive_rows`."""
    sent = _SendHeads.apply(batches, *tensors)
    return [list(sent[i : i + len(tensors)]) for i in range(0, len(sent), len(tensors))]


def receive_rows(arriving: Tensor, transfer: Transfer) -> Tensor:
    """(B, ranks * S, H / ranks / batches, D) of a batch, rows in their order."""
    return _ReceiveRows.apply(arriving, transfer)


def send_rows(x: Tensor, transfer: Transfer) -> Tensor:
    """Send rows of a batch (B, ranks * S, heads, D) to their ranks: what arrives, for `receive_heads`."""
    return _SendRows.apply(x, transfer)


def receive_heads(arriving: list[Tensor], transfers: list[Transfer]) -> Tensor:
    """(B, S, H, D) of all heads from those of all ranks and batches."""
    return _ReceiveHeads.apply(transfers, *arriving)


class _SendHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batches: list[list[Transfer]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.batches = batches
        cut = [_cut_heads(x, transfers) for x, *transfers in zip(tensors, *batches, strict=True)]
        arriving = [transfers[i].start(cut[i][b]) for b, transfers in enumerate(batches) for i in range(len(tensors))]
        given = [i for i, x in enumerate(tensors) if not x.requires_grad]
        ctx.mark_non_differentiable(*(x for i in given for x in arriving[i :: len(tensors)]))
        return tuple(arriving)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        wanted = ctx.needs_input_grad[1:]
        parts = [(gradients[i :: len(wanted)], [each[i] for each in ctx.batches]) for i in range(len(wanted))]
        return None, *(_join_heads(*part) if needed else None for part, needed in zip(parts, wanted, strict=True))


class _ReceiveRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        return _join_rows(arriving, transfer)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.transfer.start(_cut_rows(gradients[0], ctx.transfer)), None


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.start(_cut_rows(x, transfer))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _join_rows(gradients[0], ctx.transfer), None


class _ReceiveHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfers: list[Transfer], *arriving: Tensor) -> Tensor:
        ctx.transfers = transfers
        return _join_heads(arriving, transfers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        parts = _cut_heads(gradients[0], ctx.transfers)
        return None, *(each.start(part) for each, part in zip(ctx.transfers, parts, strict=True))


def _cut_heads(x: Tensor, transfers: list[Transfer]) -> list[Tensor]:
    """(B, S, H, D) as [ranks, B, S, heads of a batch, D] for each batch."""
    ranks = transfers[0].ranks.size
    whole = x.unflatten(2, (ranks, len(transfers), x.shape[2] // ranks // len(transfers)))
    return [part.movedim(2, 0).contiguous() for part in whole.unbind(3)]


def _join_heads(arriving: tuple[Tensor, ...], transfers: list[Transfer]) -> Tensor:
    """The inverse of `_cut_heads`, once everything has arrived."""
    ranks, batch, rows, heads, dim = arriving[0].shape
    whole = arriving[0].new_empty((batch, rows, ranks, len(transfers), heads, dim))
    for part, transfer, place in zip(arriving, transfers, whole.unbind(3), strict=True):
        transfer.wait()
        place.copy_(part.movedim(0, 2))
    return whole.flatten(2, 4)


def _cut_rows(x: Tensor, transfer: Transfer) -> Tensor:
    """(B, ranks * S, H, D) as [ranks, B, S, H, D]."""
    batch, rows, heads, dim = x.shape
    ranks = transfer.ranks.size
    parts = x.new_empty((ranks, batch, rows // ranks, heads, dim))
    for rank, part in enumerate(parts):
        for chunk in transfer.placement.chunks(rank, rows):
            part[:, chunk.local] = x[:, chunk.whole]
    return parts


def _join_rows(arriving: Tensor, transfer: Transfer) -> Tensor:
    """The inverse of `_cut_rows`, once everything has arrived."""
    ranks, batch, rows, heads, dim = arriving.shape
    transfer.wait()
    whole = arriving.new_empty((batch, rows * ranks, heads, dim))
    for rank, part in enumerate(arriving):
        for chunk in transfer.placement.chunks(rank, rows * ranks):
            whole[:, chunk.whole] = part[:, chunk.local]
    return whole
