"""Phase races: a barrier whose phases are not told apart is a finding in every schedule, whatever the run shows."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.sim.blackwell import specialised_kernels as kernels
from tests.sim.blackwell.test_blackwell import built
from tests.sim.builds import poison
from warpattn.sim import Report, TensorDescriptor, simulate

SCHEDULES = ["eager", "lazy", "random", "adversarial"]
TILES = 5


def matmul(fault: str, schedule: str, seed: int = 0) -> tuple[Report, bool]:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(TILES * kernels.M, 64, generator=generator).half()
    b, out = torch.randn(64, kernels.N, generator=generator).half(), poison((TILES * 128, 64))
    args = {"a_desc": TensorDescriptor(a, (128, 64)), "b_desc": TensorDescriptor(b, (64, 64))}
    args |= {"out": out, "tiles": TILES}
    report = simulate(built(kernels.matmul_kernel, args, {"FAULT": fault}), (1,), args, schedule=schedule, seed=seed)
    return report, np.allclose(out, (a.float() @ b.float()).numpy(), atol=1e-3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_right_matmul_is_clean(schedule):
    report, right = matmul("", schedule, seed=3)
    assert report.clean and right, report


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_barrier_of_the_other_accumulator_is_found_in_every_schedule(schedule):
    """It orders every access, and hangs where storing is quicker than multiplying."""
    report, _ = matmul("other_stage", schedule)
    races = report.of_kind("PhaseRace")
    assert races and {race.roles[0] for race in races} == {"multiply_role"}, report


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_the_default_schedules_have_right_values_all_the_same(schedule):
    report, right = matmul("other_stage", schedule)
    assert right and {finding.kind for finding in report.findings} == {"PhaseRace"}, report


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("parity", [0, 1])
def test_a_wait_that_may_see_either_of_two_phases(parity, schedule):
    report = simulate(built(kernels.phases_kernel, {}, {"PARITY": parity}), (1,), {}, schedule=schedule)
    assert report.of_kind("PhaseRace"), report
