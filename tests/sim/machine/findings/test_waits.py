"""Waits that let some groups of asynchronous work go on: a looser one never has fewer findings."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from tests.sim.builds import poison, run
from tests.sim.machine.kernels import wait as kernels
from warpattn.sim import Report, TensorDescriptor

N = 64
SCHEDULES = ["eager", "lazy", "random", "adversarial"]


def copies(kernel, pending: int, arch: str, schedule: str) -> tuple[Report, bool]:
    x, out = np.random.default_rng(0).standard_normal((2, N, N)).astype(np.float32), poison((N, N))
    report = run(kernel, (1,), {"x": x, "out": out}, {"PENDING": pending}, arch=arch, schedule=schedule)
    return report, np.allclose(out, x.sum(0))


def stores(read_only: bool, pending: int, arch: str, schedule: str) -> tuple[Report, bool]:
    out = torch.full((2 * N, N), float("nan"), dtype=torch.float16)
    layout = gl.NVMMASharedLayout.get_default_for([N, N], gl.float16)
    args, constants = (
        {"out_desc": TensorDescriptor(out, (N, N)), "out": out},
        {"PENDING": pending, "READ_ONLY": read_only},
    )
    report = run(kernels.store_kernel, (1,), args, constants, layout=layout, arch=arch, schedule=schedule)
    return report, bool((out == 1).all())


def products(pending: int, arch: str, schedule: str) -> tuple[Report, bool]:
    x, out = torch.randn(N, N).half(), torch.full((N, N), float("nan"))
    report = run(kernels.product_kernel, (1,), {"x": x, "out": out}, {"PENDING": pending}, arch=arch, schedule=schedule)
    return report, torch.allclose(out, x.float() @ (x.float() + x.T.float()), atol=1e-3)


WAITS = {
    "cp.async": lambda *how: copies(kernels.cp_async_kernel, *how),
    "copies to LDS": lambda *how: copies(kernels.lds_kernel, *how),
    "reads of TMA stores": lambda *how: stores(True, *how),
    "TMA stores": lambda *how: stores(False, *how),
    "wgmma": products,
}
CASES = [(name, "sm90") for name in WAITS if "LDS" not in name] + [
    ("copies to LDS", arch) for arch in ("gfx942", "gfx950")
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("name", "arch"), CASES)
def test_a_looser_wait_never_has_fewer_findings(name, arch, schedule):
    """Of two groups: all must have been waited for, and a wait that allows more than there are waits for none."""
    report, right = WAITS[name](0, arch, schedule)
    assert report.clean and right, report
    loose = [WAITS[name](pending, arch, schedule)[0] for pending in range(1, 6)]
    counts = [sum(finding.count for finding in report.findings) for report in loose]
    assert counts == sorted(counts) and counts[0] > 0, counts


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("counted", [True, False])
def test_copies_arrive_on_a_barrier(counted, schedule):
    """cp.async behind which threads arrive: the phase ends when the copies have; without, a wait sees nothing of it."""
    x, out = np.random.default_rng(0).standard_normal((N, N)).astype(np.float32), poison((N, N))

    def arriving(arrives: bool) -> Report:
        constants = {"COUNTED": counted, "ARRIVES": arrives}
        return run(kernels.copies_on_barrier_kernel, (1,), {"x": x, "out": out}, constants, schedule=schedule)

    report = arriving(True)
    assert report.clean and np.array_equal(out, x), report
    if counted:
        assert not arriving(False).clean


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", ["barrier", "group before", "group behind", "unwaited"])
def test_copies_whose_end_a_barrier_tells(way, schedule):
    """A group has them, too, and the program must have waited for either at its end."""
    x, out = torch.randn(N, N), torch.full((N, N), torch.nan)
    report = run(kernels.handed_over_kernel, (1,), {"x": x, "out": out}, {"WAY": way}, schedule=schedule)
    if way == "unwaited":
        (found,) = report.findings
        assert found.kind == "PendingAtExit" and "the cp.async of handed_over_kernel" in str(found)
    else:
        assert report.clean and torch.equal(out, x), report


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("fence", ["each", "last", "none"])
def test_tma_sees_atomic_operations_after_a_fence(fence, schedule):
    total, out, count = torch.zeros(N, N), torch.full((N, N), torch.nan), torch.zeros(1, dtype=torch.int32)
    layout = gl.NVMMASharedLayout.get_default_for([N, N], gl.float32)
    args = {"total_desc": TensorDescriptor(total, (N, N)), "total": total, "count": count, "out": out}
    report = run(kernels.added_kernel, (3,), args, {"FENCE": fence}, layout=layout, schedule=schedule)
    assert bool((out == 3).all())
    if fence == "none":
        (found,) = report.findings
        assert found.kind == "MissingFence" and "reads 4096 elements of total" in str(found), report
    else:
        assert report.clean, report
