"""Splits a rank's work on the keys of one rank into a few ordinary attention calls.

    rank 1 of 4, zigzag, causal: queries 1 and 6        . hidden   # all visible   / the mask itself

    keys of rank 1 (1, 6)     of rank 0 (0, 7)      of rank 2 (2, 5)
       1  6                      0  7                  2  5
    1  /  .                   1  #  .               1  .  .         a fully hidden pair of chunks is skipped,
    6  #  /                   6  #  .               6  #  #         fully visible pairs join into one call

A rank's own block under a causal mask is a causal call: its chunks ascend, so the shard has the sequence's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from warpattn.distributed.place import Chunks, Distance, PlacedMask, PlacedScore, depends_on, is_relative
from warpattn.distributed.placement import Chunk, Placement
from warpattn.language.evaluate import evaluate_all
from warpattn.language.traced import Lengths
from warpattn.masks import And, Causal, Full, Mask
from warpattn.scores import Score, chained

HIDDEN, PARTIAL, FULL = "hidden", "partial", "full"
KEPT = 64  # problems whose calls are cached
Outline = Any  # a mask's program, None, or a pair of outlines
POSITIONAL = ("q", "k", "len_q", "len_k")


class Block(NamedTuple):
    """One attention call: some rows of a rank's queries against some of the keys that it holds."""

    rows: slice
    keys: slice
    mask: Mask
    score: Score | None


class Whole(NamedTuple):
    """The problem that ranks share, without tensors. head: this rank's first query head; None: it has all heads."""

    mask: Mask
    score: Score | None
    lens: Lengths
    head: int | None
    device: torch.device


def blocks_of(whole: Whole, placement: Placement) -> Blocks:
    """Return the calls of a problem, cached. If mask or score have tensors, the cache lasts as long as the first of
    these lives, else as long as the mask's program, which equal masks share."""
    given = [x for x in (whole.mask, whole.score) if x is not None]
    holder = next((x for x in given if x.program().tensors), whole.mask.program())
    kept: dict[Any, Blocks] = holder.__dict__.setdefault("_blocks", {})
    key = whole._replace(mask=None, score=None), placement, *(id(x.program()) for x in given)
    if key not in kept:
        if len(kept) >= KEPT:
            kept.clear()
        kept[key] = Blocks(whole, placement)
    return kept[key]


@dataclass(frozen=True, eq=False)
class Blocks:
    """The calls of every pair of ranks."""

    whole: Whole
    placement: Placement
    made: dict[tuple[int, int], list[Block]] = field(default_factory=dict)

    @cached_property
    def steps(self) -> int:
        """How many blocks, its own included, each rank needs until all have the keys that they see."""
        ranks = self.placement.ranks
        for step in reversed(range(1, ranks)):
            if any(self.is_needed(rank, (rank - step) % ranks) for rank in range(ranks)):
                return step + 1
        return 1

    def of(self, rank: int, source: int) -> list[Block]:
        """Return the calls of `rank` with the keys of `source`; together they cover every visible pair once."""
        if (rank, source) not in self.made:
            self.made[rank, source] = self._of(rank, source)
        return self.made[rank, source]

    def rows(self, rank: int) -> list[slice]:
        """Return the chunks of a rank's queries; every call has neighbouring ones."""
        return [chunk.local for chunk in self.placement.chunks(rank, self.whole.lens.q)]

    def is_needed(self, rank: int, source: int) -> bool:
        """Whether `rank` may see a key of `source`, judged without reading tensors."""
        mine, theirs = self._chunks(rank, source)
        return any(self._kind(a, b) != HIDDEN for a in mine for b in theirs)

    def _of(self, rank: int, source: int) -> list[Block]:
        queries, keys = self._chunks(rank, source)
        if rank == source and self._is_itself() and queries[0].size:
            return [Block(whole_of(queries), whole_of(keys), self.whole.mask, self.whole.score)]
        kinds = [[self._kind(mine, theirs) for theirs in keys] for mine in queries]
        return [*self._partial(queries, keys, kinds), *self._full(queries, keys, kinds)]

    def _chunks(self, rank: int, source: int) -> tuple[list[Chunk], list[Chunk]]:
        """Return the chunks of queries of `rank` and of keys of `source`."""
        lens = self.whole.lens
        return self.placement.chunks(rank, lens.q), self.placement.chunks(source, lens.k)

    def _is_itself(self) -> bool:
        """Whether a rank's own block can use mask and score unchanged: it is the whole, or in its order."""
        mask, score, lens, head, _ = self.whole
        if self.placement.total == 1:
            return head is None or not (depends_on(mask, "h") or (score is not None and depends_on(score, "h")))
        return lens.q == lens.k and mask == Causal() and not self._score_is_placed

    @cached_property
    def score(self) -> Score | None:
        """The score, with what the mask adds."""
        return chained(self.whole.score, self.whole.mask.additive())

    @cached_property
    def _outline(self) -> Outline:
        return outline(self.whole.mask)

    @cached_property
    def _score_is_placed(self) -> bool:
        """Whether the score of a part depends on the part's place in the whole."""
        score, heads = self.score, () if self.whole.head is None else ("h",)
        return score is not None and depends_on(score, *POSITIONAL, *heads)

    def _kind(self, mine: Chunk, theirs: Chunk) -> str:
        shift = self.whole.lens.k - self.whole.lens.q
        rows = range(mine.position + shift, mine.position + mine.size + shift)
        keys = range(theirs.position, theirs.position + theirs.size)
        return visibility(self._outline, rows, keys, self.whole.lens) if mine.size and theirs.size else HIDDEN

    def _partial(self, queries: list[Chunk], keys: list[Chunk], kinds: list[list[str]]) -> Iterator[Block]:
        """Yield pairs of chunks that need the mask; all visible ones if the score depends on positions."""
        alone = {PARTIAL, FULL} if self._score_is_placed else {PARTIAL}
        for mine, row in zip(queries, kinds, strict=True):
            for theirs, kind in zip(keys, row, strict=True):
                if kind in alone:
                    yield Block(mine.local, theirs.local, *self._placed(mine, theirs, kind))

    def _full(self, queries: list[Chunk], keys: list[Chunk], kinds: list[list[str]]) -> Iterator[Block]:
        """Yield fully visible pairs of chunks, neighbours joined."""
        if self._score_is_placed:
            return
        joined: dict[tuple[int, int], list[Chunk]] = {}
        for mine, row in zip(queries, kinds, strict=True):
            for span in neighbours([theirs for theirs, kind in zip(keys, row, strict=True) if kind == FULL]):
                joined.setdefault((span.start, span.stop), []).append(mine)
        for (start, stop), chunks in joined.items():
            for rows in neighbours(chunks):
                yield Block(rows, slice(start, stop), Full(), self.score)

    def _placed(self, mine: Chunk, theirs: Chunk, kind: str) -> tuple[Mask, Score | None]:
        """Return mask and score for a pair of chunks."""
        (mask, _, lens, head, device), score = self.whole, self.score
        query = mine.position + lens.k - lens.q
        places = Chunks.at(head or 0, query, theirs.position, lens, device)
        if score is not None and self._score_is_placed:
            score = PlacedScore.of(score, places)
        if kind == FULL:
            return Full(), score
        distance = query - theirs.position
        if distance == theirs.size - mine.size and is_relative(mask):
            return mask, score  # the pair itself is aligned to the bottom right
        return PlacedMask.of(mask, Distance(distance) if is_relative(mask) else places), score


def whole_of(chunks: list[Chunk]) -> slice:
    """Return the slice of a whole shard."""
    return slice(0, chunks[-1].local.stop)


def neighbours(chunks: list[Chunk]) -> Iterator[slice]:
    """Yield the slices of a shard that ascending chunks form."""
    start = stop = None
    for chunk in chunks:
        if start is not None and chunk.start != stop:
            yield slice(start, stop)
            start = None
        start = chunk.start if start is None else start
        stop = chunk.local.stop
    if start is not None:
        yield slice(start, stop)


def outline(mask: Mask) -> Outline:
    """Return what is known of a mask for all sequences and heads without reading tensors: its program, None, or a pair
    of outlines that are joined by &."""
    if isinstance(mask, And):
        return outline(mask.left), outline(mask.right)
    program = mask.program()
    return None if program.tensors or depends_on(mask, "b", "h") else program


@lru_cache(1 << 14)
def visibility(known: Outline, rows: range, keys: range, lens: Lengths) -> str:
    """Say what queries at positions `rows` see of `keys`, both not empty; PARTIAL if that is unknown."""
    if known is None:
        return PARTIAL
    if isinstance(known, tuple):
        kinds = {visibility(part, rows, keys, lens) for part in known}
        return HIDDEN if HIDDEN in kinds else FULL if kinds == {FULL} else PARTIAL
    env = {"b": 0, "h": 0, "q_lo": rows.start, "q_hi": rows.stop - 1, "len_q": lens.q, "len_k": lens.k}
    first, full_lo, full_hi, last = (int(bound) for bound in evaluate_all(known.span, env, ()))
    if first >= last or last <= keys.start or first >= keys.stop:
        return HIDDEN
    return FULL if full_lo <= keys.start and keys.stop <= full_hi else PARTIAL
