"""What was read by several, and what came through either proxy: each earlier access counts, not only the newest."""

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from tests.sim.builds import run
from tests.sim.machine.findings.test_faults import matches
from tests.sim.machine.kernels import plain, user_roles
from warpattn.sim import Report, TensorDescriptor

N = 64
SCHEDULES = ["eager", "lazy", "random", "adversarial"]


def all_read(fault: str, **options) -> tuple[Report, bool]:
    x, out, count = torch.randn(16), torch.full((3, 16), torch.nan), torch.zeros(1, dtype=torch.int32)
    before = x.clone()
    report = run(plain.all_read_kernel, (3,), {"x": x, "out": out, "count": count}, {"FAULT": fault}, **options)
    return report, bool((out == before).all() and (x == 0).all())


def two_proxies(fault: str, **options) -> tuple[Report, bool]:
    a, b, out = torch.randn(N, N).half(), torch.randn(N, N).half(), torch.full((N, N), torch.nan)
    layout = gl.NVMMASharedLayout.get_default_for([N, N], gl.float16)
    args = {"a": a, "b_desc": TensorDescriptor(b, (N, N)), "out": out}
    report = run(user_roles.two_proxies_kernel, (1,), args, {"FAULT": fault}, layout=layout, **options)
    return report, torch.allclose(out, a.float() @ b.float(), atol=1e-3)


@pytest.mark.parametrize(("program", "way"), [(all_read, ""), (all_read, "updates late"), (two_proxies, "")])
def test_right_kernels_are_clean_and_right(program, way):
    report, right = program(way, schedules="all", seeds=3)
    assert report.clean and right, report


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("fault", "text"), [("reads late", "tl.store(x"), ("updates", "tl.atomic_xchg(x")])
def test_a_write_is_ordered_after_every_read(fault, text, schedule):
    """The last program reads once more before it writes: that read must not hide those of the others."""
    report, _ = all_read(fault, schedule=schedule)
    assert any(matches(found, "all_read_kernel", text, "tl.load(x") for found in report.of_kind("Race")), report


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_copy_by_tma_is_no_fence_for_an_earlier_one(schedule):
    report, _ = two_proxies("no fence", schedule=schedule)
    (found,) = report.findings
    assert found.kind == "MissingFence" and matches(found, "multiply_both", "warpgroup_mma(left", "async_load(left")


@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
@pytest.mark.parametrize(("scope", "kinds"), [("gpu", set()), ("sys", set()), ("cta", {"Race"})])
def test_a_scope_of_one_cta_orders_nothing_between_programs(scope, kinds, arch):
    x, out = torch.randn(4, 16), torch.zeros(2, 16)
    args = {"x": x, "part": torch.zeros(4, 16), "count": torch.zeros(1, dtype=torch.int32), "out": out}
    report = run(plain.scope_kernel, (4,), args, {"SCOPE": scope}, arch=arch, schedules="all", seeds=2)
    assert {found.kind for found in report.findings} == kinds, report
    assert torch.allclose(out, x.sum(0).expand(2, 16), atol=1e-5)
    if kinds:
        assert any(matches(found, "scope_kernel", "tl.atomic_add(count", None) for found in report.findings), report
        assert any(matches(found, "scope_kernel", "tl.load(part", "tl.store(part") for found in report.findings), report
        assert "updated, one of the two with scope='cta'; nothing orders the two" in str(report.findings[0])
