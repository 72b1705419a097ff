"""Blackwell's second pass over tiles that met hidden values of NaN or infinity: right under every schedule, and the one
wait that it adds is needed."""

from __future__ import annotations

import linecache
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.cases import Case
from tests.drawn import drawn
from tests.eight_bit import shared_latents
from tests.oracle import Inputs, poisoned
from tests.specials import seen_by_some, spoiled, unlike
from warpattn.kernels.sm100.mla.config import choose_latent
from warpattn.kernels.sm100.mla.launch import latent_launches
from warpattn.kernels.sm100.prefill_1q.config import choice_of, choose_1q
from warpattn.kernels.sm100.prefill_2q.config import choose_2q
from warpattn.kernels.sm100.select import launches_of_choice
from warpattn.kernels.sm100.wide.config import choose_wide, is_wide
from warpattn.problem import Call, Problem, is_latent, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.backends import LATENT as LATENT_DIMS
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, fitted
from warpattn.runtime.simulate import Options, run_launch
from warpattn.runtime.simulate import _kernel as compiled
from warpattn.sim import Report, knock_out, simulate
from warpattn.sim.ir.module import Op

SCHEDULES = [("lazy", 0), ("eager", 0), ("adversarial", 0), *(("random", seed) for seed in range(4))]
BF16 = torch.bfloat16
DENSE = Case(batch=1, seq_q=40, seq_k=70, heads_q=1, heads_kv=1, dim=64, dtype=BF16, mask="causal")
PAGED = replace(DENSE, kind="paged", seq_q=3, lens_k=(80,), page_size=16, heads_q=2)
LATENT = replace(DENSE, seq_q=3, heads_q=9, dim=LATENT_DIMS.qk, dim_v=LATENT_DIMS.v)
# Name -> (the problem, parts of its keys; 0 for two query tiles a CTA)
CASES = {
    "2q": (replace(DENSE, seq_q=140, seq_k=140), 0),
    "2q-128": (replace(DENSE, dim=128, heads_q=2, mask="dense-mask", sinks=True), 0),
    "2q-ragged": (replace(DENSE, kind="ragged", lens_q=(20, 0), lens_k=(70, 9)), 0),
    "2q-pages": (replace(PAGED, mask="window"), 0),
    "2q-pages-of-1": (replace(PAGED, page_size=1, mask="window"), 0),
    "1q-128": (replace(DENSE, dim=128, mask="window-both"), 1),
    "1q-narrow-output": (replace(DENSE, dim=64, dim_v=128), 1),
    "split": (replace(DENSE, seq_k=200, sinks=True, score="bias"), 2),
    "split-pages": (replace(PAGED, lens_k=(180,)), 2),
    "split-pages-of-12": (replace(PAGED, lens_k=(180,), dim=128, page_size=12), 2),
    "wide-256": (replace(DENSE, dim=192, mask="scattered"), 1),
    "wide-512-split-pages": (replace(PAGED, dim=264, mask="window"), 2),
    "latents": (replace(LATENT, mask="window", sinks=True), 1),
    "latents-split-pages-of-3": (replace(LATENT, kind="paged", lens_k=(150,), page_size=3), 2),
}


def choice(problem: Problem, parts: int) -> Choice:
    """The choice with so many parts of the keys."""
    if is_latent(problem) or is_wide(problem):
        rows = (choose_latent if is_latent(problem) else choose_wide)(problem, ARCHS["sm100"])
        config = replace(rows.config, splitk_partitions=parts)
        tiles = rows.grid[0] // rows.partitions
        return replace(rows, config=config, grid=(tiles * parts, *rows.grid[1:]), partitions=parts)
    two = choose_2q(problem)
    if parts == 0:
        return two
    one = choose_1q(problem, two.config, replace(ARCHS["sm100"], processors=10**6))
    assert one is not None
    return choice_of(problem, replace(one.config, splitk_partitions=parts))


def launches(x: Inputs, parts: int) -> tuple[tuple[Launch, ...], tuple[torch.Tensor, torch.Tensor]]:
    """The launches of a call, and what they write."""
    call = Call(x.q, x.k, x.v, x.sequence, x.mask, x.score, x.sinks, x.scale, True, None, "simulate:sm100")
    ready = validate(call)
    q, k, v = call.sequence.operands(call.q, call.k, call.v).values()
    out = poisoned((*q.shape[:-1], v.shape[-1]), q.dtype)
    lse = poisoned(ready.lse_shape, torch.float32)
    operands = fitted(Operands(q, k, v, out, lse, call.sinks))
    given = latent_launches if is_latent(ready.problem) else launches_of_choice
    return given(ready, operands, call.sequence, choice(ready.problem, parts)), (out, lse)


@pytest.mark.parametrize("how", ["hidden", "partly hidden"])
@pytest.mark.parametrize("name", drawn(CASES, ["2q-128"]))
def test_hidden_values_reach_nothing_under_any_schedule(name: str, how: str) -> None:
    case, parts = CASES[name]
    first: list[torch.Tensor] = []
    for schedule, seed in SCHEDULES:
        x = spoiled(case, how)
        steps, found = launches(x, parts)
        for step in steps:
            report = run_launch(step, Options(schedule, seed))
            assert report.clean, f"{schedule} {seed}: {report}"
        assert not unlike(found, x, 0.04), f"{schedule} {seed}: {unlike(found, x, 0.04)}"
        first = first or [part.clone() for part in found]
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(first, found, strict=True))


@pytest.mark.parametrize("name", drawn(CASES, ["wide-256"]))
def test_the_second_pass_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, parts = CASES[name]
    wrong = []
    for more in ("", "one pass"):
        x = case.build()
        x = seen_by_some(shared_latents(x) if case.dim == LATENT_DIMS.qk else x)
        (first, *others), found = launches(x, parts)
        for step in (replace(first, key=(first.key, more)) if more else first, *others):
            assert run_launch(step, Options()).clean
        wrong.append(unlike(found, x, 0.04))
        monkeypatch.setattr("warpattn.kernels.sm100.sequence_args.hides", lambda keep: False)
    assert not wrong[0] and "nan" in wrong[1]


def completing(found: tuple[tuple[str, int], ...]) -> bool:
    """Whether an operation is the wait for stores to be complete, by its lines of Python."""
    return any("read_only=False" in linecache.getline(*frame) for frame in found)


def waits_for_stores(op: Op) -> bool:
    return op.name == "ttng.async_tma_store_wait"


@pytest.mark.parametrize("name", drawn(["2q", "1q-128", "split"], ["1q-128"]))
def test_a_tile_is_stored_before_it_is_attended_to_again(name: str) -> None:
    """The wait is noticed if it is taken out; other tests of this kind have no values for which it matters."""
    case, parts = CASES[name]
    step = launches(spoiled(case, "partly hidden"), parts)[0][0]

    def once(module) -> Report:
        return simulate(module, step.grid, step.args, "lazy", step_limit=200_000, first_finding=True)

    results = [found for found in knock_out(compiled(step), once, waits_for_stores) if completing(found.frames)]
    assert results and all(found.noticed for found in results), "\n".join(map(str, results))


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [("b, 13, 128", "b, 14, 128", "PhaseRace"), ("b, 13, 128", "b, 13, 256", "PhaseError"),
     ("b, 13, 128", "b, 3, 128", "PhaseError"), ("b, 13, 128", "b, 16, 128", "PhaseError")],
)  # fmt: skip
def test_each_warpgroup_votes_at_a_barrier_of_its_own(before: str, after: str, kind: str) -> None:
    case, parts = CASES["2q"]
    step = launches(spoiled(case, "partly hidden"), parts)[0][0]
    text = compiled(step).asm["ttgir"]
    assert before in text
    report = simulate(text.replace(before, after), step.grid, step.args, "lazy", step_limit=200_000)
    assert report.of_kind(kind), report


@pytest.mark.parametrize(("mask", "again"), [("full", False), ("causal", True)])
@pytest.mark.parametrize("dim", [64, 192])
def test_only_what_a_mask_may_hide_is_looked_for(mask: str, again: bool, dim: int) -> None:
    steps, _ = launches(replace(DENSE, mask=mask, dim=dim).build(), 1)
    assert bool(steps[0].args["recompute_args"]) == again
