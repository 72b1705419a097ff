"""Deliberately broken kernels: each gives the right kind of finding, for the right role, at the right line of Python.

The kernel without its fault is clean under every schedule, and so is every kernel here whose fault changes nothing.
"""

import linecache

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from tests.sim.builds import run
from tests.sim.machine.kernels import gluon as kernels
from tests.sim.machine.kernels import plain as plain_kernels
from warpattn.sim import DependentGrid, Report, SimulationError, TensorDescriptor

LAYOUT = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), *(("random", seed) for seed in range(4))]
BOX = (64, 64)


def copy(fault: str, **options) -> tuple[Report, bool]:
    x = torch.randn(100, 64).half()
    out = torch.full_like(x, float("nan"))
    args = {"x_desc": TensorDescriptor(x, BOX), "out_desc": TensorDescriptor(out, BOX)}
    report = run(kernels.copy_kernel, (2,), args, {"FAULT": fault}, layout=LAYOUT, **options)
    return report, torch.equal(out, 2 * x)


def product(fault: str, **options) -> tuple[Report, bool]:
    a, b = (torch.randn(64, 64).half() for _ in range(2))
    out = torch.full((64, 64), float("nan"))
    args = {"a_desc": TensorDescriptor(a, BOX), "b_desc": TensorDescriptor(b, BOX), "out": out}
    report = run(kernels.product_kernel, (1,), args, {"FAULT": fault}, layout=LAYOUT, **options)
    first = a.float() @ b.float()
    return report, torch.allclose(out, first + first.half().float() @ b.float(), rtol=1e-4, atol=1e-3)


def ring(fault: str, **options) -> tuple[Report, bool]:
    x = torch.randn(5 * 64, 64).half()
    out = torch.full((64, 64), float("nan"))
    args = {"x_desc": TensorDescriptor(x, BOX), "out": out, "tiles": 5}
    report = run(kernels.ring_kernel, (1,), args, {"FAULT": fault}, layout=LAYOUT, **options)
    return report, torch.allclose(out, x.float().reshape(5, 64, 64).sum(0), atol=1e-5)


def handover(fault: str, **options) -> tuple[Report, bool]:
    out = torch.full((64, 64), float("nan")).half()
    args = {"out_desc": TensorDescriptor(out, BOX)}
    report = run(kernels.handover_kernel, (1,), args, {"FAULT": fault}, layout=LAYOUT, **options)
    return report, bool((out == 3).all())


def last_block(fault: str, **options) -> tuple[Report, bool]:
    x, part = np.arange(32, dtype=np.float32), np.full(4, np.nan, np.float32)
    count, out = np.zeros(1, np.int32), np.full(1, np.nan, np.float32)
    args = {"x": x, "part": part, "count": count, "out": out}
    report = run(plain_kernels.last_block_kernel, (4,), args, {"N": 8, "LOCKED": fault != "relaxed"}, **options)
    return report, out[0] == x.sum()


def store(fault: str, **options) -> tuple[Report, bool]:
    out = np.full(4, -1, np.int32)
    args = {"out": out, "offset": {"past_the_end": 2, "before": -3}.get(fault, 0)}
    report = run(plain_kernels.store_kernel, (4,), args, {"SAME": fault == "same_place"}, **options)
    return report, np.array_equal(out, np.arange(4))


def ahead(fault: str, **options) -> tuple[Report, bool]:
    x, y, out = (torch.randn(64) for _ in range(3))
    running = {"reads too early": [x[::3], y], "nothing runs": [], "no wait": [y]}.get(fault, [y, out])
    args = {"x": x, "y": y, "out": out}
    report = run(kernels.ahead_kernel, DependentGrid((1,), running), args, {"FAULT": fault}, **options)
    return report, torch.equal(out, x + y)


# program, fault, kind, role and source text of the first place, of the second (if the finding has two)
FAULTS = [
    (copy, "no_init", "PhaseError", "copy_kernel", "mbarrier.expect(bar, nbytes)", None),
    (copy, "double_init", "PhaseError", "copy_kernel", "mbarrier.init(bar, count=1)", None),
    (copy, "short_expect", "Deadlock", "copy_kernel", "mbarrier.wait(bar, 0)", None),
    (copy, "long_expect", "Deadlock", "copy_kernel", "mbarrier.wait(bar, 0)", None),
    (copy, "no_expect", "Race", "copy_kernel", "tma.async_load(x_desc", "tile.load(layout)"),
    (copy, "twice_expect", "PhaseError", "copy_kernel", "mbarrier.expect(bar, nbytes)", None),
    (copy, "wrong_parity", "Race", "copy_kernel", "tma.async_load(x_desc", "tile.load(layout)"),
    (copy, "no_wait", "Race", "copy_kernel", "tma.async_load(x_desc", "tile.load(layout)"),
    (copy, "no_wait", "PendingAtExit", "copy_kernel", "tma.async_load(x_desc", None),
    (copy, "unwritten", "UninitialisedRead", "copy_kernel", "result.load(layout) if", None),
    (copy, "overwrite", "Race", "copy_kernel", "tma.async_store(out_desc", "result.store(values)"),
    (copy, "no_store_wait", "PendingAtExit", "copy_kernel", "tma.async_store(out_desc", None),
    (copy, "after_inval", "PhaseError", "copy_kernel", "mbarrier.wait(bar, 0)", None),
    (product, "loose_wait", "Race", "product_kernel", "first.to(gl.float16)", "first = warpgroup_mma(a"),
    (product, "overwrite", "Race", "product_kernel", "warpgroup_mma(p, b", "b.store("),
    (ring, "no_empty_wait", "Race", "produce", "tma.async_load", "tma.async_load"),
    (ring, "one_turn", "PhaseError", "produce", "mbarrier.wait(empty", None),
    (ring, "no_full_wait", "UninitialisedRead", "consume", "ring.index(slot).load", None),
    (ring, "early_release", "Race", "produce", "tma.async_load", "ring.index(slot).load"),
    (ring, "lost_arrive", "Deadlock", "consume", "mbarrier.wait(full.index(slot), turn)", "mbarrier.wait(empty"),
    (ring, "extra_arrive", "PhaseError", "consume", "mbarrier.arrive(empty.index(slot), count=2)", None),
    (ring, "count", "Deadlock", "consume", "mbarrier.wait(full.index(slot), turn)", "mbarrier.wait(empty"),
    (handover, "no_fence", "MissingFence", "send_tile", "tma.async_store", "tile.store"),
    (handover, "no_arrive", "Deadlock", "send_tile", "mbarrier.wait(bar, 0)", None),
    (handover, "no_wait", "Race", "send_tile", "tma.async_store", "tile.store"),
    (handover, "named_compilers", "PhaseError", "send_tile", "bar.sync 2, 160;", None),
    (handover, "named_beyond", "PhaseError", "send_tile", "bar.sync 16, 160;", None),
    (handover, "named_counts", "PhaseError", "send_tile", "bar.sync 12, 160;", None),
    (ahead, "no wait", "Race", "ahead_kernel", "gl.load(y + at)", None),
    (ahead, "reads too early", "Race", "ahead_kernel", "before = gl.load(x", None),
    (ahead, "guesses by ordinary loads", "Race", "ahead_kernel", "guess = gl.load(y", None),
    (last_block, "relaxed", "Race", "last_block_kernel", "tl.load(part", "tl.store(part"),
    (store, "same_place", "Race", "store_kernel", "tl.store(out", "tl.store(out"),
    (store, "past_the_end", "OutOfBounds", "store_kernel", "tl.store(out", None),
    (store, "before", "OutOfBounds", "store_kernel", "tl.store(out", None),
]


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("program", [copy, product, ring, handover, last_block, store, ahead], ids=lambda f: f.__name__)
def test_correct_kernels_are_clean_and_right(program, schedule, seed):
    report, right = program("", schedule=schedule, seed=seed)
    assert report.clean, report
    assert right


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_a_named_barrier_orders_two_roles(schedule, seed):
    report, right = handover("named", schedule=schedule, seed=seed)
    assert report.clean, report
    assert right


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: f"{case[0].__name__}-{case[1]}-{case[2]}")
def test_broken_kernels_are_reported(case):
    program, fault, kind, role, first, second = case
    report, _ = program(fault, schedule="lazy")
    found = [f for f in report.of_kind(kind) if matches(f, role, first, second)]
    assert found, f"no {kind} of {role} at {first!r}:\n{report}"
    assert all(text in str(found[0]) for text in (kind, role, found[0].places[0].frames[0].file))


def matches(finding, role: str, first: str, second: str | None) -> bool:
    lines = [linecache.getline(*place.frames[0]) for place in finding.places if place.frames]
    right = role in finding.roles[0] and first in lines[0]
    return right and (second is None or second in lines[1])


@pytest.mark.parametrize("fault", ["no_wait", "overwrite", "no_store_wait", "double_init"])
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_faults_are_seen_under_every_schedule(fault, schedule, seed):
    """Vector clocks do not need the unlucky order to happen."""
    assert not copy(fault, schedule=schedule, seed=seed)[0].clean


def test_what_a_preceding_launch_writes():
    report, _ = ahead("no wait")
    assert "that the preceding launch wrote; nothing orders the two" in str(report.findings[0])
    assert ahead("nothing runs")[0].clean
    report, right = ahead("believes its guess")
    assert report.clean and not right, "volatile loads find anything there, which is no race"
    x = torch.zeros(64)
    with pytest.raises(SimulationError, match=r"running\[0\] is no part of an argument"):
        run(kernels.ahead_kernel, DependentGrid((1,), [torch.zeros(64)]), {"x": x, "y": x, "out": x}, {"FAULT": ""})


def test_early_release_is_seen_even_where_the_values_are_right():
    report, right = ring("early_release", schedule="eager")
    assert right and report.of_kind("Race")


def test_a_deadlock_reads_like_a_sentence():
    report, _ = ring("lost_arrive", schedule="eager")
    text = str(report.of_kind("Deadlock")[0])
    assert "consume at" in text and "waits for barrier full[1], parity 1 (phase 1" in text
    assert "has 0 of 1 arrivals" in text and "could still be arrived on by produce" in text


def test_byte_boxes_and_barriers_are_named():
    race = copy("no_wait")[0].of_kind("Race")[0]
    assert (race.buffer, race.box) == ("tile", (0, 64 * 64 * 2))
    assert copy("double_init")[0].findings[0].barrier == "bar"


def test_runs_repeat_exactly():
    steps = {ring("early_release", schedule="random", seed=7)[0].steps for _ in range(3)}
    assert len(steps) == 1


def test_a_run_may_end_at_its_first_finding():
    whole, first = (ring("early_release", schedule="lazy", first_finding=ends)[0] for ends in (False, True))
    assert first.findings == whole.findings[: len(first.findings)] and 0 < first.steps < whole.steps
    report, right = ring("", schedule="lazy", first_finding=True)
    assert report.clean and right
