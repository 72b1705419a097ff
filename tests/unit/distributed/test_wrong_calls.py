"""Wrong calls on several ranks: what one rank or all of them pass wrongly ends in one AttentionError on every rank, or
in a result on every rank, never in another error, and no rank waits for another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import warpattn as wa
import warpattn.distributed as wad
from tests.unit.api.test_wrong_calls import AT_ONCE, ENDINGS, WRONG, ending, normal, replaced
from tests.unit.distributed.world import failures
from warpattn.distributed.agreement import agreed

RANKS = 2
ROWS = {name: normal(1, 8, 4, 8) for name in ("q", "k", "v")}
TAIL = {"mask": None, "score": None, "sinks": None, "scale": None, "return_lse": False, "backend": "auto"}
TABLE, LENGTHS = torch.arange(4, dtype=torch.int32).view(1, 4), torch.tensor([9], dtype=torch.int32)
KV = wa.PagedKV(normal(4, 4, 2, 8), normal(4, 4, 2, 8), TABLE, LENGTHS)
CUT = {"x": normal(1, 8, 4, 8), "dim": 1, "group": None, "placement": "zigzag"}


def on_mesh(**given: Any) -> Any:
    """A call on one by two ranks."""
    return wad.mesh_attention(mesh=dist.device_mesh.init_device_mesh("cpu", (1, RANKS)), **given)


def shared(**given: Any) -> wad.SharedPages:
    """Pages of ranks, of a cache whose parts are given."""
    return wad.share_pages(wa.PagedKV(**given))


def over_pages(**given: Any) -> Any:
    """A call over pages that ranks share."""
    return wad.paged_attention(kv=wad.share_pages(KV), **given)


def over_own_pages(turn: Any, **given: Any) -> Any:
    """A call over pages whose fields are given for this rank."""
    return wad.paged_attention(normal(1, 1, 4, 8), wad.SharedPages(wa.PagedKV(**given), LENGTHS, turn))


PAGES = {"k_pages": KV.k_pages, "v_pages": KV.v_pages, "block_table": TABLE, "lengths": LENGTHS, "k_scale": None}
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "ring_attention": (wad.ring_attention, {**ROWS, "group": None, "placement": "zigzag", **TAIL}),
    "ulysses_attention": (wad.ulysses_attention, {**ROWS, "group": None, "placement": "zigzag", **TAIL}),
    "mesh_attention": (on_mesh, {**ROWS, "placement": "zigzag", **TAIL}),
    "mesh": (wad.mesh_attention, {**ROWS, "mesh": None}),
    "shard": (wad.shard, CUT),
    "unshard": (wad.unshard, CUT),
    "share_pages": (wad.share_pages, {"kv": KV, "group": None, "turn": 1}),
    "parts of shared pages": (shared, PAGES),
    "paged_attention": (over_pages, {"q": normal(1, 1, 4, 8), "group": None, **TAIL, "same_bits": False}),
    "pages of a rank": (lambda **given: wad.paged_attention(normal(1, 1, 4, 8), wad.SharedPages(**given)),
                        {"pages": KV, "lengths": LENGTHS, "turn": 1}),
    "pages of paged_attention": (wad.paged_attention, {"q": normal(1, 1, 4, 8), "kv": None}),
    "parts of paged_attention": (over_own_pages, {**PAGES, "turn": 1}),
}  # fmt: skip
SILENT = ("shard", "share_pages", "parts of shared pages")  # these send no message


def wrong_somewhere(call: str, most: int) -> None:
    """Every wrong argument on all ranks, then on the last alone."""
    function, given = CALLS[call]
    found = []
    for what, arguments in replaced(call, given, most):
        for ranks in (range(RANKS), (RANKS - 1,)):
            if len(ranks) < RANKS and what.startswith(("group", "mesh")):
                continue  # a rank that names no group can tell none
            agreed.clear()  # ranks tell each other of a call when they first see one like it
            told = [""] * RANKS
            dist.all_gather_object(told, ending(function, arguments if dist.get_rank() in ranks else given))
            fine = set(told) <= set(ENDINGS) and (call in SILENT or len(set(told)) == 1)
            found += [] if fine else [f"{what} on {list(ranks)}: {told}"]
    assert not found, "\n".join(found)


def test_one_error_on_every_rank(tmp_path):
    found = failures([partial(wrong_somewhere, call, AT_ONCE) for call in CALLS], tmp_path, RANKS)
    assert not found, "\n".join(found)


@pytest.mark.full
@pytest.mark.parametrize("call", CALLS)
def test_one_error_for_every_value(call, tmp_path):
    found = failures([partial(wrong_somewhere, call, len(WRONG))], tmp_path, RANKS)
    assert not found, "\n".join(found)
