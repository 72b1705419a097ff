"""What a role returns can be used, and the combiner of a reduction may make tensors."""

import numpy as np
import pytest

pytest.importorskip("triton")

from tests.sim.builds import poison, run
from tests.sim.machine.kernels import result as kernels

SCHEDULES = ["eager", "lazy", "random", "adversarial"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("one", [True, False])
def test_what_the_default_role_returns_can_be_used(one, arch, schedule):
    x, out, total, mark = np.arange(64, dtype=np.float32), poison(64), poison(1), np.zeros(1, np.int32)
    args = {"x": x, "out": out, "total": total, "mark": mark}
    report = run(kernels.results_kernel, (1,), args, {"ONE": one}, arch=arch, schedule=schedule)
    assert report.clean, report
    assert total[0] == x.sum() and mark[0] == 1
    assert one or np.array_equal(out, 2 * x)


@pytest.mark.parametrize(
    ("combiner", "arch"), [("sums", "sm90"), ("sums", "sm100"), ("packed sums", "sm100"), ("larger", "sm90")]
)
def test_a_combiner_may_make_tensors(combiner, arch):
    x, y = np.random.default_rng(0).standard_normal((2, 16, 64)).astype(np.float32)
    out = poison((2, 16))
    report = run(kernels.reduce_kernel, (1,), {"x": x, "y": y, "out": out}, {"COMBINER": combiner}, arch=arch)
    assert report.clean, report
    if "sums" in combiner:
        np.testing.assert_allclose(out, (x.sum(1), y.sum(1)), atol=1e-4)
    else:
        at = x.argmax(1)
        np.testing.assert_array_equal(out, (x.max(1), y[np.arange(16), at]))
