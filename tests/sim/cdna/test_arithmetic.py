"""What masks and scores compute with functions of CDNA's own."""

import numpy as np
import pytest

pytest.importorskip("triton")

from tests.sim.builds import poison, run
from tests.sim.cdna import kernels
from tests.sim.cdna.calls import ARCHS

NUMBERS = (0, 1, -1, 2, -2, 5, -6, 7, 63, -64, 2**31 - 1, -(2**31 - 1), -(2**31))
DIVISORS = (1, -1, 3, -3, 5, -8, 2**31 - 1, -(2**31))


@pytest.mark.parametrize("arch", ARCHS)
def test_division_rounds_down(arch):
    """Of numbers and divisors of either sign, as Python does."""
    pairs = [(a, b) for a in NUMBERS for b in DIVISORS if (a, b) != (-(2**31), -1)]
    for start in range(0, len(pairs), 64):
        a, b = np.resize(np.array(pairs[start : start + 64], np.int32), (64, 2)).T.copy()
        quotients, remainders = poison(64, np.int32), poison(64, np.int32)
        args = {"a": a, "b": b, "quotients": quotients, "remainders": remainders}
        assert run(kernels.division_kernel, (1,), args, arch=arch, num_warps=1).clean
        np.testing.assert_array_equal(quotients, a // b)
        np.testing.assert_array_equal(remainders, a % b)
