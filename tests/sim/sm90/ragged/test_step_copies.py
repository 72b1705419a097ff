"""Steps whose long prompts read copies of their keys in a workspace, on Hopper in the simulator."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn
from tests.oracle import poisoned
from tests.sim.sm90.lengths import kernel
from warpattn.kernels.sm90.copies.config import bytes_of_place
from warpattn.kernels.sm90.select import choose, list_launches
from warpattn.problem import Call, CheckedCall, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import Launch, PlanOptions
from warpattn.problem.operands import Operands
from warpattn.runtime.simulate import dependent
from warpattn.sequences import PagedKV, PagedRagged, Ragged

PAGE, HEADS, DIM = 16, 16, 64
# (queries, keys): a prompt of 3 places; a new token; a short prompt; 2 places; no queries; 2 places
STEP = ((300, 310), (1, 90), (20, 200), (100, 150), (0, 40), (130, 130))
PREFILL = ("sm90.order", "sm90.prefill_varlen")


def a_step(
    sizes: Any = STEP, per: str | int | None = "tensor", dtype: torch.dtype = torch.bfloat16, heads_kv: int = 1,
    dim_v: int = DIM, heads: int = HEADS, page: int = PAGE,
) -> tuple[torch.Tensor, PagedRagged]:  # fmt: skip
    """Queries, and a step over pages of e4m3, or of 16 bits if `per` is None, in random order."""
    torch.manual_seed(0)
    queries, keys = zip(*sizes, strict=True)
    width = max(1, -(-max(keys) // page))
    pages = torch.randperm(len(keys) * width).int().view(len(keys), width)
    k, v = (torch.randn(pages.numel(), page, heads_kv, d) for d in (DIM, dim_v))
    kv = PagedKV(k.to(dtype), v.to(dtype), pages, torch.tensor(keys).int())
    if per is not None:
        narrow = wa.quantize(k, per=per), wa.quantize(v, per=per)
        fields = {"k_pages": narrow[0].values, "v_pages": narrow[1].values}
        kv = kv.with_fields(**fields, k_scale=narrow[0].scale, v_scale=narrow[1].scale)
    offsets = torch.tensor([0, *queries]).cumsum(0).int()
    return torch.randn(sum(queries), heads, DIM).to(dtype), PagedRagged(kv, Ragged(offsets))


def checked_call(q: torch.Tensor, step: PagedRagged, **tail: Any) -> CheckedCall:
    call = Call(q, step.kv.k_pages, step.kv.v_pages, step, backend="reference", **tail)
    return validate(call, read_values=False)


def launches_of(q: torch.Tensor, step: PagedRagged, out: torch.Tensor, places: int, **tail: Any) -> tuple[Launch, ...]:
    """Those of a step with a workspace of so many places, whose memory holds NaN."""
    checked = checked_call(q, step, **tail)
    size = bytes_of_place(checked.problem) * places
    options = PlanOptions(copies=False, workspace=torch.full((size,), 255, dtype=torch.uint8))
    operands = Operands(q, step.kv.k_pages, step.kv.v_pages, out, None, None)
    return list_launches(checked, operands, step, options)


def run(launches: tuple[Launch, ...], schedule: str = "lazy", seed: int = 0) -> None:
    """Simulates launches one after the other, without findings."""
    for launch in launches:
        grid = (min(launch.grid[0], 3),) if launch.persistent else launch.grid
        report = wa.sim.simulate(kernel(launch), dependent(launch, grid), launch.args, schedule=schedule, seed=seed)
        assert report.clean, report


def expected_of(q: torch.Tensor, step: PagedRagged, **tail: Any) -> torch.Tensor:
    return wa.attention_paged(q, step.kv, step.queries, backend="reference", **tail)


def listed(launch: Launch) -> set[int]:
    """Sequences in the list of an order launch."""
    tiles = launch.args["list_ptr"]
    return set(tiles[8 : 8 * (1 + int(tiles[0])) : 8].tolist())


@pytest.mark.parametrize(("schedule", "seed"), [("lazy", 0), ("random", 1)])
def test_a_step_of_prompts_and_new_tokens(schedule: str, seed: int) -> None:
    """The first prompt is copied; the next long one does not fit, so it and those after it are converted."""
    q, step = a_step()
    out = poisoned(q.shape, q.dtype)
    launches = launches_of(q, step, out, 4, mask=wa.Causal())
    names = ["sm90.places", "sm90.copy_places", *PREFILL, *PREFILL, "sm90.decode"]
    assert [launch.name for launch in launches] == names
    run(launches, schedule, seed)
    assert listed(launches[2]) == {0} and listed(launches[4]) == {2, 3, 5}
    torch.testing.assert_close(out, expected_of(q, step, mask=wa.Causal()), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("places", "copied"), [(2, set()), (3, {0}), (6, {0, 3}), (99, {0, 3, 5})])
def test_sequences_are_copied_as_far_as_there_are_places(places: int, copied: set[int]) -> None:
    q, step = a_step()
    launches = launches_of(q, step, torch.empty_like(q), places, mask=wa.Causal())
    run((*launches[:3], launches[4]))
    assert (listed(launches[2]), listed(launches[4])) == (copied, {0, 2, 3, 5} - copied)
    ends, used = launches[1].args["lists"].ends, {0: 3, 3: 2, 5: 2}
    assert ends.tolist() == [sum(used[b] for b in copied), 3, 3, 3, 5, 5, 7]


@pytest.mark.parametrize(
    "case",
    [
        {"per": "token", "dim_v": 128}, {"per": "head", "heads_kv": 2}, {"dtype": torch.float16},
        {"mask": None}, {"score": wa.SoftCap(5.0)}, {"per": None, "heads": 32},
    ],
    ids=["tokens", "heads", "fp16", "full", "soft-cap", "16-bits"],
)  # fmt: skip
def test_kinds_of_caches_and_calls(case: dict[str, Any]) -> None:
    tail: dict[str, Any] = {"mask": wa.Causal()} | {x: case.pop(x) for x in ("mask", "score") if x in case}
    q, step = a_step(((260, 270), (1, 90), (40, 60)), **case)
    out = poisoned((*q.shape[:-1], step.kv.v_pages.shape[-1]), q.dtype)
    launches = launches_of(q, step, out, 4, **tail)
    assert launches[1].name == "sm90.copy_places"
    run(launches)
    assert listed(launches[2]) == {0}
    torch.testing.assert_close(out, expected_of(q, step, **tail), atol=3e-2, rtol=3e-2)


def test_many_sequences() -> None:
    """More than a program takes at a time, some with copies before and after."""
    sizes = [(1, 20)] * 290
    sizes[3] = sizes[200] = sizes[270] = (64, 64)
    q, step = a_step(tuple(sizes))
    launches = launches_of(q, step, torch.empty_like(q), 9)
    run(launches[:3])
    assert listed(launches[2]) == {3, 200, 270}
    lists = launches[1].args["lists"]
    assert lists.places[:3].tolist() == [[3, 0], [200, 0], [270, 0]] and int(lists.ends[0]) == 3


@pytest.mark.parametrize(
    ("change", "tail"),
    [
        ({"per": "token", "dtype": torch.float16}, {}), ({}, {"mask": wa.SlidingWindow(40)}),
        ({"sizes": ((40, 300),)}, {}), ({"per": None, "sizes": ((250, 300),)}, {}),
    ],
    ids=["fp16-tokens", "window", "few-rows", "16-bits-few-rows"],
)  # fmt: skip
def test_other_steps_read_pages(change: dict[str, Any], tail: dict[str, Any]) -> None:
    q, step = a_step(**change)
    assert launches_of(q, step, torch.empty_like(q), 9, **tail)[0].name == "sm90.order"


def test_the_plan_names_the_workspace() -> None:
    q, step = a_step()
    problem = checked_call(q, step, mask=wa.Causal()).problem
    workspace = torch.empty(bytes_of_place(problem) * 7 + 5, dtype=torch.uint8)
    choice = choose(problem, ARCHS["sm90"], PlanOptions(copies=False, workspace=workspace))
    assert any("up to 896 keys and values" in line for line in choice.lines())
    for options in (PlanOptions(copies=False), PlanOptions(True, workspace=workspace)):
        assert not any("copy_places" in line for line in choose(problem, ARCHS["sm90"], options).lines())


def drawn_step(seed: int) -> tuple[torch.Tensor, PagedRagged, int, dict[str, Any]]:
    """A step of random sizes, pages, heads and scales; places for some of its keys."""
    chance = random.Random(seed)
    group, heads_kv, page = chance.choice([8, 16]), chance.choice([1, 2]), chance.choice([8, 16, 48, 256])
    sizes = []
    for _ in range(chance.randint(1, 5)):
        queries = chance.choice([0, 1, 3, chance.randint(4, 60), chance.randint(64, 300)])
        sizes.append((queries, chance.choice([queries, queries + chance.randint(0, 150), chance.randint(0, 200)])))
    q, step = a_step(
        tuple(sizes), chance.choice(["tensor", "head", "token", 64]), heads_kv=heads_kv, heads=group * heads_kv,
        dim_v=chance.choice([64, 128]), page=page,
    )  # fmt: skip
    mask = chance.choice([None, wa.Causal(), wa.Causal() & wa.Padding(step.kv.lengths)])
    return q, step, chance.randint(1, 9), {"mask": mask}


@pytest.mark.parametrize("seed", drawn(range(12), [0, 1]))
def test_random_steps(seed: int) -> None:
    q, step, places, tail = drawn_step(seed)
    out = poisoned((*q.shape[:-1], step.kv.v_pages.shape[-1]), q.dtype)
    run(launches_of(q, step, out, places, **tail), "random", seed)
    expected = expected_of(q, step, **tail)
    torch.testing.assert_close(out, expected, atol=3e-2, rtol=3e-2)


def test_lengths_that_no_table_holds() -> None:
    """They are cut to the table's keys, and negative ones to none; page numbers past the ends are no pages."""
    q, step = a_step(((200, 100), (150, 160), (40, 50)))
    step.kv.lengths.copy_(torch.tensor([2**30, 160, -5]))
    step.kv.block_table[1, -1] = 10**9
    cut = replace(step, kv=step.kv.with_fields(lengths=torch.tensor([160, 160, 0]).int()))
    cut.kv.block_table.clamp_(max=len(step.kv.k_pages) - 1)
    out = poisoned(q.shape, q.dtype)
    launches = launches_of(q, step, out, 9, mask=wa.Causal())
    run(launches)
    assert listed(launches[2]) == {0, 1}
    torch.testing.assert_close(out, expected_of(q, cut, mask=wa.Causal()), atol=2e-2, rtol=2e-2)


def test_hidden_values_reach_no_row() -> None:
    """NaN in a key and a value that only newer rows see."""
    q, step = a_step(((300, 310), (1, 9)))
    page, row = int(step.kv.block_table[0, 200 // PAGE]), 200 % PAGE
    nan = torch.tensor(torch.nan).to(step.kv.k_pages.dtype)
    step.kv.k_pages[page, row, 0, 3], step.kv.v_pages[page, row, 0, 5] = nan, nan
    out = poisoned(q.shape, q.dtype)
    run(launches_of(q, step, out, 4, mask=wa.Causal()))
    expected = expected_of(q, step, mask=wa.Causal())
    assert expected[:190].isfinite().all() and expected[190:300].isnan().all()
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2, equal_nan=True)


@pytest.mark.parametrize("places", [0, 2])
def test_further_layers_of_a_step_read_the_same_lists(places: int) -> None:
    """Kernels leave lists and counters as the next layer needs them."""
    q, step = a_step(((140, 150), (1, 40), (20, 60)))
    out = poisoned(q.shape, q.dtype)
    launches = launches_of(q, step, out, places, mask=wa.Causal())
    layer = tuple(launch for launch in launches if not launch.per_step)
    kinds = {launch.name for launch in launches if launch.per_step}
    assert kinds == {"sm90.order"} | ({"sm90.places"} if places else set())
    run(launches)
    for x in (q, step.kv.k_pages.view(torch.uint8), step.kv.v_pages.view(torch.uint8)):
        x.copy_(x.flip(0))  # another layer
    out.fill_(torch.nan)
    run(layer)
    torch.testing.assert_close(out, expected_of(q, step, mask=wa.Causal()), atol=2e-2, rtol=2e-2)
