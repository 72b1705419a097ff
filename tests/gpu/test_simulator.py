"""The same inputs through the card and through the simulator."""

from dataclasses import replace

import pytest
import torch

import warpattn as wa
from tests.cases import Case
from tests.oracle import compare, plain, tolerance

pytestmark = pytest.mark.gpu

BASE = Case(batch=1, seq_q=200, seq_k=333, heads_q=4, heads_kv=2, dim=128, dtype=torch.bfloat16, mask="causal")
CASES = [replace(BASE, dim=dim, mask=mask) for dim in (64, 128, 256) for mask in ("full", "causal", "window")]
CASES += [replace(BASE, sinks=True), replace(BASE, score="softcap"), replace(BASE, seq_q=2200, dim=64)]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_card_and_simulator_agree(case: Case) -> None:
    here, there = case.build("cpu"), case.build("cuda")
    results = []
    for x, backend in ((here, "simulate:sm90"), (there, "sm90")):
        options = {"mask": x.mask, "score": x.score, "sinks": x.sinks, "scale": x.scale, "backend": backend}
        results.append([y.cpu() for y in wa.attention(x.q, x.k, x.v, return_lse=True, **options)])
    (simulated, simulated_lse), (measured, measured_lse) = results
    compare(measured, simulated.float(), tolerance(here, plain(here, torch.float32)[0]))
    torch.testing.assert_close(measured_lse, simulated_lse, atol=1e-3, rtol=0)
