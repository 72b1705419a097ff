"""When prefill on Hopper copies 8-bit keys and values in 16 bits, and what the plan says of it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import warpattn as wa
from warpattn.kernels.sm90.prefill import launch
from warpattn.kernels.sm90.select import choose, list_launches
from warpattn.problem import Call, Problem, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import DEFAULT_OPTIONS, Choice, PlanOptions
from warpattn.problem.operands import Operands
from warpattn.problem.problem import Scales
from warpattn.sequences import Dense, PagedKV, PagedRagged, Ragged

E4M3 = torch.float8_e4m3fn


def a_call(seq_q: int = 1024, seq_k: int = 1024, group: int = 4, mask: wa.Mask | None = None) -> Call:
    """Two key heads, dense, with one scale each."""
    q = torch.empty(1, seq_q, 2 * group, 128, dtype=torch.bfloat16)
    k = torch.empty(1, seq_k, 2, 128, dtype=E4M3)
    scale = torch.ones(2)
    return Call(q, k, k, Dense(scale, scale), mask, backend="reference")


def problem(seq_q: int = 1024, seq_k: int = 1024, group: int = 4, mask: wa.Mask | None = None) -> Problem:
    return validate(a_call(seq_q, seq_k, group, mask), read_values=False).problem


def copies(x: Problem, options: PlanOptions = DEFAULT_OPTIONS) -> bool:
    config = choose(x, ARCHS["sm90"], options).config
    return getattr(config, "tiles", config).widened


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1024, 1024, 4, wa.Causal()), True),  # 2,048 rows see a key
        ((512, 512, 4, wa.Causal()), True),
        ((511, 511, 4, wa.Causal()), False),
        ((256, 8192, 4, None), True),
        ((255, 8192, 4, None), False),
        ((1024, 8192, 1, None), True),
        ((8192, 8192, 4, wa.SlidingWindow(4096)), False),  # most keys need no copy
    ],
)
def test_rows_that_see_a_key_decide(sizes: Any, expected: bool) -> None:
    assert copies(problem(*sizes)) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"scales": Scales("token", "head"), "dtype": torch.float16}, {"q_dtype": E4M3}, {"batch": 10_000},
        {"kv_dtype": None, "scales": Scales()},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_never_copied(changes: dict[str, Any]) -> None:
    """Factors of tokens in fp16, queries of 8 bits, more bytes than the bound, 16 bits."""
    assert copies(problem()) and not copies(replace(problem(), **changes))
    for options in (PlanOptions(batch_invariant=True), PlanOptions(copies=False)):
        assert not copies(problem(), options)


def test_a_plan_says_what_the_copies_take() -> None:
    choice: Choice = choose(problem(), ARCHS["sm90"])
    assert "sm90.copy before it: 1,048,576 bytes of keys and values in 16 bits" in choice.lines()
    assert choice.reasons[-1].startswith("enough rows of queries see each key")
    plain = choose(replace(problem(), kv_dtype=None, scales=Scales()), ARCHS["sm90"])
    assert replace(choice.config, operands=plain.config.operands) == plain.config and choice.grid == plain.grid


def test_a_call_does_without_copies_where_memory_is_wanting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else has too little memory says so."""

    def wanting(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    call = a_call()
    checked = validate(call, read_values=False)
    x = Operands(call.q, call.k, call.v, torch.empty_like(call.q), None, None)
    names = [one.name for one in list_launches(checked, x, call.sequence, DEFAULT_OPTIONS)]
    monkeypatch.setattr(launch, "copied", wanting)
    without = [one.name for one in list_launches(checked, x, call.sequence, DEFAULT_OPTIONS)]
    assert (names, without) == (["sm90.copy", "sm90.prefill"], ["sm90.prefill"])
    monkeypatch.setattr(launch, "attention_launch", wanting)
    with pytest.raises(torch.OutOfMemoryError):
        list_launches(checked, x, call.sequence, DEFAULT_OPTIONS)


@pytest.mark.parametrize(
    ("requests", "table", "expected"),
    [(4, 4096, 2), (4, 4000, 2), (512, 32768, 2), (4, 64, 2), (4096, 4096, 1)],
    ids=["all-keys", "part-of-a-place", "512-MiB", "few-keys", "few-rows"],
)
def test_a_call_of_ragged_queries_has_a_workspace(requests: int, table: int, expected: int) -> None:
    """For all keys of its tables, 512 MiB at most, if copies pay off in the mean."""
    q = torch.empty(requests * (1024 if expected > 1 else 8), 8, 128, dtype=torch.bfloat16)
    pages = torch.empty(1, 16, 2, 128, dtype=E4M3)
    index = torch.empty(requests, table // 16, dtype=torch.int32)
    kv = PagedKV(pages, pages, index, index[:, 0], k_scale=torch.ones(()), v_scale=torch.ones(()))
    sequence = PagedRagged(kv, Ragged(torch.empty(requests + 1, dtype=torch.int32)))
    given = Call(q, pages, pages, sequence, wa.Causal(), backend="reference")
    choice = choose(validate(given, read_values=False).problem, ARCHS["sm90"])
    size = min(2 * 128 * 2 * 256 * -(-table // 128) * requests, 2**29) if expected > 1 else 0
    assert choice.config.workspace_bytes == size and (choice.config.long is not None) == bool(size)


def test_the_prefill_over_a_workspace_has_the_tiles_of_long_sequences() -> None:
    """64 requests of 1,024 queries are one of 1,024; what reads pages is chosen for 64 of 16."""
    q, pages = torch.empty(1024, 64, 128, dtype=torch.bfloat16), torch.empty(1, 16, 8, 128, dtype=torch.bfloat16)

    def config(requests: int, options: PlanOptions) -> Any:
        index = torch.empty(requests, 32, dtype=torch.int32)
        kv, queries = PagedKV(pages, pages, index, index[:, 0]), Ragged(torch.empty(requests + 1, dtype=torch.int32))
        given = Call(q, pages, pages, PagedRagged(kv, queries), wa.Full(), backend="reference")
        return choose(validate(given, read_values=False).problem, ARCHS["sm90"], options).config

    def shape(choice: Choice) -> tuple[int, int, int]:
        tiles = choice.config.tiles
        return tiles.consumers, tiles.block_n, tiles.packed

    workspace, plain = torch.empty(2**20, dtype=torch.uint8, device="meta"), PlanOptions(copies=False)
    found, many, one = config(64, replace(plain, workspace=workspace)), config(64, plain).many, config(1, plain).many
    assert found.many == many and shape(many) != shape(one) == shape(found.long)
    assert (found.many.config.page_size, found.long.config.page_size) == (16, 128)
