"""Deliberately broken sm_100 kernels: the right kind of finding, role and line; without the fault they are clean."""

import linecache
from math import log2

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.sim.blackwell import kernels as kernels
from tests.sim.blackwell.attention import attention_kernel
from tests.sim.blackwell.test_blackwell import built, matmul, run
from tests.sim.builds import poison
from tests.sim.machine.findings.test_faults import matches
from warpattn.sim import Report, TensorDescriptor, knock_out, simulate

SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), *(("random", seed) for seed in range(10))]


def handover(fault: str, **options) -> tuple[Report, bool]:
    x, out = torch.randn(128, 64).half(), torch.full((128, 128), float("nan"))
    report = run(kernels.handover_kernel, {"x": x, "out": out}, {"FAULT": fault}, **options)
    return report, torch.allclose(out, x.float() @ x.float().T, rtol=1e-4, atol=1e-3)


def slices(fault: str, **options) -> tuple[Report, bool]:
    out = poison((128, 64))
    report = run(kernels.slices_kernel, {"out": out}, {"FAULT": fault}, **options)
    return report, bool((out[:, :32] == 1).all() and (out[:, 32:] == 2).all())


def attention_args(keys: int = 256, dim: int = 64) -> tuple[dict, torch.Tensor]:
    """Arguments of the attention kernel, and the expected output."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, dim, generator=generator).bfloat16() for n in (128, keys, keys))
    boxes = {"q_desc": (q, (128, dim)), "k_desc": (k, (64, dim)), "v_desc": (v, (64, dim))}
    args = {name: TensorDescriptor(*box) for name, box in boxes.items()}
    args |= {"out": torch.full((128, dim), float("nan")), "tiles": keys // 64, "scale_log2": log2(np.e) / dim**0.5}
    return args, torch.softmax(q.float() @ k.float().T / dim**0.5, 1) @ v.float()


def attention(fault: str, **options) -> tuple[Report, bool]:
    args, expected = attention_args()
    report = run(attention_kernel, args, {"FAULT": fault}, **options)
    return report, torch.allclose(args["out"], expected, atol=2e-3)


# program, fault, kind, role and source text of the first place, of the second (if the finding has two)
FAULTS = [
    (matmul, "no_wait", "Race", "matmul_kernel", "tma.async_load(a_desc", "tcgen05_mma(a, b, acc, use_acc=i > 0)"),
    (matmul, "no_wait", "PendingAtExit", "matmul_kernel", "tcgen05_mma(a, b, acc, use_acc=i > 0)", None),
    (matmul, "no_commit", "Deadlock", "matmul_kernel", "mbarrier.wait(done, i & 1)", None),
    (matmul, "two_commits", "Race", "matmul_kernel", "tma.async_load(a_desc", "tcgen05_mma(a, b, acc, use_acc=i > 0)"),
    (matmul, "wrong_parity", "Race", "matmul_kernel", "tma.async_load(a_desc", "tcgen05_mma(a, b, acc, use_acc=i > 0)"),
    (matmul, "unwritten", "UninitialisedRead", "matmul_kernel", "tcgen05_mma(a, b, acc, use_acc=True", None),
    (matmul, "short_expect", "Deadlock", "matmul_kernel", "mbarrier.wait(full, i & 1)", None),
    (matmul, "no_load_wait", "Race", "matmul_kernel", "tcgen05_mma(a, b", "tma.async_load(a_desc"),
    (handover, "no_fence", "MissingFence", "issue_product", "tcgen05_mma(a, b.permute", "a.store(value)"),
    (handover, "no_wait", "Race", "issue_product", "tcgen05_mma(a, b.permute", "a.store(value)"),
    (handover, "never_waited", "PendingAtExit", "issue_product", "tcgen05_mma(a, b.permute", None),
    (slices, "overlap", "Race", "write_slice", "part.store", "part.store"),
    (attention, "no_q_wait", "Race", "product", "tcgen05_mma(q, k.index", "tma.async_load(q_desc"),
    (attention, "no_empty_wait", "Race", "load", "tma.async_load(k_desc", "tcgen05_mma(q, k.index"),
    (attention, "short_expect", "Deadlock", "softmax", "mbarrier.wait(bars.s_full", "mbarrier.wait(bars.scale_full"),
    (attention, "no_s_wait", "Race", "product", "tcgen05_mma(q, k.index", "scores = s.load(layout)"),
    (attention, "early_score", "Race", "product", "tcgen05_mma(q, k.index", "scores = s.load(layout)"),
    (attention, "no_p_wait", "Race", "product", "tcgen05_mma(probabilities(s)", "probabilities(s).store"),
    (attention, "p_parity", "Race", "product", "tcgen05_mma(probabilities(s)", "probabilities(s).store"),
    (attention, "early_p_arrive", "Race", "product", "tcgen05_mma(probabilities(s)", "probabilities(s).store"),
    (attention, "scale_on_p", "Race", "correction", "column.load()", "probabilities(s).store"),
    (attention, "no_scale_wait", "Race", "softmax", "column.store", "column.load()"),
    (attention, "no_scale_arrive", "Deadlock", "softmax", "mbarrier.wait(bars.s_full", "mbarrier.wait(bars.scale_full"),
    (attention, "no_ready_wait", "Race", "product", "tcgen05_mma(probabilities(s)", "o.store(o.load(layout) * scale)"),
    (attention, "no_v_release", "Deadlock", "softmax", "mbarrier.wait(bars.s_full", "mbarrier.wait(bars.scale_full"),
    (attention, "no_o_commit", "Deadlock", "softmax", "mbarrier.wait(bars.s_full", "mbarrier.wait(bars.o_full"),
]


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("program", [matmul, handover, slices, attention], ids=lambda f: f.__name__)
def test_correct_kernels_are_clean_and_right(program, schedule, seed):
    report, right = program("", schedule=schedule, seed=seed)
    assert report.clean, report
    assert right


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: f"{case[0].__name__}-{case[1]}-{case[2]}")
def test_broken_kernels_are_reported(case):
    program, fault, kind, role, first, second = case
    report, _ = program(fault, schedule="lazy")
    found = [f for f in report.of_kind(kind) if matches(f, role, first, second)]
    assert found, f"no {kind} of {role} at {first!r}:\n{report}"


@pytest.mark.parametrize("fault", ["no_p_wait", "early_score", "scale_on_p", "no_ready_wait"])
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[:6])
def test_races_are_seen_under_every_schedule(fault, schedule, seed):
    assert attention(fault, schedule=schedule, seed=seed)[0].of_kind("Race")


@pytest.mark.parametrize("program", [matmul, attention], ids=lambda f: f.__name__)
def test_a_forgotten_accumulator_is_a_wrong_value_and_no_race(program):
    report, right = program("forgets", schedule="lazy")
    assert report.clean and not right


def test_a_wait_that_others_imply_may_go():
    """O(n - 1) is done when S(n) is: commits arrive in their order."""
    for schedule in ("lazy", "adversarial"):
        report, right = attention("no_o_wait", schedule=schedule)
        assert report.clean and right


def test_lanes_and_columns_are_named():
    race = slices("overlap")[0].of_kind("Race")[0]
    assert (race.buffer, race.box) == ("tile", (16, 32))
    assert "lanes 0..128, columns 16..48 of tile" in str(race)


def test_a_deadlock_names_the_commits():
    report, _ = attention("no_v_release", schedule="lazy")
    text = str(report.of_kind("Deadlock")[0])
    assert "could still be arrived on by product" in text


REDUNDANT = {
    "fence_async_shared()",  # nothing reads the barriers' initial bytes through the asynchronous proxy
    "mbarrier.wait(bars.o_full, (i - 1) & 1)",  # see test_a_wait_that_others_imply_may_go
}


def test_knocking_out_every_synchronisation():
    kernel = built(attention_kernel, attention_args()[0], {"FAULT": ""})
    results = knock_out(kernel, lambda module: simulate(module, (1,), attention_args()[0], schedule="lazy"))
    assert len(results) > 20
    assert sum(result.op == "ttng.tc_gen5_commit" for result in results) == 6
    assert {linecache.getline(*result.frames[0]).strip() for result in results if not result.noticed} == REDUNDANT
