"""Gradients by the kernels of the backward on a Hopper card: values against fp64, and the same bits where promised."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.sim.backward import Case, checked, error, gradients, operands, tolerances
from warpattn.kernels.sm90.backward.launch import list_backward_launches
from warpattn.masks import Causal, CustomMask, Prefix, SlidingWindow
from warpattn.problem.backward import CheckedBackward, Gradients, fitted_gradients, write_back
from warpattn.runtime.bound_launches import launch_all
from warpattn.scores import SoftCap
from warpattn.sequences import Ragged

pytestmark = pytest.mark.gpu

LENGTHS = ((300, 400), (0, 40), (30, 0), (20, 200), (1, 700), (513, 513))
CASES = {
    "full": Case(500, 700, dim=128, batch=2),
    "causal": Case(1000, 1300, dim=128, heads=4, heads_kv=2, mask=Causal()),
    "causal-64": Case(3000, 3000, heads=2, mask=Causal()),
    "odd-dims": Case(70, 70, dim=72, dim_v=40, dtype=torch.float16),
    "holes": Case(500, 500, mask=CustomMask(lambda b, h, q, k: (q + k) % 3 != 0)),
    "exact-80": Case(300, 500, dim=80, heads=4, heads_kv=2, mask=Causal()),
    "exact-112": Case(1000, 700, dim=112, dtype=torch.float16, batch=2),
    "exact-ragged": Case(0, 0, lengths=LENGTHS, dim=104, dim_v=72, heads=4, heads_kv=2, mask=Causal()),
    "prefix-or-window": Case(700, 700, dim=128, mask=Prefix(40) | SlidingWindow(50)),
    "soft-cap-and-sinks": Case(300, 300, dim=128, score=SoftCap(3.0), mask=Causal(), sinks=True, dlse=True, limit=3.0),
    "dim-256": Case(500, 300, dim=256, heads=2, heads_kv=1, mask=Causal()),
    "dims-192-128": Case(300, 500, dim=192, dim_v=128),
    "many-key-tiles-128": Case(200, 1200, dim=128, heads=8, heads_kv=8, batch=2),
    "many-key-tiles-256": Case(200, 1200, dim=256, heads=8, heads_kv=8, batch=2),
    "many-key-tiles-192-128": Case(1000, 10_000, heads=4, heads_kv=2, dim=192, dim_v=128, mask=Causal()),
    "many-key-tiles-ragged": Case(0, 0, lengths=LENGTHS * 4, dim=256, heads=4, heads_kv=4),
    "ragged": Case(0, 0, lengths=LENGTHS, dim=128, heads=4, heads_kv=2, mask=Causal()),
}
REPEATS = 16


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, deterministic: bool) -> None:
    case = replace(CASES[name], deterministic=deterministic)
    inputs = case.inputs()
    truth = gradients(case, inputs, torch.float64)
    x = Gradients(*(None if tensor is None else tensor.cuda() for tensor in operands(case, inputs, truth)))
    sequence = case.sequence
    if isinstance(sequence, Ragged):
        assert sequence.cu_k is not None
        sequence = Ragged(sequence.cu_q.cuda(), sequence.cu_k.cuda())
    backward = CheckedBackward.of(checked(case, inputs), deterministic)
    fitting = fitted_gradients(x)
    found = []
    for _ in range(REPEATS if deterministic else 1):
        launch_all(list_backward_launches(backward, fitting, sequence), 0)
        found.append([fitting.dq.clone(), fitting.dk.clone(), fitting.dv.clone()])
    write_back(fitting, x)
    allowed = tolerances(case, inputs, truth)
    made = {"dq": x.dq, "dk": x.dk, "dv": x.dv} | ({} if x.dsinks is None else {"dsinks": x.dsinks})
    for gradient, tensor in made.items():
        assert error(tensor.cpu(), truth[gradient]) <= allowed[gradient], gradient
    assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(found[0], again, strict=True))
