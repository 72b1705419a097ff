"""Hopper prefill with products of 8 bits in the simulator: right values, no findings, needed synchronisation."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn
from tests.oracle import poisoned
from tests.sim import products
from tests.sim.knocking import SM90_PREFILL, first_pass, knocked_out, reviewed
from tests.sim.products import RELATIVE, Case, Given, checked_call, operands
from tests.sim.sm90.decode import built
from tests.sim.sm90.decoding.test_decode import SCHEDULES
from tests.sim.sm90.prefill import error
from tests.sim.sm90.ragged.test_lengths_code import FIRST
from warpattn.kernels.sm90.prefill.choice import choose
from warpattn.kernels.sm90.select import list_launches
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import DEFAULT_OPTIONS
from warpattn.problem.operands import Operands
from warpattn.quantized import transposed_values
from warpattn.runtime.simulate import Options, dependent, run_launch, traced

SAME_HEADS = wa.Causal() & wa.SlidingWindow(100)


CASES = {
    "128": Case(200, 300, sinks=True),
    "64-packed": Case(40, 300, dim=64, per="tensor", mask=SAME_HEADS, dtype=torch.float16),
    "64": Case(200, 140, dim=64, mask=None),
    "192": Case(70, 130, heads=1, heads_kv=1, dim=192),
    "256": Case(150, 200, heads=2, heads_kv=1, dim=256),
    "two-dims": Case(130, 260, heads=2, heads_kv=1, dim=80, dim_v=48, score=wa.SoftCap(5.0)),
    "hidden-first": Case(200, 300, mask=wa.SlidingWindow(60, 30)),
    "64-rows": Case(200, 300, heads=3, heads_kv=1, batch=2, per="64 rows"),
    "64-rows-score": Case(150, 200, heads=2, heads_kv=1, dim=64, per="64 rows", score=wa.SoftCap(3.0)),
    "128-rows": Case(300, 300, per="128 rows", mask=None),
    "64-rows-packable": Case(40, 300, dim=64, per="64 rows", mask=SAME_HEADS, dtype=torch.float16),
    "split": Case(20, 2200, heads=2, heads_kv=1, per="tensor"),
}


def check(case: Case, given: Given, schedule: str = "lazy", seed: int = 0) -> None:
    checked, x, sequence = checked_call(case, given, "simulate:sm90")
    report = traced(checked, x, Options(schedule, seed), sequence)
    assert report.clean, report
    products.check(case, given, x)


@pytest.mark.parametrize("name", drawn(CASES, ["64-rows"]))
def test_right_and_without_findings(name):
    case = CASES[name]
    for schedule, seed in SCHEDULES:
        check(case, operands(case), schedule, seed)


@pytest.mark.parametrize("name", drawn(["64", "128", "256", "two-dims", "64-rows", "split"], ["64", "256"]))
def test_values_that_come_transposed(name):
    """The same bits; no launch transposes them, and the values themselves are not read: they are NaN."""
    case = CASES[name]
    q, k, v = operands(case)
    checked, x, sequence = checked_call(case, (q, k, v), "simulate:sm90")
    assert traced(checked, x, Options(), sequence).clean
    brought = replace(v, transposed=transposed_values(v.values))
    for schedule, seed in SCHEDULES:
        checked, found, sequence = checked_call(case, (q, k, brought), "simulate:sm90")
        found = found._replace(v=poisoned(x.v.shape, torch.float32).to(x.v.dtype), sinks=x.sinks)
        launches = list_launches(checked, found, sequence, DEFAULT_OPTIONS)
        assert "sm90.transpose_values" not in [step.name for step in launches]
        assert traced(checked, found, Options(schedule, seed), sequence).clean
        assert torch.equal(found.out, x.out) and torch.equal(found.lse, x.lse)


@pytest.mark.parametrize(("queries", "mask"), [(390, wa.Causal()), (391, None)])
def test_three_warpgroups(queries, mask, monkeypatch):
    """As long sequences at head dim 64 have them."""
    monkeypatch.setattr("warpattn.kernels.sm90.prefill.eight_bit.config.MASKED_ROWS", 1)
    monkeypatch.setattr("warpattn.kernels.sm90.prefill.eight_bit.config.SHORT_ROWS", 1)
    case = Case(queries, 410, dim=64, mask=mask)
    given = operands(case)
    assert choose(checked_call(case, given, "simulate:sm90")[0].problem, ARCHS["sm90"]).config.consumers == 3
    for schedule, seed in SCHEDULES:
        check(case, given, schedule, seed)


@pytest.mark.parametrize("per", drawn(["head", "tensor"], []))
def test_ragged_sequences(per):
    """Empty ones, too; those that end inside of a tile do not see the values of the next one, which are NaN here."""
    torch.manual_seed(0)
    cu = torch.tensor([0, 130, 130, 200, 340]).int()
    q, k, v = (wa.quantize(torch.randn(340, heads, 64), per=per) for heads in (4, 2, 2))
    v.values[200:] = float("nan")
    given = wa.Ragged(cu, k_scale=k.scale, v_scale=v.scale, q_scale=q.scale)
    call = Call(q.values, k.values, v.values, given, wa.Causal(), None, None, None, True, backend="simulate:sm90")
    checked, out, lse = validate(call), poisoned((340, 4, 64), torch.bfloat16), poisoned((4, 340), torch.float32)
    report = traced(checked, Operands(q.values, k.values, v.values, out, lse, None), Options(), given)
    assert report.clean, report
    exact = torch.empty(340, 4, 64)
    _, expected_lse = wa.attention_varlen(q, k, v, wa.Ragged(cu), mask=wa.Causal(), return_lse=True, out=exact)
    assert out[200:].isnan().all() and error(lse, expected_lse) < 1e-4
    assert (out[:200].float() - exact[:200]).norm() <= RELATIVE * exact[:200].norm()


@pytest.mark.full
def test_references_that_have_to_move():
    """Scores that grow by hundreds from tile to tile, and rows of equal ones."""
    case = CASES["128"]
    q, k, v = operands(case)
    size = torch.arange(300).view(1, -1, 1, 1) / 300
    grown = wa.quantize(k.dequantized() * 40 * size, scale=k.scale)
    check(case, (q, replace(k, values=grown.values), v))
    check(case, (replace(q, values=torch.zeros_like(q.values.float()).to(q.values.dtype)), k, v))


@pytest.mark.parametrize("score", [2.0**22, 1.2e7, 6e7, 8.5901864e7, 9.129241e7, 1e9, -9e7])
def test_large_scores(score):
    """Of equal scores, however large, every value gets its share: no weight exceeds what e4m3 holds. One large score
    among small ones has all."""
    case = Case(200, 300, heads=1, heads_kv=1, dim=64, mask=None)
    q, k, v = operands(case)
    q = replace(q, values=torch.zeros_like(q.values.float()).to(q.values.dtype))
    bias = torch.full((1, 1, 200, 300), score)
    bias[..., 100:, :] = -abs(score)
    bias[..., 100:, 200] = abs(score)
    found = wa.attention(q, k, v, score=wa.Bias(bias), backend="simulate:sm90").float()
    values = v.dequantized()
    exact = torch.cat([values.mean(1, keepdim=True), values[:, 200:201]], 1).repeat_interleave(100, 1)
    assert (found - exact).norm() <= RELATIVE * exact.norm()


def test_values_are_transposed_in_the_order_of_the_weights():
    """Of one block of 32 keys, and 0 past the last key."""
    keys = torch.arange(40).float()
    values = keys.div(4).view(1, 40, 1, 1).expand(1, 40, 1, 32)
    nothing = torch.zeros(1, 20, 1, 64), torch.zeros(1, 40, 1, 64)
    given = tuple(wa.quantize(x, scale=torch.tensor(1.0)) for x in (*nothing, values))
    checked, x, sequence = checked_call(Case(20, 40), given, "simulate:sm90")
    across = list_launches(checked, x, sequence, DEFAULT_OPTIONS)[0]
    assert run_launch(across, Options()).clean
    rows: Tensor = across.args["out_ptr"]
    assert rows.shape == (1, 1, 32, 64)
    order = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    places = torch.tensor([*order, *(16 + i for i in order), *(32 + i for i in order), *([40] * 16)])
    stored = torch.cat([given[2].values[0, :, 0, 0].float(), torch.zeros(24)])
    assert (rows[0, 0].float() == stored[places]).all()


@pytest.mark.full
def test_it_needs_its_synchronisation():
    """In tiles of many keys, of one key tile, where slots of queries are waited for, and of as many as a ring has
    slots, where slots for the first keys of the next tile are."""
    steps = []
    for queries, keys in ((300, 700), (800, 100), (400, 512)):
        case = Case(queries, keys, heads=1, heads_kv=1)
        checked, x, sequence = checked_call(case, operands(case), "simulate:sm90")
        across, step = list_launches(checked, x, sequence, DEFAULT_OPTIONS)
        assert run_launch(across, Options()).clean
        steps.append(step)
    assert len({step.key for step in steps}) == 1

    def once(module, schedule):
        for step in steps:
            step.args["counter_ptr"].zero_()  # a changed kernel may leave it anywhere
            grid = dependent(step, (1,))
            report = wa.sim.simulate(module, grid, step.args, schedule=schedule, step_limit=20_000, first_finding=True)
            if not report.clean:
                break
        return report

    change = partial(wa.sim.knock_out, only=first_pass)
    results = knocked_out(built(steps[0]), once, reviewed([*SM90_PREFILL, FIRST]), change=change)
    assert sum(found.noticed for found in results) > 0.8 * len(results)
