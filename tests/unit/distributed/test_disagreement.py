"""Ranks that pass different things, break rules, or die: one error on every rank and no waiting."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import warpattn as wa
import warpattn.distributed as wad
from tests.unit.distributed.world import failures

WINDOW = wa.SlidingWindow(4)


def operands(rows: int = 8, heads: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v of a rank."""
    return [torch.randn(1, rows, heads, 8, dtype=dtype) for _ in range(3)]


def refused(rank: int, reason: str, call: Any, mine: dict[str, Any], others: dict[str, Any]) -> None:
    """`rank` passes `mine`, all others `others`; every rank gets the one reason."""
    arguments = dict(mine if dist.get_rank() == rank else others)
    tensors = arguments.pop("operands", {})
    with pytest.raises(wa.AttentionError) as error:
        call(*operands(**tensors), **arguments)
    assert any(reason in told for told in error.value.reasons), (reason, error.value.reasons)


def on_mesh(*tensors: torch.Tensor, **arguments: Any) -> Any:
    """A call on two by two ranks."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    return wad.mesh_attention(*tensors, mesh=mesh, **arguments)


def other_functions() -> None:
    """One rank calls another function."""
    call = wad.ulysses_attention if dist.get_rank() == 1 else wad.ring_attention
    with pytest.raises(wa.AttentionError, match="the function is ulysses_attention on rank 1 and ring_attention on"):
        call(*operands())


def cache(size: int = 4, heads: int = 2, dim_v: int = 8, count: int = 5, dtype: Any = torch.float32) -> wa.PagedKV:
    """A cache of two sequences on one page each, `count` pages of `size` keys."""
    pages = [torch.randn(count, size, heads, dim, dtype=dtype) for dim in (8, dim_v)]
    return wa.PagedKV(*pages, torch.zeros(2, 1, dtype=torch.int32), torch.tensor([2, 3], dtype=torch.int32))


def other_pages(name: str, **kind: Any) -> None:
    """One rank has pages of another kind; of pages of one kind ranks have any number."""
    rank, q = dist.get_rank(), torch.zeros(2, 1, 4, 8)
    group = dist.new_group()
    with pytest.raises(wa.AttentionError, match=rf"kv.pages.{name} is .* on rank 2 and .* on rank 0; all ranks must"):
        wad.paged_attention(q, wad.share_pages(cache(**kind if rank == 2 else {}), group), group=group)
    wad.paged_attention(q, wad.share_pages(cache(count=5 + rank), group), group=group)


def other_batch(of_queries: int, of_cache: int) -> None:
    """One rank has another number of sequences, in the queries or in its part of the cache alone, or in both."""
    name = "q" if of_queries != 2 else "kv.lengths"
    q, kv = torch.zeros(2, 1, 4, 8), cache()
    if dist.get_rank() == 2:
        q = torch.zeros(of_queries, 1, 4, 8)
        kv = kv.with_fields(block_table=kv.block_table[:of_cache], lengths=kv.lengths[:of_cache])
    with pytest.raises(wa.AttentionError, match=rf"{name} is a .* on rank 2 and a .* on rank 0; all ranks must"):
        wad.paged_attention(q, wad.share_pages(kv))


def other_values(**options: Any) -> None:
    """One rank's table has a page that its cache lacks, in a call of a kind that all ranks have agreed on."""
    group, rank = dist.new_group([1, 2, 3], timeout=timedelta(seconds=20)), dist.get_rank()
    if rank == 0:
        return
    q, shared = torch.zeros(2, 1, 4, 8), wad.share_pages(cache(), group)
    wad.paged_attention(q, shared, group=group, **options)
    pages = shared.pages.with_fields(lengths=torch.tensor([2, 3]).int(), block_table=torch.full((2, 1), 7).int())
    wrong = replace(shared, pages=pages) if rank == 2 else shared
    told = "block_table" if rank == 2 else "^rank 2 has failed; its own message says more$"
    with pytest.raises(wa.AttentionError, match=told):
        wad.paged_attention(q, wrong, group=group, **options)
    wad.paged_attention(q, shared, group=group, **options)


def other_captured() -> None:
    """A tensor of one rank's score requires a gradient: its backward would wait for the other ranks'."""
    bias = torch.zeros(4, requires_grad=dist.get_rank() == 1)
    score = wa.CustomScore(lambda score, b, h, q, k, bias: score + bias[h], bias=bias)
    with pytest.raises(wa.AttentionError, match=r"score is CustomScore .* on rank 1 and CustomScore .* on rank 0; all"):
        wad.ring_attention(*operands(), score=score)


def in_ring() -> None:
    """A call that all agree on, again and again."""
    wad.ring_attention(*operands(), mask=wa.Causal())


def rank_is_late(call: Any, agreed: bool, time: timedelta | None = None) -> None:
    """The last rank does not call: the others get torch's error, at least one says timeout, and other groups go on.

    A group's time is cut to a second when its ranks are connected; gloo's messages between two ranks know only the
    `time` that their group was made with. A rank whose time ends closes its connections, and others may be told that.
    """
    group = dist.new_group(timeout=time)
    if agreed:  # messages of the call itself wait, otherwise those that compare the arguments
        call(*operands(), group=group)
    dist.barrier(group)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    said = ""
    if dist.get_rank() != 3:
        with pytest.raises(RuntimeError) as error:
            call(*operands(), group=group)
        said = str(error.value).lower()
    told = [""] * dist.get_world_size()
    dist.all_gather_object(told, said)
    assert all("timed out" in text or "timeout" in text or "by peer" in text for text in told[:3]), told
    assert any("timed out" in text or "timeout" in text for text in told), told


def rank_dies() -> None:
    """The last rank ends; the others get torch's error, not ours, and do not wait forever."""
    if dist.get_rank() == 3:
        os._exit(0)
    with pytest.raises(RuntimeError, match=r"peer|Connection|closed|reset|refused"):
        in_ring()
    os._exit(0)  # the group is broken: taking it down would wait for the rank that died


JOBS = [
    partial(refused, 2, "q is a torch.float32 tensor of shape (1, 16, 4, 8) on rank 2 and a torch.float32 tensor of "
            "shape (1, 8, 4, 8) on rank 0", wad.ring_attention, {"operands": {"rows": 16}}, {}),
    partial(refused, 1, "k is a torch.bfloat16 tensor of shape (1, 8, 4, 8) on rank 1", wad.ulysses_attention,
            {"operands": {"dtype": torch.bfloat16}}, {}),
    partial(refused, 3, "mask is SlidingWindow", wad.ring_attention, {"mask": WINDOW}, {"mask": wa.Causal()}),
    partial(refused, 1, "placement is contiguous on rank 1 and zigzag on rank 0", wad.ring_attention,
            {"placement": "contiguous"}, {}),
    partial(refused, 3, "scale is 0.5 on rank 3 and None on rank ", on_mesh, {"scale": 0.5}, {}),
    partial(refused, 0, "placement is 'zebra'; it must be one of zigzag, contiguous", wad.ring_attention,
            {"placement": "zebra"}, {"placement": "zebra"}),
    partial(refused, 0, "q has 7 rows on a rank; zigzag placement gives each rank 2 equal chunks", wad.ring_attention,
            {"operands": {"rows": 7}}, {"operands": {"rows": 7}}),
    partial(refused, 0, "q has 6 heads; they must be a multiple of the 4 ranks", wad.ulysses_attention,
            {"operands": {"heads": 6}}, {"operands": {"heads": 6}}),
    partial(refused, 0, "Padding.valid_lengths has shape (2,)", wad.ring_attention,
            {"mask": wa.Padding(torch.tensor([3, 4]))}, {"mask": wa.Padding(torch.tensor([3, 4]))}),
    partial(refused, 0, "group is 'all'", wad.ring_attention, {"group": "all"}, {"group": "all"}),
    partial(other_pages, "v_pages", dim_v=16),
    partial(other_pages, "k_pages", size=8),
    partial(other_pages, "k_pages", heads=4),
    partial(other_pages, "k_pages", dtype=torch.float64),
    partial(other_batch, 1, 1),
    partial(other_batch, 2, 1),
    partial(other_batch, 1, 2),
    other_values,
    partial(other_values, same_bits=True),
    other_captured,
    other_functions,
    in_ring,
    partial(rank_is_late, wad.ring_attention, agreed=False),
    in_ring,
    rank_dies,
]  # fmt: skip


def test_every_rank_gets_one_error_before_anything_is_sent(tmp_path: Path):
    found = failures(JOBS, tmp_path)
    assert not found, "\n\n".join(found)


@pytest.mark.full
@pytest.mark.parametrize("call", [wad.ring_attention, wad.ulysses_attention])
def test_messages_that_time_out_end_in_the_error_of_torch(call: Any, tmp_path: Path):
    late = partial(rank_is_late, call, agreed=True, time=timedelta(seconds=20))
    found = failures([late, in_ring], tmp_path)
    assert not found, "\n\n".join(found)


def test_without_processes_the_error_says_what_to_call():
    with pytest.raises(wa.AttentionError, match=r"not initialized; call torch\.distributed.init_process_group"):
        wad.ring_attention(*operands())
