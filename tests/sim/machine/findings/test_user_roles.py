"""More kernels of the kinds that users write: right under every schedule, and each planted fault is named."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from tests.sim.builds import run
from tests.sim.machine.findings.test_faults import matches
from tests.sim.machine.findings.test_user_kernels import TILE, N, counter, layout, normal, unwritten
from tests.sim.machine.kernels import user_roles as kernels
from warpattn.sim import Report, TensorDescriptor

STEPS = 5
FP32 = gl.float32


def tiles(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(STEPS, N, N).to(dtype)


def described(x: torch.Tensor) -> TensorDescriptor:
    return TensorDescriptor(x.view(-1, N), TILE)


def reduced(fault: str, **options) -> tuple[Report, bool]:
    a, b, total, out = normal(N, 3 * N), normal(3 * N, N), torch.zeros(N, N), unwritten(N, N, dtype=torch.float32)
    args = {"a_desc": TensorDescriptor(a, TILE), "b_desc": TensorDescriptor(b, TILE), "total": total,
            "total_desc": TensorDescriptor(total, TILE), "done": counter(), "out": out}  # fmt: skip
    layouts = {"a_desc": layout(), "b_desc": layout(), "total_desc": layout(dtype=FP32)}
    report = run(kernels.reduced_kernel, (3,), args, {"FAULT": fault}, layout=layouts, step_limit=20_000, **options)
    return report, torch.allclose(out, a.float() @ b.float(), atol=1e-2)


def scratch(fault: str, **options) -> tuple[Report, bool]:
    x, through, out = normal(N, N), unwritten(N, N), unwritten(N, N)
    args = {"x_desc": TensorDescriptor(x, TILE), "scratch_desc": TensorDescriptor(through, TILE), "out": out}
    report = run(kernels.scratch_kernel, (1,), args, {"FAULT": fault}, layout=layout(), step_limit=20_000, **options)
    return report, torch.equal(out, 2 * x)


def chain(fault: str, **options) -> tuple[Report, bool]:
    x, out = tiles(), unwritten(STEPS, N, N, dtype=torch.float32)
    args = {"x_desc": described(x), "out": out, "steps": STEPS}
    options = {"layout": layout(dtype=FP32), "step_limit": 20_000, **options}
    report = run(kernels.chain_kernel, (1,), args, {"FAULT": fault}, **options)
    return report, torch.equal(out, x - x.amax(-1, keepdim=True))


def two_readers(fault: str, **options) -> tuple[Report, bool]:
    x, out = tiles(), unwritten(2, N, N, dtype=torch.float32)
    args = {"x_desc": described(x), "out": out, "steps": STEPS}
    options = {"layout": layout(dtype=FP32), "step_limit": 20_000, **options}
    report = run(kernels.two_readers_kernel, (1,), args, {"FAULT": fault}, **options)
    return report, torch.allclose(out, torch.stack([x.sum(0), x.square().sum(0)]), atol=1e-4)


def arriving(fault: str, **options) -> tuple[Report, bool]:
    x, out = tiles(), unwritten(N, N, dtype=torch.float32)
    constants = {"COPIERS": 1 if fault == "plain_arrive" else 127 if fault == "count" else 128, "FAULT": fault}
    args = {"x": x, "out": out, "steps": STEPS}
    report = run(kernels.arriving_kernel, (1,), args, constants, step_limit=20_000, **options)
    return report, torch.allclose(out, x.sum(0), atol=1e-4)


def lds_ring(fault: str, **options) -> tuple[Report, bool]:
    x, out = torch.randn(STEPS, 1024), unwritten(1024, dtype=torch.float32)
    args = {"x": x, "out": out, "steps": STEPS}
    report = run(kernels.lds_ring_kernel, (1,), args, {"FAULT": fault}, **{"arch": "gfx950", **options})
    return report, torch.allclose(out, x.sum(0), atol=1e-4)


def two_accumulators(fault: str, **options) -> tuple[Report, bool]:
    q, k, out = normal(N, N), tiles(torch.float16), unwritten(N, N, dtype=torch.float32)
    args = {"q_desc": TensorDescriptor(q, TILE), "k_desc": described(k), "out": out, "steps": STEPS}
    options = {"layout": layout(), "arch": "sm100", "step_limit": 20_000, **options}
    report = run(kernels.two_accumulators_kernel, (1,), args, {"FAULT": fault}, **options)
    return report, torch.allclose(out, q.float() @ k.float().sum(0).T, atol=0.1)


PROGRAMS = [reduced, scratch, chain, two_readers, arriving, lds_ring, two_accumulators]
# program, fault, kind, role and source text of the first place
FAULTS = [
    (reduced, "short_expect", "Deadlock", "reduced_kernel", "mbarrier.wait(bar"),
    (reduced, "parity", "PhaseRace", "reduced_kernel", "mbarrier.wait(bar"),
    (reduced, "stored", "Race", "reduced_kernel", "tma.async_store(total_desc"),
    (reduced, "no_store_wait", "Race", "reduced_kernel", "gl.store(out"),
    (reduced, "read_only", "Race", "reduced_kernel", "gl.store(out"),
    (scratch, "no_store_wait", "Race", "scratch_kernel", "tma.async_load(scratch_desc"),
    (scratch, "read_only", "Race", "scratch_kernel", "tma.async_load(scratch_desc"),
    (scratch, "wrong_barrier", "Deadlock", "scratch_kernel", "mbarrier.wait(bars.index(1)"),
    (chain, "no_taken_wait", "Race", "softmax_role", "top.store(largest)"),
    (chain, "double_arrive", "PhaseRace", "divide_role", "mbarrier.wait(ready"),
    (chain, "both_release", "PhaseRace", "score_role", "mbarrier.wait(empty"),
    (chain, "early_take", "PhaseRace", "softmax_role", "mbarrier.wait(taken"),
    (chain, "no_ready_wait", "UninitialisedRead", "divide_role", "value = tile.index(slot).load"),
    (chain, "ready_parity", "UninitialisedRead", "divide_role", "value = tile.index(slot).load"),
    (two_readers, "one_forgets", "Deadlock", "reader", "mbarrier.wait(full"),
    (two_readers, "one_twice", "Race", "score_role", "tma.async_load(x_desc"),
    (two_readers, "same_output", "Race", "reader", "gl.store(out +"),
    (two_readers, "count", "PhaseRace", "score_role", "mbarrier.wait(empty"),
    (arriving, "plain_arrive", "Race", "add_role", "total += tile"),
    (arriving, "late_copy", "Race", "add_role", "total += tile"),
    (arriving, "no_full_wait", "UninitialisedRead", "add_role", "total += tile"),
    (arriving, "early_release", "Race", "copy_role", "ampere.async_copy.async_load"),
    (arriving, "other_slot", "Race", "add_role", "total += tile"),
    (arriving, "count", "PhaseError", "copy_role", "ampere.async_copy.mbarrier_arrive"),
    (lds_ring, "one_group", "Race", "lds_ring_kernel", "total += ring"),
    (lds_ring, "loose_wait", "Race", "lds_ring_kernel", "total += ring"),
    (lds_ring, "same_slot", "UninitialisedRead", "lds_ring_kernel", "total += ring"),
    (lds_ring, "outside", "OutOfBounds", "lds_ring_kernel", "cdna4.async_copy.buffer_load_to_shared"),
    (lds_ring, "no_commit", "Race", "lds_ring_kernel", "total += ring"),
    (two_accumulators, "no_slot_wait", "Race", "scores_by_turns", "tma.async_load(k_desc"),
    (two_accumulators, "no_acc_wait", "PhaseRace", "largest_by_turns", "mbarrier.wait(s_full"),
    (two_accumulators, "acc_parity", "Deadlock", "largest_by_turns", "mbarrier.wait(s_full"),
    (two_accumulators, "one_acc", "Race", "scores_by_turns", "tcgen05_mma(q, k"),
    (two_accumulators, "no_commit", "Race", "largest_by_turns", "total += s.index"),
    (two_accumulators, "no_full_wait", "UninitialisedRead", "largest_by_turns", "total += s.index"),
    (two_accumulators, "early_release", "Race", "scores_by_turns", "tcgen05_mma(q, k"),
    (two_accumulators, "count", "Deadlock", "largest_by_turns", "mbarrier.wait(s_full"),
    (two_accumulators, "not_after_full", "MissingFence", "largest_by_turns", "total += s.index"),
    (two_accumulators, "not_before_release", "MissingFence", "scores_by_turns", "tcgen05_mma(q, k"),
    (two_accumulators, "not_after_empty", "MissingFence", "scores_by_turns", "tcgen05_mma(q, k"),
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_right_kernels_are_clean_and_right(program):
    report, right = program("", schedules="all", seeds=3)
    assert report.clean, report
    assert right


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def test_faults_are_named(case):
    program, fault, kind, role, text = case
    report, _ = program(fault)
    assert any(matches(found, role, text, None) for found in report.of_kind(kind)), report


def test_a_missing_fence_of_tensor_memory_says_whose():
    for fault, said in (
        ("not_after_full", "largest_by_turns has no tcgen05.fence::after_thread_sync behind its wait"),
        ("not_before_release", "largest_by_turns has no tcgen05.fence::before_thread_sync before its signal"),
        ("not_after_empty", "scores_by_turns has no tcgen05.fence::after_thread_sync behind its wait"),
    ):
        report, _ = two_accumulators(fault)
        assert report.findings, fault
        assert all(found.kind == "MissingFence" and said in found.message for found in report.findings), report


def test_a_kernel_without_fences_of_tensor_memory_is_not_asked_for_them():
    report, right = two_accumulators("no_fences", schedules="all")
    assert report.clean and right
