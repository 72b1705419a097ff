"""Every operation of the simulator's arithmetic tables on one element, an array or a scalar, beside written values."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from warpattn.sim.ir.valuetypes import Type
from warpattn.sim.machine.registry import TABLE
from warpattn.sim.ops.arith import _COMPARE, _FLOAT, _INTEGER, _UNSIGNED

NAN, INF, LEAST, LAST = math.nan, math.inf, -(2**31), 2**31 - 1
FLOATS = {
    "arith.addf": [(1.5, 2.0, 3.5)], "arith.subf": [(1.5, 2.0, -0.5)], "arith.mulf": [(1.5, 2.0, 3.0)],
    "arith.divf": [(1.0, 4.0, 0.25), (1.0, 0.0, INF)], "arith.remf": [(-5.5, 2.0, -1.5)], "arith.negf": [(1.0, -1.0)],
    "arith.maxnumf": [(1.0, 2.0, 2.0), (NAN, 2.0, 2.0)], "arith.minnumf": [(1.0, 2.0, 1.0), (NAN, 2.0, 2.0)],
    "arith.maximumf": [(1.0, 2.0, 2.0), (NAN, 2.0, NAN)], "arith.minimumf": [(1.0, 2.0, 1.0), (NAN, 2.0, NAN)],
    "math.exp": [(1.0, math.e)], "math.exp2": [(3.0, 8.0), (-INF, 0.0)], "math.log": [(math.e, 1.0)],
    "math.log2": [(8.0, 3.0)], "math.log10": [(1000.0, 3.0)], "math.log1p": [(1e-6, math.log1p(1e-6))],
    "math.expm1": [(1e-6, math.expm1(1e-6))], "math.sqrt": [(9.0, 3.0)], "math.rsqrt": [(16.0, 0.25)],
    "math.sin": [(2.0, math.sin(2.0))], "math.cos": [(2.0, math.cos(2.0))], "math.tan": [(2.0, math.tan(2.0))],
    "math.tanh": [(0.5, math.tanh(0.5))], "math.atan": [(3.0, math.atan(3.0))],
    "math.atan2": [(1.0, -2.0, math.atan2(1.0, -2.0))], "math.absf": [(-INF, INF)], "math.floor": [(-1.5, -2.0)],
    "math.ceil": [(-1.5, -1.0)], "math.trunc": [(-1.5, -1.0)], "math.erf": [(0.5, math.erf(0.5))],
    "math.fma": [(3.0, 5.0, 7.0, 22.0), (1 + 2.0**-12, 1 - 2.0**-12, -1.0, -(2.0**-24))],
    "math.powf": [(2.0, 0.5, 2**0.5)],
    "math.copysign": [(2.0, -0.0, -2.0)], "tt.precise_sqrt": [(9.0, 3.0)], "tt.precise_divf": [(1.0, 4.0, 0.25)],
    "tt.approx_divf": [(1.0, 4.0, 0.25)], "tt.clampf": [(5.0, 0.0, 2.0, 2.0), (-5.0, 0.0, 2.0, 0.0)],
}  # fmt: skip
INTEGERS = {
    "arith.addi": [(LAST, 1, LEAST), (2, -3, -1)], "arith.subi": [(LEAST, 1, LAST)],
    "arith.muli": [(2**16, 2**16 + 3, 3 * 2**16)],
    "arith.divsi": [(7, -2, -3), (-7, 2, -3), (-7, -2, 3)], "arith.remsi": [(7, -2, 1), (-7, 2, -1)],
    "arith.andi": [(6, 3, 2)], "arith.ori": [(6, 3, 7)], "arith.xori": [(6, 3, 5), (6, -1, -7)],
    "arith.maxsi": [(-1, 1, 1)], "arith.minsi": [(-1, 1, -1)],
    "arith.floordivsi": [(-7, 2, -4), (7, 2, 3), (7, -2, -4)],
    "arith.ceildivsi": [(-7, 2, -3), (7, 2, 4), (8, 2, 4), (LEAST, 3, LEAST // 3 + 1)], "math.absi": [(-5, 5)],
    "arith.shli": [(1, 31, LEAST), (3, 1, 6), (3, 32, 0)], "arith.shrsi": [(-8, 1, -4), (-8, 32, -1), (8, 40, 0)],
    "arith.divui": [(-1, 2, LAST), (7, 2, 3)], "arith.remui": [(-1, 10, 5)], "arith.maxui": [(-1, 1, -1)],
    "arith.minui": [(-1, 1, 1)], "arith.ceildivui": [(-1, 2, LEAST), (7, 2, 4), (8, 2, 4)],
    "arith.shrui": [(-8, 1, LAST - 3), (-8, 32, 0)],
}  # fmt: skip
ORDERS = {"eq": 0b010, "ne": 0b101, "lt": 0b001, "le": 0b011, "gt": 0b100, "ge": 0b110}  # of less, equal, greater


def of(kind: str, elem: str) -> Type:
    return Type(kind, elem, (1,) if kind == "tensor" else None, elem)


def run(name: str, elem: str, result: str, kind: str, xs: Any, text: str = "") -> Any:
    """The result of an operation on one element."""
    given, out = of(kind, elem), of(kind, result)
    op = SimpleNamespace(name=name, inputs=[given] * len(xs), outputs=[out], type=out, text=text, where="", frames=())
    dtype = {"f32": np.float32, "i32": np.int32}[elem]
    values = [np.array([x], dtype) if kind == "tensor" else dtype(x) if elem == "f32" else x for x in xs]
    with np.errstate(all="ignore"):
        found = TABLE[name][1](op)(*values)
    return np.asarray(found).reshape(-1)[0].item()


def test_every_operation_has_a_row() -> None:
    assert set(FLOATS) == set(_FLOAT) and set(INTEGERS) == {*_INTEGER, *_UNSIGNED} and set(ORDERS) == set(_COMPARE)


@pytest.mark.parametrize("kind", ["tensor", "scalar"])
@pytest.mark.parametrize("name", FLOATS)
def test_an_operation_on_floats(name: str, kind: str) -> None:
    for *xs, expected in FLOATS[name]:
        assert run(name, "f32", "f32", kind, xs) == pytest.approx(expected, rel=3e-7, abs=0, nan_ok=True)


@pytest.mark.parametrize("kind", ["tensor", "scalar"])
@pytest.mark.parametrize("name", INTEGERS)
def test_an_operation_on_integers(name: str, kind: str) -> None:
    for *xs, expected in INTEGERS[name]:
        assert run(name, "i32", "i32", kind, xs) == expected


@pytest.mark.parametrize("kind", ["tensor", "scalar"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_comparison(order: str, kind: str) -> None:
    less, equal, greater = (bool(ORDERS[order] & bit) for bit in (1, 2, 4))
    pairs = [((-2.0, 1.0), less), ((1.0, 1.0), equal), ((0.0, -0.0), equal), ((1.0, -2.0), greater)]
    for prefix, with_nan in (("o", False), ("u", True)):
        for xs, expected in [*pairs, ((NAN, 1.0), with_nan), ((1.0, NAN), with_nan), ((NAN, NAN), with_nan)]:
            assert run("arith.cmpf", "f32", "i1", kind, xs, f"{prefix}{order}, ") is expected
    integers = [((-2, 1), less, greater), ((1, 1), equal, equal), ((1, -2), greater, less)]
    for xs, signed, unsigned in integers:
        if order in ("eq", "ne"):
            assert run("arith.cmpi", "i32", "i1", kind, xs, f"{order}, ") is signed
        else:
            assert run("arith.cmpi", "i32", "i1", kind, xs, f"s{order}, ") is signed
            assert run("arith.cmpi", "i32", "i1", kind, xs, f"u{order}, ") is unsigned


@pytest.mark.parametrize("kind", ["tensor", "scalar"])
def test_whether_floats_are_ordered(kind: str) -> None:
    for xs, ordered in (((1.0, 2.0), True), ((NAN, 1.0), False), ((1.0, NAN), False)):
        assert run("arith.cmpf", "f32", "i1", kind, xs, "ord, ") is ordered
        assert run("arith.cmpf", "f32", "i1", kind, xs, "uno, ") is not ordered
        assert run("arith.cmpf", "f32", "i1", kind, xs, "true, ") is True
        assert run("arith.cmpf", "f32", "i1", kind, xs, "false, ") is False
