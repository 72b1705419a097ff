"""Which chunks of a sequence each rank holds; cuts a tensor into them and joins them again.

    contiguous, 4 ranks     | 0   | 1   | 2   | 3   |          one chunk a rank
    zigzag, 4 ranks         |0|1|2|3|3|2|1|0|                  two: one from each end

Under a causal mask a row's work grows with its position, so contiguous chunks give the last rank almost twice the mean.
With one chunk from each end all ranks have equal work.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from warpattn.errors import AttentionError, many
from warpattn.torch_modes import without_autocast

PLACEMENTS = ("zigzag", "contiguous")


class Chunk(NamedTuple):
    """Neighbouring positions that a rank holds: from `start` in the rank's shard, from `position` in the sequence."""

    start: int
    position: int
    size: int

    @property
    def local(self) -> slice:
        """The chunk's slice of the shard."""
        return slice(self.start, self.start + self.size)

    @property
    def whole(self) -> slice:
        """The chunk's slice of the sequence."""
        return slice(self.position, self.position + self.size)


class Placement(NamedTuple):
    """How a sequence is split over `ranks` ranks; `name` is one of PLACEMENTS."""

    name: str
    ranks: int

    @property
    def per_rank(self) -> int:
        """The number of chunks of one rank."""
        return 2 if self.name == "zigzag" else 1

    @property
    def total(self) -> int:
        """The number of chunks of the sequence, all of one size."""
        return self.per_rank * self.ranks

    def numbers(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of one rank's chunks, ascending."""
        return (rank, self.total - 1 - rank) if self.name == "zigzag" else (rank,)

    def chunks(self, rank: int, length: int) -> list[Chunk]:
        """Return one rank's chunks of a sequence of `length`."""
        size = length // self.total
        return [Chunk(i * size, number * size, size) for i, number in enumerate(self.numbers(rank))]

    def cut(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """Cut one rank's shard from a whole tensor; raises AttentionError if it cannot be cut evenly."""
        pieces = self._pieces(x, dim)
        held = [pieces.select(dim, number) for number in self.numbers(rank)]
        with without_autocast(x.device):
            return torch.cat(held, dim)

    def join(self, x: Tensor, dim: int) -> Tensor:
        """Join the shards of all ranks, given one after the other in dimension `dim`, to the whole tensor."""
        order = [number for rank in range(self.ranks) for number in self.numbers(rank)]
        pieces = self._pieces(x, dim).unbind(dim)
        with without_autocast(x.device):
            return torch.cat([pieces[order.index(number)] for number in range(self.total)], dim)

    def _pieces(self, x: Tensor, dim: int) -> Tensor:
        length = x.shape[dim]
        if length % self.total:
            rule = f"{self.name} placement on {many(self.ranks, 'rank')} cuts it into {self.total} equal chunks"
            raise AttentionError(f"x has {many(length, 'element')} in dimension {dim}; {rule}")
        return x.unflatten(dim, (self.total, length // self.total))
