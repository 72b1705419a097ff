"""The project's Hopper prefill kernel in the simulator: right values and no findings under every schedule."""

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import in_turn
from tests.sim.sm90.prefill import Case, simulated
from warpattn.masks import Causal, CustomMask, Document, Materialized, Padding, SlidingWindow
from warpattn.scores import ALiBi, Bias, SoftCap

SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), *(("random", seed) for seed in range(3))]
VISIBLE = torch.rand(1, 1, 200, 200, generator=torch.Generator().manual_seed(1)) < 0.7

CASES = {
    "full": Case(200, 200),
    "causal": Case(384, 384, mask=Causal()),
    "causal-128": Case(384, 384, dim=128, mask=Causal()),
    "causal-rectangular": Case(130, 300, dim=128, heads=4, heads_kv=2, mask=Causal()),
    "three-warpgroups": Case(400, 300, mask=Causal(), long=True),
    "head-dim-256": Case(150, 200, dim=256, mask=Causal()),
    "odd-dims": Case(200, 150, dim=72, dim_v=40),
    "latent": Case(200, 150, dim=192, dim_v=128, heads=2, heads_kv=1, mask=Causal()),
    "wide-values": Case(130, 150, dim=104, dim_v=192),
    "two-parts": Case(200, 150, dim=96, mask=Causal(), score=SoftCap(3.0), sinks=True),
    "two-parts-160": Case(200, 150, dim=160, mask=Causal(), dtype=torch.float16),
    "exact-80": Case(200, 150, dim=80, mask=Causal(), dtype=torch.float16),
    "exact-112": Case(200, 150, dim=112, heads=4, heads_kv=2, mask=SlidingWindow(70)),
    "exact-208": Case(150, 150, dim=208, mask=Document(torch.arange(150)[None] // 60)),
    "exact-240": Case(130, 200, dim=240, mask=Causal()),
    "exact-packed": Case(40, 90, heads=8, heads_kv=2, dim=48, mask=Causal(), packed=4),
    "in-turn": Case(400, 300, dim=96, mask=Causal(), consumers=3),
    "three-parts": Case(200, 150, dim=216, mask=Causal()),
    "blocks-of-16": Case(70, 150, dim=256, dim_v=200),
    "fp16": Case(260, 260, dim=128, dtype=torch.float16, mask=Causal()),
    "window": Case(300, 300, mask=SlidingWindow(70, 10)),
    "materialized": Case(200, 200, mask=Materialized(VISIBLE)),
    "document": Case(256, 256, mask=Document(torch.arange(256)[None] // 100)),
    "padding": Case(200, 200, mask=Padding(torch.tensor([150]))),
    "custom": Case(200, 200, mask=CustomMask(lambda b, h, q, k: (q + k) % 3 != 0)),
    "nothing-visible": Case(140, 140, mask=CustomMask(lambda b, h, q, k: k < 0)),
    "sinks": Case(200, 200, mask=Causal(), sinks=True),
    "alibi": Case(200, 200, heads=4, heads_kv=1, mask=Causal(), score=ALiBi(torch.tensor([0.5, 0.25, 0.1, 0.05]))),
    "soft-cap": Case(200, 200, dim=128, score=SoftCap(3.0)),
    "bias": Case(140, 140, score=Bias(torch.randn(1, 2, 140, 140, generator=torch.Generator().manual_seed(2)))),
    "fp16-window": Case(260, 260, dim=128, dtype=torch.float16, mask=SlidingWindow(70, 10)),
    "odd-dims-padding": Case(200, 150, dim=72, dim_v=40, mask=Padding(torch.tensor([100]))),
    "latent-document": Case(
        256, 256, dim=192, dim_v=128, heads=2, heads_kv=1, mask=Document(torch.arange(256)[None] // 100)
    ),
    "custom-soft-cap": Case(
        200, 200, dim=128, mask=CustomMask(lambda b, h, q, k: (q + k) % 3 != 0), score=SoftCap(3.0)
    ),
    "sinks-nothing-visible": Case(140, 140, mask=CustomMask(lambda b, h, q, k: k < 0), sinks=True),
    "bias-256": Case(
        140, 140, dim=256, mask=Causal(),
        score=Bias(torch.randn(1, 2, 140, 140, generator=torch.Generator().manual_seed(2))),
    ),
    "packed-window": Case(
        75, 75, heads=16, heads_kv=2, mask=Causal() & SlidingWindow(30), sinks=True, packed=8, block_n=32
    ),
    "packed-heads": Case(
        40, 90, heads=8, heads_kv=2, mask=CustomMask(lambda b, h, q, k: (q + k + h) % 3 != 0),
        score=ALiBi(torch.rand(8, generator=torch.Generator().manual_seed(3))), packed=4,
    ),
    "seven-heads": Case(
        45, 130, heads=14, heads_kv=2, dim=128, mask=Causal() & SlidingWindow(60), sinks=True, packed=7
    ),
    "five-heads": Case(
        30, 90, heads=10, heads_kv=2, dim=80, mask=CustomMask(lambda b, h, q, k: (q + k + h) % 3 != 0), packed=5,
        score=ALiBi(torch.rand(10, generator=torch.Generator().manual_seed(5))),
    ),
    "three-heads": Case(60, 150, heads=6, heads_kv=2, dim=192, dim_v=128, dtype=torch.float16, packed=3),
    "packed-bias": Case(
        70, 150, heads=4, heads_kv=2, dim=128, mask=Causal(), packed=2, dtype=torch.float16,
        score=SoftCap(3.0) | Bias(torch.randn(1, 4, 70, 150, generator=torch.Generator().manual_seed(4))),
    ),
}


# Every kind of mask, score and config occurs in one of these.
DRAWN = ("in-turn", "fp16-window", "packed-heads", "seven-heads")


@pytest.mark.parametrize(("name", "schedule", "seed"), in_turn(CASES, DRAWN, SCHEDULES))
def test_right_and_without_findings(name, schedule, seed):
    case = CASES[name]
    report, out_error, lse_error = simulated(case, programs=3, schedule=schedule, seed=seed)
    assert report.clean, report
    assert out_error < (2e-2 if case.dtype == torch.bfloat16 else 3e-3)
    assert lse_error < 1e-4


@pytest.mark.parametrize("programs", [1, 2, 5, 8])
def test_any_grid_gives_the_same(programs):
    report, out_error, _ = simulated(Case(520, 260, mask=Causal()), programs=programs, schedule="random", seed=programs)
    assert report.clean, report
    assert out_error < 2e-2


def test_many_tiles():
    """S 1024, D 128, one head: eight tiles of queries, all of them in one report."""
    report, out_error, _ = simulated(Case(1024, 1024, heads=1, heads_kv=1, dim=128, mask=Causal()), programs=8)
    assert report.clean and out_error < 2e-2
