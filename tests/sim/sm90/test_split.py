"""Hopper prefill with the keys of a tile in several parts: both launches in the simulator, against the reference."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.drawn import drawn, in_turn
from tests.sim.sm90.prefill import error
from warpattn.kernels.pieces.signature import softcap_factors
from warpattn.kernels.sm90.prefill.choice import shared_out
from warpattn.kernels.sm90.prefill.config import choose_config
from warpattn.kernels.sm90.prefill.launch import arrange, list_launches
from warpattn.masks import Causal, CustomMask, Mask, SlidingWindow
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.operands import Operands, is_masked
from warpattn.reference import reference
from warpattn.runtime import simulate
from warpattn.scores import CustomScore, Score, SoftCap
from warpattn.sequences import Dense


@dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int, int, int, int]  # batch, queries, keys, query heads, key heads, head dim
    parts: int
    packed: int = 1
    mask: Mask = Causal()  # noqa: RUF009  frozen
    score: Score | None = None
    sinks: bool = False
    dim_v: int = 0


CASES = {
    "more-parts-than-key-tiles": Case((2, 70, 200, 4, 2, 64), 5, packed=2, sinks=True),
    "window": Case((1, 200, 300, 2, 1, 128), 3, mask=Causal() & SlidingWindow(100)),
    "head-dim-256": Case((1, 40, 300, 2, 1, 256), 2, score=SoftCap(3.0)),
    "head-dim-96": Case((1, 70, 150, 2, 1, 96), 2),
    "odd-dims": Case((1, 140, 150, 2, 1, 40), 2, dim_v=24, mask=CustomMask(lambda b, h, q, k: (q + k + h) % 3 != 0)),
    "nothing-visible": Case((1, 70, 150, 2, 2, 64), 2, mask=CustomMask(lambda b, h, q, k: (k < 0) | (q > 100))),
}


def operands(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v, sinks."""
    batch, seq_q, seq_k, heads, heads_kv, dim = case.shape
    q = torch.randn(batch, seq_q, heads, dim).bfloat16()
    k = torch.randn(batch, seq_k, heads_kv, dim).bfloat16()
    v = torch.randn(batch, seq_k, heads_kv, case.dim_v or dim).bfloat16()
    return q, k, v, torch.randn(heads) if case.sinks else None


def split(case: Case, x: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) by the simulated launches of a case on operands."""
    q, k, v, sinks = x
    ready = validate(Call(q, k, v, Dense(), case.mask, case.score, sinks, None, True, None, "simulate:sm90"))
    problem = ready.problem
    config, _ = choose_config(problem.element, problem.dim_qk, problem.dim_v, problem.seq_q, is_masked(problem))
    config = shared_out(replace(config, packed=case.packed))
    choice = arrange(problem, ARCHS["sm90"], config, ("given",), case.parts)
    out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=q.dtype)
    lse = torch.full(ready.lse_shape, float("nan"))
    launches = list_launches(ready, Operands(q, k, v, out, lse, sinks), Dense(), choice)
    assert [launch.name for launch in launches] == ["sm90.prefill", "sm90.combine"]
    for launch in launches:
        report = simulate.run_launch(launch, simulate.Options(programs=3, **options))
        assert report.clean, report
    return out, lse


SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), ("random", 1)]
DRAWN = ("more-parts-than-key-tiles",)


@pytest.mark.parametrize(("name", "schedule", "seed"), in_turn(CASES, DRAWN, SCHEDULES, each=4))
def test_right_and_without_findings(name: str, schedule: str, seed: int) -> None:
    case = CASES[name]
    x = operands(case)
    out, lse = split(case, x, schedule=schedule, seed=seed)
    expected, expected_lse = reference(*x[:3], mask=case.mask, score=case.score, sinks=x[3])
    assert error(out.float(), expected) < 2e-2
    assert error(lse, expected_lse) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("name", drawn(["head-dim-96", "head-dim-256"], ["head-dim-256"]))
def test_a_part_is_attended_to_again_where_it_was_left(name: str) -> None:
    """A value that some rows see is NaN in every part's own output; the second part is the first with such a value."""
    case = CASES[name]
    x = operands(case)
    x[2][:, 10], x[2][:, 100] = float("inf"), float("nan")
    out, lse = split(case, x)
    expected, expected_lse = reference(*x[:3], mask=case.mask, score=case.score, sinks=x[3])
    assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.isinf(), expected.isinf())
    assert error(out.float().nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0)) < 2e-2
    assert error(lse, expected_lse) < 1e-4


def test_a_sequence_has_the_same_bits_in_any_batch() -> None:
    """With as many parts, which `batch_invariant` sees to."""
    case = CASES["more-parts-than-key-tiles"]
    x = operands(case)
    out, lse = split(case, x)
    q, k, v, sinks = x
    alone, alone_lse = split(case, (q[1:], k[1:], v[1:], sinks))
    assert torch.equal(out[1:], alone) and torch.equal(lse[1:], alone_lse)


def test_the_factors_of_a_soft_cap_are_left_to_the_exponent() -> None:
    assert softcap_factors(SoftCap(8.0).program().out) == (0.125, 8.0)
    assert softcap_factors(SoftCap(2.0**13).program().out) is None, "its small scores are computed otherwise"
    assert softcap_factors(CustomScore(lambda s, b, h, q, k: s * 2.0).program().out) is None
