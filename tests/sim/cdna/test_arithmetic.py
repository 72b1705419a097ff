"""What masks and scores compute with functions of their own: those of CDNA, and all others'."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from tests.sim.builds import poison, run
from tests.sim.cdna import kernels
from tests.sim.cdna.calls import ARCHS
from warpattn.kernels.cdna import arithmetic
from warpattn.kernels.pieces import codegen

NUMBERS = (0, 1, -1, 2, -2, 5, -6, 7, 63, -64, 2**31 - 1, -(2**31 - 1), -(2**31))
DIVISORS = (1, -1, 3, -3, 5, -8, 2**31 - 1, -(2**31))


FRACTIONS = (0.0, 0.5, -0.5, 6.0, -6.0, 7.25, -7.25, 1e6, -1e6)
PARTS = (1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 0.25, -0.75)


def divided(pairs: list[tuple], dtype: type, arch: str, divide: Any, modulo: Any) -> tuple[np.ndarray, ...]:
    """Dividends, divisors, quotients and remainders of a kernel."""
    found = []
    constants = {"divide": divide, "modulo": modulo, "lanes": 64 if arch in ARCHS else 32}
    for start in range(0, len(pairs), 64):
        a, b = np.resize(np.array(pairs[start : start + 64], dtype), (64, 2)).T.copy()
        args = {"a": a, "b": b, "quotients": poison(64, dtype), "remainders": poison(64, dtype)}
        assert run(kernels.division_kernel, (1,), args, constants, arch=arch, num_warps=1).clean
        found.append(list(args.values()))
    return tuple(np.concatenate(part) for part in zip(*found, strict=True))


@pytest.mark.parametrize("arch", [*ARCHS, "sm90"])
def test_division_rounds_down(arch):
    """Of numbers and divisors of either sign, as Python does."""
    pairs = [(a, b) for a in NUMBERS for b in DIVISORS if (a, b) != (-(2**31), -1)]
    own = arithmetic if arch in ARCHS else codegen
    a, b, quotients, remainders = divided(pairs, np.int32, arch, own.floor_div, own.floor_mod)
    np.testing.assert_array_equal(quotients, a // b)
    np.testing.assert_array_equal(remainders, a % b)


def test_division_of_fractions_rounds_down():
    """The kernels' only one."""
    pairs = [(a, b) for a in FRACTIONS for b in PARTS]
    functions = codegen.float_floor_div, codegen.float_floor_mod
    a, b, quotients, remainders = divided(pairs, np.float32, "sm90", *functions)
    np.testing.assert_array_equal(quotients, a // b)
    np.testing.assert_array_equal(remainders, a % b)
