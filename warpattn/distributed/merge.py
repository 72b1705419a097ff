"""Merges attention over disjoint sets of keys, by the log-sum-exp of each.

    lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

A row that sees none of a set's keys has an LSE of -inf there and weight 0. `merge_states` does the merging; this module
decides the order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from warpattn.runtime.merging.states import merge_states

MANY = 4


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over operands of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Waiting(NamedTuple):
    """Out and LSE of a chunk of rows over some keys, as added (level 0) or merged from MANY of the level below."""

    level: int
    state: tuple[Tensor, Tensor]


class Merged:
    """Merges results for parts of a rank's rows into out (B, S, H, Dv) and lse (B, H, S).

    chunks: slices of the rows, ascending; every part has neighbouring ones. Results of a chunk are kept until there are
    MANY of one level, then merged into one of the next, so that a row is rounded only a few times in a long ring, and
    a card reads each result once.
    """

    def __init__(self, chunks: list[slice]) -> None:
        self.chunks = chunks
        self.waiting: list[list[Waiting]] = [[] for _ in chunks]
        self.with_sinks: set[int] = set()

    def lacks_sinks(self, rows: slice) -> bool:
        """Whether no result of these rows has counted the sinks yet."""
        return not self.with_sinks.intersection(self._within(rows))

    def add(self, rows: slice, out: Tensor, lse: Tensor, has_sinks: bool) -> None:
        """Add the result of more keys for some rows."""
        for i in self._within(rows):
            at = slice(self.chunks[i].start - rows.start, self.chunks[i].stop - rows.start)
            waiting = self.waiting[i]
            waiting.append(Waiting(0, (out[:, at], lse[..., at])))
            while len(waiting) >= MANY and waiting[-1].level == waiting[-MANY].level:
                merged = merge_states([each.state for each in waiting[-MANY:]])
                waiting[-MANY:] = [Waiting(waiting[-1].level + 1, merged)]
        self.with_sinks |= set(self._within(rows)) if has_sinks else set()

    def result(self, like: Tensor, dim: int, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Merge everything, in the dtype of `like` (B, S, H, D); values have `dim` elements."""
        batch, rows, heads, _ = like.shape
        if len(self.chunks) == 1 and (sinks is None or self.with_sinks):
            (states,) = self.waiting
            if len(states) == 1:
                return states[0].state
        out, lse = like.new_zeros((batch, rows, heads, dim)), self._no_keys((batch, heads, rows), like)
        for i, (chunk, states) in enumerate(zip(self.chunks, self.waiting, strict=True)):
            mine = out[:, chunk]
            if states:
                _, lse[..., chunk] = merge_states([each.state for each in states], out=mine)
            if sinks is not None and i not in self.with_sinks:
                whole = torch.logaddexp(lse[..., chunk], sinks.to(lse.dtype)[:, None])
                mine.copy_(mine * weight(lse[..., chunk], whole).mT[..., None])
                lse[..., chunk] = whole
        return out, lse

    def _within(self, rows: slice) -> list[int]:
        return [i for i, chunk in enumerate(self.chunks) if rows.start <= chunk.start and chunk.stop <= rows.stop]

    @staticmethod
    def _no_keys(shape: tuple[int, ...], like: Tensor) -> Tensor:
        return torch.full(shape, -torch.inf, dtype=exact_dtype(like.dtype), device=like.device)


class Sum:
    """A sum of parts (B, S, ...) in fp32 (fp64), rounded once. The newest part is kept separately, so that the last
    addition and the rounding are one pass over memory."""

    def __init__(self, like: Tensor) -> None:
        self.like = like  # shape, dtype and device of the rounded sum
        self.total: Tensor | None = None
        self.newest: tuple[slice, Tensor] | None = None

    def add(self, rows: slice, part: Tensor | None) -> None:
        """Add a part to a slice of dimension 1; None adds nothing."""
        if part is None:
            return
        if self.newest is not None:
            self.exact()
        if self.total is None and part.shape == self.like.shape:
            self.total = part
        else:
            self.newest = rows, part

    def exact(self) -> Tensor:
        """Return the sum in full precision."""
        dtype = exact_dtype(self.like.dtype)
        total = torch.zeros_like(self.like, dtype=dtype) if self.total is None else self.total.to(dtype)
        if self.newest is not None:
            rows, part = self.newest
            total[_index(part, rows)] += part
        self.total, self.newest = total, None
        return total

    def rounded(self) -> Tensor:
        """Return the sum in the dtype of `like`."""
        if self.total is None:
            return self.exact().to(self.like.dtype)
        rounded = self.total.to(self.like.dtype)
        if self.newest is None:
            return rounded
        rows, part = self.newest
        mine = _index(part, rows)
        torch.add(self.total[mine], part, out=rounded[mine])
        if rounded is self.total:  # same dtype: it contains the part now
            self.newest = None
        return rounded


def _index(part: Tensor, rows: slice) -> tuple[slice, ...]:
    """Index a slice of dimension 1, or everything without that dimension."""
    return (slice(None), rows) if part.ndim > 1 else (slice(None),)


def merged(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge results over n disjoint sets of keys, out (n, B, S, H, Dv) and lse (n, B, H, S), in the dtype of lse.

    Sums as a binary tree over n padded to a power of two, so that empty sets at the end change no bit.
    """
    logit = None if sinks is None else sinks.to(lse.dtype)[:, None]
    peak = lse.amax(0) if logit is None else torch.maximum(lse.amax(0), logit)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    p = weight(lse, peak.expand_as(lse))
    total = _tree_sum(p) if logit is None else _tree_sum(p) + torch.exp(logit - peak)
    sums = _tree_sum(p.mT[..., None] * out)
    return sums / total.masked_fill(total == 0, 1.0).mT[..., None], peak + torch.log(total)


def _tree_sum(x: Tensor) -> Tensor:
    """Sum over the first dimension, neighbours first."""
    while len(x) > 1:
        x = torch.cat([x, torch.zeros_like(x[:1])]) if len(x) % 2 else x
        x = x[0::2] + x[1::2]
    return x[0]


def weight(part: Tensor, whole: Tensor) -> Tensor:
    """Return exp(part - whole), 0 where the part is empty."""
    return torch.exp(part - whole).masked_fill(part == -torch.inf, 0.0)
