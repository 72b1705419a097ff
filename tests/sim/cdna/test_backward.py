"""The project's CDNA backward in the simulator: right gradients and no findings under every schedule."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import drawn, left_out
from tests.sim.backward import Case, check_right, error, gradients, launches, operands, simulated, tolerances
from tests.sim.cdna.calls import ARCHS
from tests.sim.sm90.test_backward import CASES as EVERY
from tests.sim.sm90.test_backward import SCHEDULES
from warpattn.masks import Causal, Document, Materialized, SlidingWindow
from warpattn.problem.backward import fitted_gradients, write_back
from warpattn.runtime.simulate import Options, run_launch
from warpattn.scores import CustomScore

CASES = {name: case for name, case in EVERY.items() if max(case.dim, case.dim_v) <= 128 and not case.section} | {
    "dims-64-128": Case(140, 200, dim=64, dim_v=128, mask=Causal()),
    "dims-128-24": Case(140, 200, dim=128, dim_v=24, mask=SlidingWindow(70, 10), dtype=torch.float16),
    "padding-128": replace(EVERY["padding"], dim=128),
    "lse-128": replace(EVERY["lse"], dim=128, dtype=torch.float16),
    "score-128-fp16": replace(EVERY["alibi"], dim=128, dtype=torch.float16, mask=Causal()),
    "undefined-past-the-end": Case(140, 140, score=CustomScore(lambda s, b, h, q, k: s / (140 - q))),
    "many-query-tiles": Case(2200, 70, mask=SlidingWindow(100), heads=2, heads_kv=1),  # more than one search has
}  # fmt: skip
BOTH = [(arch, name) for arch in ARCHS for name in CASES]
PADDED = [(arch, name) for arch in ARCHS for name in ("padding", "padding-128")]
# Both sides' tiles, every kind of mask and score, layouts.
DRAWN = (
    ("gfx942", "odd-dims"), ("gfx942", "soft-cap"), ("gfx950", "many-query-tiles"),
    ("gfx950", "undefined-past-the-end"),
)  # fmt: skip


@pytest.mark.parametrize(("arch", "name"), drawn(BOTH, DRAWN))
def test_right_and_without_findings(arch, name):
    check_right(replace(CASES[name], arch=arch))


@pytest.mark.parametrize(("schedule", "seed"), drawn(SCHEDULES, [("adversarial", 0), ("random", 0)]))
@pytest.mark.parametrize(("arch", "name"), [("gfx942", "causal"), ("gfx950", "ragged-window")])
def test_every_schedule(arch, name, schedule, seed):
    check_right(replace(CASES[name], arch=arch), schedule=schedule, seed=seed)


@pytest.mark.parametrize("arch", drawn(ARCHS, ["gfx942"]))
def test_gradients_have_the_same_bits_in_every_schedule(arch):
    case = replace(CASES["deterministic-ragged"], arch=arch)
    found = [simulated(case, schedule=schedule, seed=seed)[2] for schedule, seed in (("lazy", 0), ("random", 3))]
    assert torch.equal(*found)


@pytest.mark.parametrize(("arch", "name"), drawn(PADDED, [("gfx942", "padding-128")]))
def test_hidden_keys_and_values_reach_no_gradient(arch, name):
    """Neither what a mask hides in a tile of which rows see other keys, nor a tile that no row sees."""
    case = replace(CASES[name], arch=arch)  # 90 keys of the first entry are visible, and none of the second
    check_hidden(case, (0, slice(90, None)), (1, slice(None)))


@pytest.mark.parametrize("arch", drawn(ARCHS, ["gfx942"]))
def test_hidden_keys_between_visible_ones_reach_no_gradient(arch):
    keys = torch.arange(140)
    mask = Materialized(((keys < 50) | (keys >= 53)).expand(1, 1, 140, 140))
    check_hidden(Case(140, 140, mask=mask, arch=arch), (0, slice(50, 53)))


@pytest.mark.parametrize("arch", drawn(ARCHS, ["gfx950"]))
def test_nothing_past_the_last_visible_key_reaches_a_gradient(arch):
    """Under masks of indices, too, and within the last key tile that is walked."""
    check_hidden(Case(40, 200, mask=Causal(top_left=True), arch=arch), (0, slice(40, None)))


def check_hidden(case: Case, *hidden: tuple[int, slice]) -> None:
    """Assert that gradients are right where hidden keys and values of a batch entry are NaN or infinite."""
    inputs = case.inputs()
    truth = gradients(case, inputs, torch.float64)
    allowed = tolerances(case, inputs, truth)
    x = operands(case, inputs, truth)
    with torch.no_grad():
        for place, key, value in zip(hidden, (torch.nan, torch.inf), (torch.inf, torch.nan), strict=False):
            x.k[place], x.v[place] = key, value
    fitting = fitted_gradients(x)
    assert all(run_launch(launch, Options()).clean for launch in launches(case, fitting, inputs))
    write_back(fitting, x)
    assert not any(made[place].any() for made in (x.dk, x.dv) for place in hidden)
    assert all(error(made, truth[name]) <= allowed[name] for name, made in (("dq", x.dq), ("dk", x.dk), ("dv", x.dv)))


@pytest.mark.full
@pytest.mark.parametrize("arch", drawn(ARCHS, ["gfx950"]))
@pytest.mark.parametrize(
    ("mask", "share"), [(Document(torch.arange(1024)[None] // 128), 1 / 8), left_out((SlidingWindow(128), 1 / 5))]
)
def test_work_is_in_proportion_to_what_is_visible(arch, mask, share):
    """Steps of the simulator, of both kernels: those of tiles, and some at the beginning and the end of a workgroup."""
    steps = [[report.steps for report in simulated(Case(1024, 1024, mask=each, arch=arch))[0]] for each in (mask, None)]
    assert all(few < 2 * share * all_ for few, all_ in zip(*steps, strict=True))
