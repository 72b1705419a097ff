"""The rungs of the ladder compute attention, under schedules that keep copies and products waiting."""

import pytest
import torch

pytest.importorskip("triton")

from bench.cases import Case
from bench.ladder import __main__ as ladder
from bench.ladder import counters
from bench.ladder.rungs import RUNGS, outputs
from tests.drawn import drawn
from tests.sim.sm90.prefill import error
from warpattn.masks import Causal, Full
from warpattn.reference import reference
from warpattn.sim import compile_for, simulate

SHAPE = (2, 384, 2, 128)


def built(rung, args, causal, machine_code=False):
    """The kernel for the types of a launch's arguments."""
    kinds = {torch.Tensor: "*bf16", int: "i32", float: "fp32"}
    signature = {
        name: kinds[type(value)] if type(value) in kinds else value.__mangle__() for name, value in args.items()
    }
    signature |= dict.fromkeys(("heads", "causal"), "constexpr")
    constants = {"heads": args["heads"], "causal": causal}
    return compile_for("sm90", rung.kernel, signature, constants, machine_code=machine_code)


@pytest.fixture(params=RUNGS)
def rung(request):
    return RUNGS[request.param]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("schedule", ["lazy", "random", "eager", "adversarial"])
def test_a_rung_computes_attention(rung, causal, schedule):
    q, k, v = (torch.randn(SHAPE).to(torch.bfloat16) for _ in range(3))
    out = outputs(q)
    assert out.isnan().all()
    args = rung.arguments(q, k, v, out)
    kernel = built(rung, args, causal)
    tensors = {name: getattr(value, "base", value) for name, value in args.items() if name != "heads"}
    report = simulate(kernel, rung.grid(q), tensors, schedule, 1)
    assert report.clean, report
    expected, _ = reference(q, k, v, mask=Causal() if causal else Full())
    assert error(out.float(), expected) < 2e-2


@pytest.mark.parametrize("causal", drawn([False, True], [True]))
def test_no_rung_spills(rung, causal):
    q = torch.zeros((1, 1024, 16, 128), dtype=torch.bfloat16)
    kernel = built(rung, rung.arguments(q, q, q, q), causal, machine_code=True)
    assert "HGMMA" in kernel.asm["sass"]
    assert "STL" not in kernel.asm["sass"]


def test_a_wrong_rung_is_not_timed(monkeypatch):
    case = Case("small", 1, 128, 128, 2, 2, 128, 128)

    def prepare(name, case, qkv):
        right = reference(*qkv)[0].to(torch.bfloat16)
        wrong = {"naive": right.clone().index_fill_(1, torch.arange(4), 0.0), "tma": outputs(qkv[0])}
        return lambda: wrong.get(name, right)

    monkeypatch.setattr(ladder, "prepare", prepare)
    entry = ladder.run_case(case, rounds=2)
    rungs = entry["rungs"]
    assert {name: rung["status"] for name, rung in rungs.items()} == {
        "naive": "wrong", "tma": "wrong", "specialised": "timed", "shipped": "timed",
    }  # fmt: skip
    assert "ms" not in rungs["naive"]
    assert rungs["specialised"]["ms"]["median"] > 0
    rungs["specialised"] |= counters.counted([{"name": "k", "metrics": {counters.METRICS["cycles"]: 4e6}}])
    text = ladder.table([entry])
    assert "| small | specialised |" in text
    assert "| 4000 |" in text
    assert "against the shipped kernel" in text
