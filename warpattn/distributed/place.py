"""Masks and scores of a whole problem, applied to a part of it.

    places = Chunks(table)                         positions of the part's head 0, row 0 and key 0 in the whole
    PlacedMask(mask, places).keep(b, h, q, k)  =   mask.keep(b, head of h, position of q, position of k, whole lengths)

Kernels read these numbers from a small tensor instead of having them compiled in, so one compiled kernel serves every
part. Masks that depend only on the distance between query and key (`is_relative`) need none: `Distance` is compiled in,
one kernel for each distance that a window spans.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from warpattn.distributed.ranks import Ranks
from warpattn.language.expr import load, maximum, minimum
from warpattn.language.nodes import reads
from warpattn.language.ranges import POSITIONS
from warpattn.language.traced import Lengths
from warpattn.masks import And, Causal, Full, Mask, Not, Or, SlidingWindow, Span
from warpattn.masks.base import span_of
from warpattn.runtime.captures import outside_captures
from warpattn.scores import Score

Value = Any  # a symbol, a number or a tensor


class Places(ABC):
    """The positions of a part's heads, rows and keys in the whole."""

    @abstractmethod
    def lengths(self, b: Value, lens: Lengths) -> Lengths:
        """Return the lengths of the whole sequence."""

    def head(self, h: Value) -> Value:
        """Return the query head of the whole."""
        return h

    @abstractmethod
    def query(self, b: Value, q: Value, lens: Lengths) -> Value:
        """Return the position among all keys of the query at `q` among the part's keys."""

    @abstractmethod
    def key(self, k: Value) -> Value:
        """Return the position of the part's key k."""

    @abstractmethod
    def keys_below(self, bound: Value) -> Value:
        """Count the part's keys below a position; the result may be outside of 0 .. the part's keys."""


@dataclass(frozen=True)
class Distance(Places):
    """`distance` from the part's first key to its first query, for masks that depend on nothing else."""

    distance: int

    def lengths(self, b: Value, lens: Lengths) -> Lengths:
        return lens

    def query(self, b: Value, q: Value, lens: Lengths) -> Value:
        return q - (lens.k - lens.q) + self.distance

    def key(self, k: Value) -> Value:
        return k

    def keys_below(self, bound: Value) -> Value:
        return bound


@dataclass(frozen=True, eq=False)
class Chunks(Places):
    """Neighbouring heads, queries and keys.

    table: int32 (5,), the positions of head 0, of row 0 (among the keys) and of key 0, and the whole lengths.
    """

    table: Tensor

    @classmethod
    def at(cls, head: int, query: int, key: int, lens: Lengths, device: torch.device) -> Chunks:
        """Make the table of these numbers."""
        return cls(_numbers((head, query, key, lens.q, lens.k), device))

    def lengths(self, b: Value, lens: Lengths) -> Lengths:
        return Lengths(self._read(3), self._read(4))

    def head(self, h: Value) -> Value:
        return h + self._read(0)

    def query(self, b: Value, q: Value, lens: Lengths) -> Value:
        return q - (lens.k - lens.q) + self._read(1)

    def key(self, k: Value) -> Value:
        return k + self._read(2)

    def keys_below(self, bound: Value) -> Value:
        return bound - self._read(2)

    def _read(self, slot: int) -> Value:
        return position(load(self.table, slot))


@dataclass(frozen=True, eq=False)
class Pages(Places):
    """Keys dealt to `ranks` ranks in turns of `span`; queries are the newest of whole sequences.

    lengths: int32 (B,), keys of whole sequences. rank: int32 (1,), the rank of these keys.
    """

    lengths_of: Tensor
    rank: Tensor
    span: int
    ranks: int

    @classmethod
    def of(cls, lengths: Tensor, span: int, ranks: Ranks, device: torch.device) -> Pages:
        """Make the places of this rank's keys."""
        return cls(lengths, _numbers((ranks.rank,), device), span, ranks.size)

    def lengths(self, b: Value, lens: Lengths) -> Lengths:
        return Lengths(lens.q, position(load(self.lengths_of, b)))

    def query(self, b: Value, q: Value, lens: Lengths) -> Value:
        return q - lens.k + position(load(self.lengths_of, b))

    def key(self, k: Value) -> Value:
        return (k // self.span * self.ranks + load(self.rank, 0)) * self.span + k % self.span

    def keys_below(self, bound: Value) -> Value:
        whole, rest = maximum(bound, 0) // (self.span * self.ranks), maximum(bound, 0) % (self.span * self.ranks)
        return whole * self.span + minimum(maximum(rest - load(self.rank, 0) * self.span, 0), self.span)


@lru_cache
def _numbers(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Make an int32 tensor (values,), once, since a copy to a card waits for all earlier work on its stream."""
    with outside_captures(device), torch.inference_mode(False):  # later calls may save it for their backward
        return torch.tensor(values, dtype=torch.int32, device=device)


def position(x: Value) -> Value:
    """Bound an int to positions, so that sums of such ints stay in 32 bits."""
    return minimum(maximum(x, -POSITIONS), POSITIONS)


@dataclass(frozen=True)
class _Whole:
    """A mask or score of the whole, hidden from the rules that compare captured tensors with a call's sizes."""

    value: Any


@dataclass(frozen=True)
class PlacedMask(Mask):
    """A mask of the whole, for a part. It only hides; the additive part of a mask becomes a `PlacedScore`."""

    held: _Whole
    places: Places

    @classmethod
    def of(cls, mask: Mask, places: Places) -> PlacedMask:
        """Apply `mask` at `places`."""
        return cls(_Whole(mask), places)

    def keep(self, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        part = lens or Lengths(0, 0)
        at = self.places
        return self.held.value.keep(b, at.head(h), at.query(b, q, part), at.key(k), at.lengths(b, part))

    def kv_span(self, b: Value, h: Value, q_lo: Value, q_hi: Value, lens: Lengths) -> Span:
        at, whole = self.places, self.places.lengths(b, lens)
        rows = at.query(b, q_lo, lens), at.query(b, q_hi, lens)
        span = span_of(self.held.value, b, at.head(h), rows, whole).clamped(whole.k)
        return Span(*(at.keys_below(bound) for bound in span))


@dataclass(frozen=True)
class PlacedScore(Score):
    """A score of the whole, for a part."""

    held: _Whole
    places: Places

    @classmethod
    def of(cls, score: Score, places: Places) -> PlacedScore:
        """Apply `score` at `places`."""
        return cls(_Whole(score), places)

    def apply(self, s: Value, b: Value, h: Value, q: Value, k: Value, lens: Lengths | None = None) -> Value:
        part, at = lens or Lengths(0, 0), self.places
        return self.held.value.apply(s, b, at.head(h), at.query(b, q, part), at.key(k), at.lengths(b, part))


def is_relative(mask: Mask) -> bool:
    """Whether a mask depends only on the distance between query and key."""
    if isinstance(mask, And | Or):
        return is_relative(mask.left) and is_relative(mask.right)
    if isinstance(mask, Not):
        return is_relative(mask.mask)
    return isinstance(mask, Full | SlidingWindow) or (isinstance(mask, Causal) and not mask.top_left)


def depends_on(value: Mask | Score, *symbols: str) -> bool:
    """Whether a mask or score depends on one of the symbols b, h, q, k, q_lo, q_hi, len_q, len_k."""
    return not reads(value.program().key).symbols.isdisjoint(symbols)
