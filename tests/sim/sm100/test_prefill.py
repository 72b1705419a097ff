"""The Blackwell prefill kernel in the simulator: right values and no findings under every schedule."""

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import in_turn
from tests.sim.sm100.prefill import Case, simulated
from warpattn.masks import Causal, CustomMask, Document, Materialized, Padding, Prefix, SlidingWindow
from warpattn.scores import ALiBi, Bias, SoftCap

SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), ("random", 1)]
VISIBLE = torch.rand(1, 1, 200, 200, generator=torch.Generator().manual_seed(1)) < 0.7

CASES = {
    "full": Case(200, 200),
    "full-128": Case(300, 500, dim=128),
    "causal": Case(384, 384, mask=Causal()),
    "causal-128": Case(700, 700, heads=1, heads_kv=1, dim=128, mask=Causal()),
    "causal-rectangular": Case(130, 300, dim=128, heads=3, heads_kv=1, mask=Causal()),
    "causal-top-left": Case(300, 130, mask=Causal(top_left=True)),
    "moving-reference": Case(300, 900, dim=128, mask=Causal(), growth=20.0),
    "moving-reference-64": Case(200, 700, heads=4, heads_kv=1, growth=20.0, sinks=True),
    "batch": Case(130, 130, batch=2, mask=Causal()),
    "odd-dims": Case(200, 150, dim=80, dim_v=96),
    "wide-values": Case(200, 300, dim=64, dim_v=128),
    "narrow-values": Case(200, 300, dim=128, dim_v=64),
    "fp16": Case(260, 260, dim=128, dtype=torch.float16, mask=Causal()),
    "window": Case(300, 300, mask=SlidingWindow(70, 10)),
    "materialized": Case(200, 200, mask=Materialized(VISIBLE)),
    "document": Case(256, 256, mask=Document(torch.arange(256)[None] // 100)),
    "padding": Case(200, 200, batch=2, mask=Padding(torch.tensor([150, 0]))),
    "prefix": Case(200, 200, mask=Prefix(50)),
    "custom": Case(200, 200, mask=CustomMask(lambda b, h, q, k: (q + k + h) % 3 != 0)),
    "nothing-visible": Case(140, 140, mask=CustomMask(lambda b, h, q, k: k < 0)),
    "sinks": Case(200, 200, mask=Causal(), sinks=True),
    "sinks-nothing-visible": Case(140, 140, mask=CustomMask(lambda b, h, q, k: k < 0), sinks=True),
    "alibi": Case(200, 200, heads=4, heads_kv=1, mask=Causal(), score=ALiBi(torch.tensor([0.5, 0.25, 0.1, 0.05]))),
    "soft-cap": Case(200, 200, dim=128, score=SoftCap(3.0)),
    "bias": Case(140, 140, score=Bias(torch.randn(1, 2, 140, 140, generator=torch.Generator().manual_seed(2)))),
    "group-2": Case(200, 200, heads=4, heads_kv=2, dim=128, mask=Causal()),
    "group-4": Case(100, 300, heads=8, heads_kv=2, mask=Causal(), sinks=True),
    "group-8": Case(70, 200, heads=8, heads_kv=1, mask=SlidingWindow(40, 0)),
    "group-8-bias": Case(70, 70, heads=8, heads_kv=1, score=Bias(torch.randn(8, 70, 70))),
    "group-4-custom": Case(70, 200, heads=4, heads_kv=1, mask=CustomMask(lambda b, h, q, k: (q + k + h) % 3 != 0)),
    "group-6": Case(140, 140, heads=6, heads_kv=1, mask=Causal()),
    "odd-dims-document": Case(200, 256, dim=80, dim_v=96, mask=Document(torch.arange(256)[None] // 100)),
    "wide-values-prefix": Case(200, 200, dim=64, dim_v=128, mask=Prefix(50)),
    "narrow-values-soft-cap": Case(200, 200, dim=128, dim_v=64, score=SoftCap(3.0)),
    "fp16-window": Case(260, 260, dim=128, dtype=torch.float16, mask=SlidingWindow(70, 10)),
    "group-2-materialized": Case(200, 200, heads=4, heads_kv=2, dim=128, mask=Materialized(VISIBLE)),
    "narrow-values-top-left": Case(300, 130, dim=128, dim_v=64, mask=Causal(top_left=True), score=SoftCap(3.0)),
    "padding-alibi": Case(
        200, 200, heads=4, heads_kv=1, batch=2, mask=Padding(torch.tensor([150, 0])),
        score=ALiBi(torch.tensor([0.5, 0.25, 0.1, 0.05])),
    ),
    "nothing-visible-bias": Case(
        70, 140, heads=8, heads_kv=1, mask=CustomMask(lambda b, h, q, k: k < 0), score=Bias(torch.randn(8, 70, 140)),
        sinks=True,
    ),
}
# Every kind of mask, score and head dim occurs in one of these.
DRAWN = ("moving-reference-64", "padding-alibi")


@pytest.mark.parametrize(("name", "schedule", "seed"), in_turn(CASES, DRAWN, SCHEDULES))
def test_right_and_without_findings(name, schedule, seed):
    case = CASES[name]
    report, out_error, lse_error = simulated(case, schedule=schedule, seed=seed)
    assert report.clean, report
    assert out_error < (2e-2 if case.dtype == torch.bfloat16 else 3e-3)
    assert lse_error < 1e-4


@pytest.mark.parametrize("keys", [1, 2, 63, 64, 65, 127, 129, 1000])
@pytest.mark.parametrize("rows", [1, 65, 127, 257])
def test_odd_lengths(rows, keys):
    report, out_error, lse_error = simulated(Case(rows, keys, 1, 1, mask=Causal()), schedule="random", seed=keys)
    assert report.clean, report
    assert out_error < 2e-2
    assert lse_error < 1e-4
