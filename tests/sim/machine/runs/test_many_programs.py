"""Grids of many programs: what one of them costs does not grow, and a long run says how long it will take."""

import io
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest

pytest.importorskip("triton")

from tests.sim.builds import run
from tests.sim.machine.kernels import launched as kernels
from warpattn.sim.machine.progress import Progress, silent
from warpattn.sim.machine.roles import Role
from warpattn.sim.memory.clocks import PRECEDING, Lanes


def test_the_last_program_of_many_has_a_clock_as_small_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    widths, finish = [], Role.finish

    def noted(role: Role) -> None:
        widths.append(role.clock.rows.shape[1])
        finish(role)

    monkeypatch.setattr(Role, "finish", noted)
    x, out = np.ones(16 * 3000, np.float32), np.zeros(16 * 3000, np.float32)
    assert run(kernels.add_kernel, (3000,), {"x": x, "y": x, "out": out, "n": x.size}, {"BLOCK": 16}).clean
    assert (out == 2).all() and len(widths) == 3000 and max(widths) == widths[0]


@pytest.mark.parametrize("order", ["acq_rel", "acquire", "release", "relaxed"])
def test_what_many_programs_hand_on_by_atomics_is_ordered_if_they_release_and_acquire(order: str) -> None:
    n = 1500  # lanes beyond those that a clock has room for
    args = {"parts": np.zeros(n, np.float32), "done": np.zeros(1, np.int32), "out": np.zeros(1, np.float32), "n": n}
    report = run(kernels.last_sums_kernel, (n,), args, {"ORDER": order, "BLOCK": 2048})
    assert args["out"] == n
    assert [finding.kind for finding in report.findings] == ([] if order == "acq_rel" else ["Race"])


@pytest.mark.parametrize("schedule", ["eager", "adversarial", "random"])
@pytest.mark.parametrize(("store", "load"), [("release", "acquire"), ("release", "relaxed"), ("relaxed", "acquire")])
def test_flags_are_stored_and_loaded(store: str, load: str, schedule: str) -> None:
    args = {"data": np.zeros(1, np.float32), "flag": np.zeros(1, np.int32), "out": np.zeros(1, np.float32)}
    report = run(kernels.flag_kernel, (2,), args, {"STORE": store, "LOAD": load}, schedule=schedule)
    assert args["out"] == 7
    right = (store, load) == ("release", "acquire")
    assert [finding.kind for finding in report.findings] == ([] if right else ["Race"])


def test_what_programs_know_of_each_other_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, finish = [], Role.finish

    def noted(role: Role) -> None:
        blocks.append({id(block) for block in role.clock.far.values()})
        finish(role)

    monkeypatch.setattr(Role, "finish", noted)
    n = 5000
    args = {"parts": np.zeros(n, np.float32), "done": np.zeros(1, np.int32), "out": np.zeros(1, np.float32), "n": n}
    assert run(kernels.last_sums_kernel, (n,), args, {"ORDER": "acq_rel", "BLOCK": 8192}).clean
    assert len(blocks[-1]) >= 3 and len(blocks[-2] - blocks[-1]) <= 2, "a program shares what others know"


@pytest.mark.parametrize("apart", [200, 3000])
def test_clocks_learn_of_lanes_below_and_above_their_own(apart: int) -> None:
    lanes = Lanes()
    early, mine = lanes.new(), [lanes.new() for _ in range(apart)][-1]
    clock = lanes.clock()
    own, later = lanes.new(), [lanes.new() for _ in range(apart)][-1]
    clock.mark(own, 3, fenced=False)
    before = clock.copy()
    for lane in (early, mine, later):
        assert not clock.knows(lane, 1)
        clock.mark(lane, 5)
        assert clock.knows(lane, 5) and not clock.knows(lane, 6)
    assert clock.knows(own, 3) and not clock.knows(own, 1, row=1) and clock.epoch(own) == 3
    assert sorted(clock.since(before)) == [(early, 5), (mine, 5), (later, 5)]
    assert clock.covers(before) and not before.covers(clock)
    asked = np.array([early, mine, later, own, PRECEDING]), np.array([5, 6, 1, 3, 1])
    assert clock.known(*asked).tolist() == [True, False, True, True, False]
    before.join(clock)
    before.mark(PRECEDING, 1)
    assert before.covers(clock) and not clock.covers(before) and before.known(*asked)[-1]
    assert not clock.knows(early, 6, row=1)
    clock.mark(early, 6, fenced=False)
    assert clock.knows(early, 6) and not clock.knows(early, 6, row=1)
    clock.fence()
    assert clock.knows(early, 6, row=1) and clock.knows(own, 3, row=1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def ticking() -> Iterator[float]:
    """Every look at the clock is a second later."""
    return iter(float(second) for second in range(10**6))


def test_a_long_run_says_how_long_it_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    times = ticking()
    line = Progress("add_kernel", 100, lambda: next(times))
    line.tell(90, 10)
    assert sys.stderr.getvalue() == "", "a short run says nothing"
    line.tell(80, 20)
    line.tell(75, 25)
    text = sys.stderr.getvalue().rpartition("\r")[2]
    assert text == "simulating add_kernel: 25 steps in 3 s, 25 of 100 programs, about 9 s left"
    line.close()
    assert sys.stderr.getvalue().endswith("\r" + " " * len(text) + "\r")


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["no terminal", "another progress"])
def test_nothing_is_said_elsewhere(stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    times = ticking()
    with silent() if stream.isatty() else nullcontext():
        line = Progress("add_kernel", 2, lambda: next(times))
    for _ in range(9):
        line.tell(1, 1)
    line.close()
    assert stream.getvalue() == ""
