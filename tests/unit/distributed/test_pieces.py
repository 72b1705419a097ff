"""Pieces of a ring, in one process: where chunks are, and results and sums that arrive for parts of the rows."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from warpattn.distributed.merge import MANY, Merged, Sum, merged
from warpattn.distributed.placement import PLACEMENTS, Placement

B, S, H, D = 2, 6, 3, 4
HALVES = [slice(0, 2), slice(2, 6)]
WHOLE = slice(0, S)


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shards_hold_their_chunks_of_the_sequence(name, ranks):
    placement = Placement(name, ranks)
    length = 3 * placement.total
    x = torch.arange(2 * length).view(2, length)
    shards = [placement.cut(x, 1, rank) for rank in range(ranks)]
    assert torch.equal(placement.join(torch.cat(shards, 1), 1), x)
    held = [(shard, chunk) for rank, shard in enumerate(shards) for chunk in placement.chunks(rank, length)]
    assert all(torch.equal(shard[:, chunk.local], x[:, chunk.whole]) for shard, chunk in held)
    assert sorted(chunk.position for _, chunk in held) == list(range(0, length, 3))


def states(count: int, rows: int) -> tuple[Tensor, Tensor]:
    """out (n, B, rows, H, D) and lse (n, B, H, rows) over disjoint keys, some without any, where out is 0."""
    lse = torch.randn(count, B, H, rows, dtype=torch.float64) * 3
    lse = lse.masked_fill(torch.rand(lse.shape) < 0.3, -torch.inf)
    out = torch.randn(count, B, rows, H, D, dtype=torch.float64)
    return out.masked_fill((lse == -torch.inf).mT[..., None], 0.0), lse


def truth(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weighted mean of results, a sink a result of zeros."""
    if sinks is not None:
        lse = torch.cat([lse, sinks.double()[None, None, :, None].expand(1, *lse.shape[1:])])
        out = torch.cat([out, torch.zeros_like(out[:1])])
    weights = lse.softmax(0).nan_to_num(0.0).transpose(-1, -2)[..., None]
    return (weights * out).sum(0), lse.logsumexp(0)


@pytest.mark.parametrize("with_sinks", ["no", "counted", "left"])
@pytest.mark.parametrize("chunks", [[WHOLE], HALVES], ids=len)
@pytest.mark.parametrize("count", [0, 1, 2, MANY, MANY**2 + 3])
def test_results_merge_in_any_order(count, chunks, with_sinks):
    """Of all rows or one chunk; `counted`: the first result of each row has the sinks, `left`: none has."""
    sinks, chance = (None if with_sinks == "no" else torch.randn(H, dtype=torch.float64)), random.Random(count)
    found, given = Merged(chunks), {chunk.start: states(count, chunk.stop - chunk.start) for chunk in chunks}
    for i in range(count):
        counts = with_sinks == "counted" and i == 0
        parts = {at: [x[i] for x in given[at]] for at in given}
        if counts:
            parts = {at: list(truth(out[None], lse[None], sinks)) for at, (out, lse) in parts.items()}
        if chance.random() < 0.5:
            out, lse = (torch.cat([part[x] for part in parts.values()], dim) for x, dim in ((0, 1), (1, -1)))
            found.add(WHOLE, out, lse, counts)
        else:
            for chunk in chance.sample(chunks, len(chunks)):
                assert found.lacks_sinks(chunk) or not counts
                found.add(chunk, *parts[chunk.start], counts)
        assert found.lacks_sinks(WHOLE) is (with_sinks != "counted")
    out, lse = found.result(torch.empty(B, S, H, D, dtype=torch.float64), D, sinks)
    for chunk in chunks:
        wanted = truth(*given[chunk.start], sinks)
        torch.testing.assert_close((out[:, chunk], lse[..., chunk]), wanted)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_merged_at_once(count, with_sinks):
    """Empty results at the end change no bit."""
    sinks = torch.randn(H, dtype=torch.float64) if with_sinks else None
    out, lse = states(count, S)
    found = merged(out, lse, sinks)
    torch.testing.assert_close(found, truth(out, lse, sinks))
    far = merged(out, lse + 2000, None if sinks is None else sinks + 2000)  # whose exponentials are infinite
    torch.testing.assert_close(far, (found[0], found[1] + 2000))
    empty = torch.zeros(3, *out.shape[1:]), torch.full((3, *lse.shape[1:]), -torch.inf)
    more = merged(*(torch.cat(pair) for pair in zip((out, lse), empty, strict=True)), sinks)
    assert all(torch.equal(one, other) for one, other in zip(found, more, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(B, S, H, D), (H,)], ids=len)
@pytest.mark.parametrize("seed", range(6))
def test_sums_are_rounded_once(dtype, shape, seed):
    """Parts of some rows and of all, none, and sums read between."""
    chance, exact = random.Random(seed), torch.float64 if dtype == torch.float64 else torch.float32
    found, wanted = Sum(torch.empty(shape, dtype=dtype)), torch.zeros(shape, dtype=torch.float64)
    for _ in range(chance.randint(0, 5)):
        rows = chance.choice([WHOLE, *HALVES]) if len(shape) > 1 else WHOLE
        at = (slice(None), rows) if len(shape) > 1 else (slice(None),)
        part = torch.randn(wanted[at].shape, dtype=exact)
        wanted[at] += part
        found.add(rows, part.clone())
        found.add(rows, None)
        if chance.random() < 0.3:
            torch.testing.assert_close(found.exact(), wanted.to(exact))
    near: dict[str, Any] = {} if dtype != torch.bfloat16 else {"rtol": 2.0**-8, "atol": 1e-6}
    for _ in range(2):  # asking again changes nothing
        torch.testing.assert_close(found.rounded(), wanted.to(dtype), **near)


def test_chunks_of_a_rank_by_hand():
    """Rank 1 of 4: the second chunk from each end; in its shard they lie side by side."""
    first, second = Placement("zigzag", 4).chunks(1, 16)
    assert (first.local, first.whole) == (slice(0, 2), slice(2, 4))
    assert (second.local, second.whole) == (slice(2, 4), slice(12, 14))
    (only,) = Placement("contiguous", 4).chunks(1, 16)
    assert (only.local, only.whole) == (slice(0, 4), slice(4, 8))
