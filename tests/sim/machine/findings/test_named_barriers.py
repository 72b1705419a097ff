"""Hardware barriers of inline assembly: whose number, how many threads, and who may be counted among them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton")

from tests.sim.builds import run
from tests.sim.machine.kernels import wait as kernels
from warpattn.sim import Report

SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), *(("random", seed) for seed in range(4))]


def votes(
    first: int = 13, second: int = 14, threads: int = 128, in_turn: bool = False, **options
) -> tuple[Report, list[int]]:
    """Two warpgroups that vote on numbers of which only the second one has a positive one, in its last warp."""
    x, out = np.full(256, -1, np.float32), np.full(2, 7, np.int32)
    x[255] = 1
    constants = {"FIRST": first, "SECOND": second, "THREADS": threads, "IN_TURN": in_turn}
    return run(kernels.vote_kernel, (1,), {"x": x, "out": out}, constants, **options), out.tolist()


def meeting(number: int = 15, threads: int = 256, sync: bool = True, times: int = 2, **options) -> Report:
    constants = {"NUMBER": number, "THREADS": threads, "SYNC": sync, "TIMES": times}
    return run(kernels.meeting_kernel, (1,), {}, constants, **options)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_each_role_gets_its_own_vote(schedule, seed):
    for how in ({}, {"second": 13, "in_turn": True}):
        report, out = votes(**how, schedule=schedule, seed=seed)
        assert report.clean, report
        assert out == [0, 1]


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_two_roles_that_vote_at_one_barrier_may_be_counted_together(schedule, seed):
    report, _ = votes(second=13, schedule=schedule, seed=seed)
    assert {(found.kind, found.barrier) for found in report.findings} == {("PhaseRace", "13")}
    assert "may be counted among them" in str(report)


def test_a_vote_is_of_the_threads_of_its_role():
    report, _ = votes(threads=256)
    assert "for a vote of 256 threads; the role has 128" in report.of_kind("PhaseError")[0].message
    assert "128 of 256 threads have arrived" in report.of_kind("Deadlock")[0].message, "no other thread arrives"
    assert votes(second=13, threads=256)[0].of_kind("PhaseError"), "both roles take part"


@pytest.mark.parametrize(("number", "said"), [(2, "the compiler has 0 to 2"), (16, "a block has 0 to 15")])
def test_numbers_of_others_and_numbers_that_no_block_has(number, said):
    assert said in str(votes(number)[0].of_kind("PhaseError")[0])
    assert said in str(meeting(number).of_kind("PhaseError")[0])


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_roles_that_meet_again(schedule, seed):
    assert meeting(schedule=schedule, seed=seed).clean
    assert meeting(sync=False, times=1, schedule=schedule, seed=seed).clean
    found = meeting(sync=False, schedule=schedule, seed=seed).of_kind("PhaseRace")
    assert found, "who does not wait may arrive twice before the other role does"


@pytest.mark.parametrize("threads", [0, 250])
def test_counts_are_of_whole_warps(threads):
    assert f"{threads} threads, which are no whole warps" in str(meeting(threads=threads).of_kind("PhaseError")[0])
