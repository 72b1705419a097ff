"""The second pass of CDNA over tiles that met hidden values of NaN or infinity: right under every schedule, and missed
where it is taken out."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cases import Case
from tests.drawn import drawn, in_turn
from tests.eight_bit import over_latents
from tests.oracle import Inputs, poisoned
from tests.sim.cdna.calls import ARCHS, E4M3, SCHEDULES, decode_choice, ready_of
from tests.specials import CALLS, LATENTS, WIDE, spoiled, unlike
from warpattn.kernels.cdna.launch import launches_of_choice
from warpattn.problem import Call
from warpattn.problem.arch import triton_target
from warpattn.problem.launch import Launch
from warpattn.problem.operands import Operands, fitted
from warpattn.runtime.simulate import Options, run_launch
from warpattn.sim import simulate
from warpattn.sim.compile import to_ttgir

both = pytest.mark.parametrize("arch", ARCHS)
BF16 = torch.bfloat16
DECODE = Case(batch=1, seq_q=2, seq_k=600, heads_q=4, heads_kv=1, dim=128, dtype=BF16, mask="window-both", sinks=True)
# Name -> (the problem, parts of its keys, special values that its kernel meets)
CASES = {
    "prefill, 64": (replace(CALLS["window"], seq_q=150), 1, "partly hidden"),
    "prefill, 160": (WIDE["causal, 160"], 1, "partly hidden"),
    "ragged, 256": (WIDE["causal, 256, ragged"], 1, "partly hidden"),
    "pages, 256": (WIDE["window, 256, pages"], 1, "partly hidden"),
    "decode in parts": (DECODE, 3, "hidden"),
    "latents in parts": (LATENTS["latents, few rows"][0], 2, "partly hidden"),
    "8-bit latents": (LATENTS["8-bit latents, few rows"][0], 1, "partly hidden"),
}


def launches(name: str, arch: str) -> tuple[Inputs, tuple[Launch, ...], tuple[Tensor, Tensor]]:
    """The tensors of a case, its launches, and what they write."""
    case, parts, how = CASES[name]
    x = spoiled(case, how)
    x = over_latents(x, 128, E4M3[arch]) if name.startswith("8-bit") else x
    call = Call(x.q, x.k, x.v, x.sequence, x.mask, x.score, x.sinks, x.scale, True)
    ready = ready_of(call, arch)
    q, k, v = call.sequence.operands(call.q, call.k, call.v).values()
    out, lse = poisoned((*q.shape[:-1], ready.problem.dim_v), q.dtype), poisoned(ready.lse_shape, torch.float32)
    operands = fitted(Operands(q, k, v, out, lse, call.sinks))
    return x, launches_of_choice(ready, operands, call.sequence, decode_choice(call, arch, parts)), (out, lse)


SOME = [("prefill, 160", "gfx942"), ("decode in parts", "gfx950")]
IN_TURN = in_turn(product(CASES, ARCHS), SOME, [(name,) for name in SCHEDULES])


@pytest.mark.parametrize(("kernel", "schedule"), IN_TURN, ids=str)
def test_hidden_values_reach_nothing_under_any_schedule(kernel: tuple[str, str], schedule: str) -> None:
    x, steps, found = launches(*kernel)
    for step in steps:
        report = run_launch(step, Options(schedule))
        assert report.clean, str(report)
    assert not unlike(found, x, 0.04)


def without_second_pass(step: Launch) -> Any:
    """The compiled kernel, in which no sum of a row counts as NaN."""
    kernel: Any = to_ttgir(step.source(), triton_target(step.arch), dict(step.options))
    text = str(kernel.asm["ttgir"])
    looks = "arith.cmpf une, %spoiled"
    assert text.count(looks) == 1
    return text.replace(looks, "arith.cmpf one, %spoiled")


@pytest.mark.parametrize(("name", "arch"), drawn(product(CASES, ARCHS), SOME[:2]))
def test_a_removed_second_pass_is_noticed(name: str, arch: str) -> None:
    x, (step, *combine), found = launches(name, arch)
    assert simulate(without_second_pass(step), step.grid, step.args).clean
    for after in combine:
        assert run_launch(after, Options()).clean
    assert "differ in nan" in unlike(found, x, 0.04)


@both
@pytest.mark.parametrize(("mask", "again"), [("none", False), ("full", False), ("causal", True)])
def test_only_under_a_mask_arguments_are_passed_once_more(arch: str, mask: str, again: bool) -> None:
    x = replace(DECODE, mask=mask).build()
    call = Call(x.q, x.k, x.v, x.sequence, x.mask, None, x.sinks, None, True)
    out = poisoned(x.q.shape, BF16), poisoned((1, 4, 2), torch.float32)
    ready = ready_of(call, arch)
    (step, *_) = launches_of_choice(ready, Operands(x.q, x.k, x.v, *out, x.sinks), x.sequence)
    assert bool(step.args["again"]) == again
