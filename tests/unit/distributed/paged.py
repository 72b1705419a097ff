"""What ranks do in tests of decode: a cache that they share against the whole one, and the same bits on any number."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import warpattn as wa
import warpattn.distributed as wad
from tests.unit.distributed.jobs import FLOAT

LENGTHS = (0, 1, 29, 44)
SIZE = 4  # keys of a page


def cache() -> wa.PagedKV:
    """Four sequences in pages at random places."""
    pages = torch.randperm(4 * 11, dtype=torch.int32).view(4, 11)
    k, v = (torch.randn(44, SIZE, 2, dim, dtype=FLOAT) for dim in (8, 6))
    return wa.PagedKV(k, v, pages, torch.tensor(LENGTHS, dtype=torch.int32))


def decoded(turn: int, rows: int = 1, sinks: bool = False, **tail: Any) -> None:
    """Every rank has the result over the whole cache."""
    kv, q = cache(), torch.randn(4, rows, 4, 8, dtype=FLOAT)
    logits = torch.randn(4, dtype=FLOAT) if sinks else None
    wanted = wa.attention_paged(q, kv, sinks=logits, return_lse=True, **tail)
    found = wad.paged_attention(q, wad.share_pages(kv, turn=turn), sinks=logits, return_lse=True, **tail)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


def decoded_in_eight_bits(narrow: bool, per: str) -> None:
    """Ranks read the scales of a cache, and of queries, as one does."""
    kv, q = cache(), torch.randn(4, 1, 4, 8)
    made = [wa.quantize(x.float() * torch.linspace(0.5, 4.0, 2)[:, None], per=per) for x in (kv.k_pages, kv.v_pages)]
    k, v = made
    kv = wa.PagedKV(k.values, v.values, kv.block_table, kv.lengths, k_scale=k.scale, v_scale=v.scale)
    if narrow:
        given = wa.quantize(q, per=per)
        q, kv = given.values, replace(kv, q_scale=given.scale)
    wanted = wa.attention_paged(q, kv)
    for same_bits in (False, True):
        found = wad.paged_attention(q, wad.share_pages(kv), same_bits=same_bits)
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted)


def same_on_any_number() -> None:
    """One, two, three and four ranks give the same bits, in fp32, where another order of sums would show."""
    kv, q = cache(), torch.randn(4, 1, 4, 8)
    kv = wa.PagedKV(kv.k_pages.float(), kv.v_pages.float(), kv.block_table, kv.lengths)
    results: list[Tensor] = []
    for ranks in range(1, 5):
        group = dist.new_group(list(range(ranks)))
        if dist.get_rank() < ranks:
            shared = wad.share_pages(kv, group, turn=1)
            results.append(wad.paged_attention(q, shared, group=group, mask=wa.Causal(), same_bits=True))
    assert all(torch.equal(results[0], x) for x in results)
    torch.testing.assert_close(results[0], wa.attention_paged(q, kv))


def jobs() -> list[Any]:
    """Masks and scores that see where the keys of a rank are."""
    causal = wa.Causal()
    return [
        partial(decoded, 2, mask=causal, sinks=True),
        partial(decoded, 2, rows=3, mask=causal),
        partial(decoded, 1, rows=3, mask=wa.SlidingWindow(6), sinks=True),
        partial(decoded, 3, rows=2, mask=causal, score=wa.ALiBi(4) | wa.SoftCap(5.0)),
        partial(decoded, 1, mask=wa.Padding(torch.tensor([0, 1, 20, 44])), score=wa.SoftCap(2.0)),
        partial(decoded_in_eight_bits, False, "head"),
        partial(decoded_in_eight_bits, True, "token"),
        same_on_any_number,
    ]
