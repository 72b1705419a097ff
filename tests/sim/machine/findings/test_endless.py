"""Loops without an end are findings after few steps, and loops that something else ends are none."""

import linecache
from itertools import pairwise

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from tests.sim.builds import run
from tests.sim.machine.kernels import endless as kernels
from tests.sim.machine.kernels import plain
from warpattn.sim import DependentGrid, Report, TensorDescriptor
from warpattn.sim.machine.progress import Progress
from warpattn.sim.memory.findings import Finding

SCHEDULES = ["eager", "lazy", "random", "adversarial"]
FEW = 400  # steps: a livelock is seen when every role has gone round, whatever the limit


def numbers(n: int = 1) -> np.ndarray:
    return np.zeros(n, np.int32)


def only(report: Report, kind: str) -> Finding:
    """The one finding of a report."""
    assert [finding.kind for finding in report.findings] == [kind], report
    return report.findings[0]


def flags(kernel, programs: int, setter: int, **options) -> tuple[Report, np.ndarray]:
    out = numbers(programs)
    return run(kernel, (programs,), {"flag": numbers(), "out": out, "setter": setter}, **options), out


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kernel", [kernels.flag_kernel, kernels.atomic_kernel])
def test_a_flag_that_no_program_sets(kernel, schedule):
    report, out = flags(kernel, 3, 7, schedule=schedule)
    found = only(report, "Livelock")
    assert report.steps < FEW and not out.any()
    assert sorted(found.roles) == [f"{kernel.__name__} of program ({i}, 0, 0)" for i in range(3)]
    assert "byte 0 of flag (line" in found.message and "which holds 0" in found.message
    assert all("while tl." in linecache.getline(*place.frames[0]) for place in found.places)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kernel", [kernels.flag_kernel, kernels.atomic_kernel])
@pytest.mark.parametrize("setter", [0, 2])
def test_a_flag_that_a_program_sets(kernel, schedule, setter):
    report, out = flags(kernel, 3, setter, schedule=schedule)
    assert (out == 1).all() and not report.of_kind("Livelock") and not report.of_kind("StepLimit")


def test_a_flag_of_a_program_that_cannot_start():
    report, _ = flags(kernels.atomic_kernel, 6, 5, in_flight=4)
    assert "; in_flight lets no more run side by side, so 2 programs did not start" in only(report, "Livelock").message
    assert flags(kernels.atomic_kernel, 6, 5, in_flight=6)[0].clean


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_lock_that_nobody_gives_back(schedule):
    lock, total = np.ones(1, np.int32), numbers()
    report = run(plain.lock_kernel, (2,), {"lock": lock, "total": total}, {"N": 8}, schedule=schedule)
    assert report.steps < FEW and "byte 0 of lock" in only(report, "Livelock").message


def test_a_condition_that_the_loop_leaves_as_it_is():
    report = run(kernels.still_kernel, (1,), {"x": np.ones(32, np.float32), "out": numbers()})
    found = only(report, "Livelock")
    assert found.message.endswith("goes round a loop that reads no memory") and 3 < report.steps < FEW
    out = numbers()
    assert run(kernels.still_kernel, (1,), {"x": np.zeros(32, np.float32), "out": out}).clean and out[0] == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_programs_that_take_turns(schedule):
    out = numbers(3)
    args = {"turn": numbers(), "out": out, "n": 4, "programs": 3}
    assert run(kernels.turns_kernel, (3,), args, schedule=schedule, seed=2 * (schedule == "random")).clean
    assert (out == 4).all()
    found = only(run(kernels.turns_kernel, (3,), args | {"turn": numbers() + 1}, schedule=schedule), "Livelock")
    assert len(found.places) == 3 and "which holds" in found.message


def test_a_loop_that_counts_its_rounds():
    """Nothing but the count changes, which may end it: so it ends after a part of the steps."""
    out, endless = numbers(), 2**31 - 1
    args = {"flag": numbers(), "out": out}
    report = run(kernels.counting_kernel, (1,), {**args, "n": endless}, step_limit=100_000)
    found = only(report, "StepLimit")
    assert found.message.startswith("in 1,000 steps (step_limit / 100) nothing changes but loops' own values: counting")
    assert "byte 0 of flag" in found.message and 1000 < report.steps < 1000 + FEW
    assert run(kernels.counting_kernel, (1,), {**args, "n": 400}, step_limit=100_000).clean and out[0] == 400
    report = run(kernels.counting_kernel, (1,), {**args, "n": 900}, step_limit=200_000)
    assert report.clean and out[0] == 900


def test_a_loop_that_reads_the_clock():
    args = {"flag": numbers(), "out": numbers()}
    found = only(run(kernels.timed_kernel, (1,), args, step_limit=100_000), "StepLimit")
    assert "1,000 steps" in found.message and "byte 0 of flag" in found.message


def test_a_guess_at_what_the_preceding_launch_writes():
    """A volatile load may find something else each time."""
    flag = numbers()
    grid = DependentGrid((1,), [flag])
    report = run(kernels.counting_kernel, grid, {"flag": flag, "out": numbers(), "n": 2**30})
    assert not report.of_kind("Livelock")


@pytest.mark.parametrize("n", [2**31 - 1, 2_001])
def test_a_loop_of_more_rounds_than_a_run_may_take(n):
    args = {"x": numbers(8), "out": numbers(3)}
    report = run(kernels.long_kernel, (2,), {**args, "n": n}, step_limit=2_000)
    found = only(report, "StepLimit")
    assert report.steps == 1 and found.roles == ("long_kernel of program (0, 0, 0)",)
    assert f"begins a loop of {n:,} rounds, and a run ends after 2,000 steps (step_limit)" in found.message
    assert "for i in range(n)" in linecache.getline(*found.places[0].frames[0])


def test_a_long_loop_of_one_role_shows_its_progress(monkeypatch):
    told = []
    monkeypatch.setattr(Progress, "tell", lambda self, left, steps: told.append(steps))
    run(kernels.long_kernel, (1,), {"x": numbers(8), "out": numbers(), "n": 2_000})
    assert len(told) >= 5 and max(b - a for a, b in pairwise(told)) < 500


def test_a_run_ends_after_the_steps_that_it_may_take():
    args = {"x": numbers(8), "out": numbers(3), "n": 900}
    assert run(kernels.long_kernel, (1,), args, step_limit=1_000).clean
    found = only(run(kernels.long_kernel, (3,), args, step_limit=2_000, schedule="random"), "StepLimit")
    assert "long_kernel of program" in found.message


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_wait_that_always_passes_in_a_loop(schedule):
    report = run(kernels.barrier_kernel, (1,), {"flag": numbers()}, {"BOTH": False}, schedule=schedule)
    assert report.steps < FEW
    assert "barrier bar (line" in (text := only(report, "Livelock").message) and "of which 1 phases" in text


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loop_beside_a_role_that_waits_in_vain(schedule):
    report = run(kernels.barrier_kernel, (1,), {"flag": numbers()}, {"BOTH": True}, schedule=schedule)
    found = report.of_kind("Livelock")[0]
    assert report.steps < FEW and {"_wait_for_ever", "_wait_for_once"} == set(found.roles)
    assert "_wait_for_once" in found.message and "waits for barrier bar, parity 1 (phase 1" in found.message


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_asynchronous_work_may_end_a_loop(schedule):
    flag, out = torch.zeros(1, 32, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    layout = gl.NVMMASharedLayout.get_default_for([1, 32], gl.int32)
    args = {"flag_desc": TensorDescriptor(flag, (1, 32)), "flag": flag, "out": out}
    report = run(kernels.copied_kernel, (1,), args, layout=layout, schedule=schedule)
    assert out.item() == 1 and {finding.kind for finding in report.findings} <= {"Race"}

