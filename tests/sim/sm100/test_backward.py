"""The project's Blackwell backward in the simulator: right gradients and no findings under every schedule."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import drawn, in_turn
from tests.sim.backward import Case, check_right, error, gradients, launches, operands, simulated, tolerances
from tests.sim.sm90.test_backward import CASES as EVERY
from tests.sim.sm90.test_backward import SCHEDULES
from warpattn.masks import Causal
from warpattn.problem.backward import fitted_gradients, write_back
from warpattn.runtime.simulate import Options, run_launch

CASES = {name: replace(case, arch="sm100") for name, case in EVERY.items()} | {
    "dim-64-128": Case(140, 200, dim=64, dim_v=128, mask=Causal(), arch="sm100"),
    "dims-256-64-padding": replace(EVERY["padding"], dim=256, dim_v=64, arch="sm100"),
    "dim-136-nothing-visible": replace(EVERY["nothing-visible"], dim=136, arch="sm100"),
    "dim-256-lse": replace(EVERY["lse"], dim=256, dtype=torch.float16, arch="sm100"),
    "dim-192-deterministic": replace(EVERY["deterministic-full"], dim=192, arch="sm100"),
    "score-128-fp16": replace(EVERY["alibi"], dim=128, dtype=torch.float16, mask=Causal(), arch="sm100"),
}  # fmt: skip
# With the tests below: all tiles of keys and queries, every kind of mask and score, layouts and orders of addition.
DRAWN = ("ragged-cross",)


@pytest.mark.parametrize("name", drawn(CASES, DRAWN))
def test_right_and_without_findings(name):
    check_right(CASES[name], schedule="lazy")


WAYS = ("groups", "soft-cap", "dim-256", "dims-192-128")


@pytest.mark.parametrize(("name", "schedule", "seed"), in_turn(WAYS, ("dims-192-128",), SCHEDULES, each=6))
def test_every_schedule(name, schedule, seed):
    check_right(CASES[name], schedule=schedule, seed=seed)


@pytest.mark.full
@pytest.mark.parametrize("name", drawn(["deterministic-full", "dim-192-deterministic"], ["deterministic-full"]))
def test_deterministic_gradients_have_the_same_bits_in_every_schedule(name):
    found = [simulated(CASES[name], schedule=schedule, seed=seed)[2] for schedule, seed in (("lazy", 0), ("random", 3))]
    assert torch.equal(*found)


@pytest.mark.parametrize("name", drawn(["padding", "dims-256-64-padding"], ["padding"]))
def test_hidden_keys_and_values_reach_no_gradient(name):
    """Neither what a mask hides in a tile of which rows see other keys, nor a tile that no row sees."""
    case = CASES[name]  # 90 keys of the first entry are visible, and none of the second
    inputs = case.inputs()
    truth = gradients(case, inputs, torch.float64)
    allowed = tolerances(case, inputs, truth)
    x = operands(case, inputs, truth)
    with torch.no_grad():
        x.k[0, 90:], x.v[0, 90:] = torch.nan, torch.inf
        x.k[1], x.v[1] = torch.inf, torch.nan
    fitting = fitted_gradients(x)
    assert all(run_launch(launch, Options()).clean for launch in launches(case, fitting, inputs))
    write_back(fitting, x)
    assert not x.dk[0, 90:].any() and not x.dv[0, 90:].any()
    assert all(error(made, truth[name]) <= allowed[name] for name, made in (("dq", x.dq), ("dk", x.dk), ("dv", x.dv)))
