"""Which calls the ranks of a ring make: hidden blocks are no calls, and zig-zag ranks have the same work."""

import pytest
import torch

import warpattn as wa
from warpattn.distributed.blocks import Whole, blocks_of
from warpattn.distributed.placement import Placement
from warpattn.language.traced import Lengths

LENGTH = 1024


def calls(mask: wa.Mask, placement: str, ranks: int) -> list[list[int]]:
    """Pairs of queries and keys in the calls of every rank with the keys of every other."""
    whole = Whole(mask, None, Lengths(LENGTH, LENGTH), None, torch.device("cpu"))
    blocks = blocks_of(whole, Placement(placement, ranks))
    return [[sum(area(b.rows) * area(b.keys) for b in blocks.of(r, s)) for s in range(ranks)] for r in range(ranks)]


def area(rows: slice) -> int:
    """How many."""
    return rows.stop - rows.start


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_window_needs_only_its_neighbours(ranks):
    made = calls(wa.SlidingWindow(LENGTH // ranks), "contiguous", ranks)
    for rank, row in enumerate(made):
        assert {source for source, work in enumerate(row) if work} == {rank, max(rank - 1, 0)}


@pytest.mark.parametrize("mask", [wa.SlidingWindow(64), wa.SlidingWindow(100, 60), wa.Chunked(128)], ids=str)
def test_hidden_chunks_are_in_no_call_of_a_zigzag_ring(mask):
    made = calls(mask, "zigzag", 4)
    chunk = LENGTH // 8
    visible = sum(map(sum, made))
    assert visible <= 3 * LENGTH * chunk  # a row of chunks sees at most its own and its two neighbours
    assert any(work == 0 for row in made for work in row)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zigzag_ranks_have_the_same_work_under_a_causal_mask(ranks):
    zigzag, contiguous = (calls(wa.Causal(), name, ranks) for name in ("zigzag", "contiguous"))
    assert len({sum(row) for row in zigzag}) == 1
    assert [sum(row) for row in contiguous] == [(rank + 1) * (LENGTH // ranks) ** 2 for rank in range(ranks)]
