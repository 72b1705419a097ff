"""Results that hardware leaves to chance: integer division by zero, and lanes of one store that collide."""

import linecache

import numpy as np
import pytest

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from tests.sim.builds import run
from tests.sim.machine.kernels import arith as kernels
from warpattn.sim import Report, TensorDescriptor


def divided(op: str, n: int, divisor: int = 3, **options) -> tuple[Report, np.ndarray]:
    x, y, out = np.arange(64, dtype=np.int32), np.full(64, divisor, np.int32), np.full(64, 77, np.int32)
    report = run(kernels.divide_kernel, (1,), {"x": x, "y": y, "out": out, "n": n}, {"OP": op, "BLOCK": 64}, **options)
    return report, out


@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
@pytest.mark.parametrize("op", ["quotient", "rest", "chosen", "summed"])
def test_lanes_that_are_masked_off_may_divide_by_zero(op, arch):
    report, out = divided(op, 50, arch=arch)
    assert report.clean, report
    x = np.arange(50)
    total = (np.arange(50) // 3).sum() + np.arange(50, 64).sum()
    assert np.array_equal(out[:50], {"rest": x % 3, "summed": x // 3 + total}.get(op, x // 3))


@pytest.mark.parametrize("op", ["quotient", "rest", "summed"])
def test_a_division_by_zero_whose_result_is_used(op):
    report, _ = divided(op, 50, divisor=0)
    assert {found.kind for found in report.findings} == {"DivisionByZero"}, report
    found = report.findings[0]
    assert set(found.roles) == {"divide_kernel"} and any(word in linecache.getline(*found.places[0].frames[0])
                                                         for word in ("//", "%"))  # fmt: skip
    assert "is by zero; divide_kernel at" in str(found)
    assert divided("chosen", 50, divisor=0)[0].clean, "its result is not chosen where the divisor is 0"


@pytest.mark.parametrize("kernel", [kernels.loop_kernel, kernels.while_kernel])
def test_a_scalar_division_by_zero_that_a_loop_runs_by(kernel):
    out = np.zeros(1, np.int32)
    assert run(kernel, (1,), {"out": out, "n": 12, "step": 3}).clean and out[0] == 6
    report = run(kernel, (1,), {"out": out, "n": 12, "step": 0})
    assert [found.kind for found in report.findings] == ["DivisionByZero"], report


def collided(width: int, same: bool, dtype=np.float32) -> Report:
    x = np.full(64, np.nan, dtype) if same else np.arange(64).astype(dtype)
    return run(kernels.collide_kernel, (1,), {"x": x, "out": np.zeros(64, dtype), "width": width}, {"BLOCK": 64})


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
def test_lanes_of_one_store_that_collide(dtype):
    assert collided(64, False, dtype).clean
    if dtype != np.int8:
        assert collided(16, True, dtype).clean, "equal values do not collide, not even NaN"
    (found,) = collided(60, False, dtype).findings
    assert found.kind == "Race" and "different values from several lanes to 4 elements of out" in str(found)
    assert "tl.store" in linecache.getline(*found.places[0].frames[0])


@pytest.mark.parametrize(("place", "uses"), [("coordinate", True), ("wanted", True), ("elsewhere", False)])
def test_a_prefetch_of_undefined_boxes(place, uses):
    """As a load of one; threads that prefetch nothing may have any coordinates."""
    box = (1, 8, 1, 64)
    layout = gl.NVMMASharedLayout.get_default_for(list(box), gl.float16)
    args = {"x_desc": TensorDescriptor(np.zeros((2, 128, 2, 64), np.float16), box), "n": 50}
    for divisor in (3, 0):
        report = run(kernels.prefetch_kernel, (1,), args | {"divisor": divisor}, {"IN": place}, layout=layout)
        assert [found.kind for found in report.findings] == ["DivisionByZero"] * (uses and not divisor), report
        assert all("is by zero; prefetch_kernel at" in str(found) for found in report.findings)
