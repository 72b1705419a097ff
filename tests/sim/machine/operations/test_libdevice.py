"""Each function of libdevice and OCML that the simulator knows, beside Python's own or a written value."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from warpattn.sim.ir.valuetypes import Type
from warpattn.sim.ops.libdevice import _FUNCTIONS, function_of, typed

INF, NAN = math.inf, math.nan
INT, LONG = 2**31, 2**63


def scalar(elem: str) -> Type:
    return Type("scalar", elem, None, elem)


def called(symbol: str, xs: Sequence[float], given: str, result: str) -> float:
    name, function = function_of(symbol)
    assert function is not None
    kinds = [scalar("i32" if isinstance(x, int) and given[0] == "f" else given) for x in xs]
    with np.errstate(all="ignore"):
        return typed(name, function, kinds, scalar(result))(*xs)


FLOATS = {
    "abs": [(-1.5, 1.5)], "fabs": [(-INF, INF)], "acos": [(0.3, math.acos(0.3))], "acosh": [(2.5, math.acosh(2.5))],
    "asin": [(0.3, math.asin(0.3)), (2.0, NAN)], "asinh": [(-2.5, math.asinh(-2.5))], "atan": [(3.0, math.atan(3.0))],
    "atan2": [(1.0, -2.0, math.atan2(1.0, -2.0))], "atanh": [(0.3, math.atanh(0.3))], "cbrt": [(-27.0, -3.0)],
    "rcbrt": [(-8.0, -0.5)], "ceil": [(-1.5, -1.0)], "floor": [(-1.5, -2.0)], "trunc": [(-1.5, -1.0)],
    "rint": [(2.5, 2.0), (3.5, 4.0)], "nearbyint": [(-2.5, -2.0)], "round": [(2.5, 3.0), (-2.5, -3.0), (0.4999, 0.0)],
    "copysign": [(2.0, -0.0, -2.0)], "cos": [(2.0, math.cos(2.0))], "cosh": [(2.0, math.cosh(2.0))],
    "cospi": [(0.5, 0.0), (-7.5, 0.0), (1.0, -1.0), (0.25, math.sqrt(0.5)), (INF, NAN)],
    "sin": [(2.0, math.sin(2.0))], "sinh": [(2.0, math.sinh(2.0))],
    "sinpi": [(1.0, 0.0), (-6.0, 0.0), (0.5, 1.0), (1e6 + 0.5, 1.0), (INF, NAN)], "tan": [(2.0, math.tan(2.0))],
    "tanh": [(0.5, math.tanh(0.5))], "exp": [(2.0, math.exp(2.0))], "exp2": [(0.5, math.sqrt(2.0))],
    "exp10": [(-2.0, 0.01)], "expm1": [(1e-6, math.expm1(1e-6))], "log": [(3.0, math.log(3.0)), (0.0, -INF)],
    "log2": [(3.0, math.log2(3.0))], "log10": [(3.0, math.log10(3.0))], "log1p": [(1e-6, math.log1p(1e-6))],
    "logb": [(10.0, 3.0), (0.125, -3.0), (0.0, -INF), (-INF, INF), (NAN, NAN)],
    "pow": [(2.0, 0.5, math.sqrt(2.0)), (-8.0, 3.0, -512.0)], "powi": [(-2.0, 3, -8.0)], "pown": [(2.0, -2, 0.25)],
    "sqrt": [(2.0, math.sqrt(2.0)), (-1.0, NAN)], "fsqrt_rn": [(9.0, 3.0)], "dsqrt_rn": [(9.0, 3.0)],
    "rsqrt": [(16.0, 0.25)], "frsqrt_rn": [(16.0, 0.25)], "frcp_rn": [(8.0, 0.125)], "drcp_rn": [(8.0, 0.125)],
    "fadd_rn": [(1.0, 2.5, 3.5)], "dadd_rn": [(1.0, 2.5, 3.5)], "fsub_rn": [(1.0, 2.5, -1.5)],
    "dsub_rn": [(1.0, 2.5, -1.5)], "fmul_rn": [(3.0, 2.5, 7.5)], "dmul_rn": [(3.0, 2.5, 7.5)],
    "fdiv_rn": [(1.0, 4.0, 0.25)], "ddiv_rn": [(1.0, 4.0, 0.25)], "fdivide": [(1.0, 4.0, 0.25)],
    "fma": [(3.0, 5.0, 7.0, 22.0)], "fma_rn": [(3.0, 5.0, 7.0, 22.0)],
    "fdim": [(5.0, 3.0, 2.0), (3.0, 5.0, 0.0), (INF, INF, 0.0), (NAN, 1.0, NAN)], "fmod": [(-5.5, 2.0, -1.5)],
    "remainder": [(5.5, 2.0, -0.5), (5.0, 2.0, 1.0), (7.0, 2.0, -1.0), (-5.0, 2.0, -1.0), (1e30, 3.0, NAN),
                  (1.0, 2.0, 1.0), (3.0, 2.0, -1.0), (5.0, INF, 5.0), (INF, 2.0, NAN), (1.0, 0.0, NAN)],
    "hypot": [(3.0, 4.0, 5.0)], "rhypot": [(3.0, 4.0, 0.2)], "norm3d": [(2.0, 3.0, 6.0, 7.0), (NAN, INF, 1.0, INF)],
    "norm4d": [(1.0, 2.0, 4.0, 10.0, 11.0)], "ldexp": [(3.0, 4, 48.0), (0.0, 5000, 0.0), (1.0, -5000, 0.0)],
    "scalbn": [(3.0, -1, 1.5)], "saturate": [(-1.0, 0.0), (0.5, 0.5), (2.0, 1.0), (NAN, 0.0)],
    "erf": [(0.5, math.erf(0.5))], "erfc": [(2.0, math.erfc(2.0))],
    "erfcx": [(2.0, math.exp(4.0) * math.erfc(2.0))], "erfinv": [(math.erf(0.75), 0.75)],
    "erfcinv": [(math.erfc(0.75), 0.75), (math.erfc(6.0), 6.0), (math.erfc(-0.75), -0.75)],
    "lgamma": [(5.5, math.lgamma(5.5))],
    "tgamma": [(x, math.gamma(x)) for x in (5.5, 1.0, -0.5, -1.5, -2.5)] + [(-2.0, NAN), (-0.0, -INF), (INF, INF)],
    "normcdf": [(1.0, 0.5 * math.erfc(-math.sqrt(0.5)))], "normcdfinv": [(0.5 * math.erfc(-math.sqrt(0.5)), 1.0)],
    "j0": [(1.0, 0.7651976865579666)], "j1": [(1.0, 0.4400505857449335)], "y0": [(1.0, 0.08825696421567697)],
    "y1": [(1.0, -0.7812128213002887)], "i0": [(1.0, 1.2660658777520084)], "i1": [(1.0, 0.565159103992485)],
    "cyl_bessel_i0": [(1.0, 1.2660658777520084)], "cyl_bessel_i1": [(1.0, 0.565159103992485)],
}  # fmt: skip
FLOATS["remainder"][4] = (1e30, 3.0, math.remainder(1e30, 3.0))
# symbol, type of the argument and of the result, argument, result
INTEGERS = [
    ("__nv_abs", "i32", "i32", -7, 7), ("__nv_iabs", "i32", "i32", -7, 7),
    ("__nv_llabs", "i64", "i64", -LONG + 1, LONG - 1),
    ("__nv_popc", "i32", "i32", -1, 32), ("__nv_popc", "i32", "i32", 6, 2), ("__nv_popcll", "i64", "i64", -1, 64),
    ("__ockl_popcount_u32", "i32", "i32", -2, 31), ("__ockl_popcount_u64", "i64", "i64", -2, 63),
    ("__nv_llrint", "f64", "i64", 2.5, 2), ("__nv_llrintf", "f32", "i64", 1e30, LONG - 1),
    ("__nv_llround", "f64", "i64", -2.5, -3), ("__nv_llround", "f64", "i64", -INF, -LONG),
    ("__nv_isinff", "f32", "i32", -INF, 1), ("__nv_isnanf", "f32", "i32", NAN, 1),
    ("__nv_isfinited", "f64", "i32", NAN, 0), ("__nv_finitef", "f32", "i32", 1.0, 1),
    ("__nv_signbitf", "f32", "i32", -0.0, 1),
    ("__nv_ilogbf", "f32", "i32", 10.0, 3), ("__nv_ilogbf", "f32", "i32", 0.0, -INT),
    ("__nv_ilogbf", "f32", "i32", INF, INT - 1), ("__nv_ilogbf", "f32", "i32", NAN, -INT),
    ("__nv_float2int_rn", "f32", "i32", 2.5, 2), ("__nv_float2int_rz", "f32", "i32", -2.7, -2),
    ("__nv_float2int_rd", "f32", "i32", -2.1, -3), ("__nv_float2int_ru", "f32", "i32", 2.1, 3),
    ("__nv_float2int_rn", "f32", "i32", 1e10, INT - 1), ("__nv_float2int_rn", "f32", "i32", -INF, -INT),
    ("__nv_float2int_rn", "f32", "i32", NAN, 0), ("__nv_float2uint_rn", "f32", "i32", -3.0, 0),
    ("__nv_float2uint_rn", "f32", "i32", 4e9, 4_000_000_000 - 2 * INT), ("__nv_float2uint_rn", "f32", "i32", INF, -1),
    ("__nv_double2ll_rn", "f64", "i64", 1e19, LONG - 1), ("__nv_double2ll_rz", "f64", "i64", -2.0**62, -(2**62)),
    ("__nv_double2ull_rn", "f64", "i64", 1e19, 10**19 - 2 * LONG), ("__nv_float2ull_rn", "f32", "i64", INF, -1),
]  # fmt: skip


def test_every_function_is_compared() -> None:
    named = {function_of(symbol)[0] for symbol, *_ in INTEGERS}
    assert set(_FUNCTIONS) <= named | {*FLOATS, "nextafter"}


WIDE = {"erfinv", "erfcinv", "normcdfinv", "remainder"}  # their arguments are no numbers of fp32
CALLS = [(name, elem) for name in FLOATS for elem in ("f64", "f32") if elem == "f64" or name not in WIDE]


@pytest.mark.parametrize(("name", "elem"), CALLS)
def test_a_function_of_floats(name: str, elem: str) -> None:
    rounded, suffix, near = (np.float32, "f", 2e-7) if elem == "f32" else (np.float64, "", 1e-12)
    for *xs, expected in FLOATS[name]:
        xs = [x if isinstance(x, int) else float(rounded(x)) for x in xs]
        symbol = f"__nv_{name}" if name.endswith("_rn") or name in ("powi", "pown") else f"__nv_{name}{suffix}"
        found = called(symbol, xs, elem, elem)
        assert type(found) is rounded
        slack = max(near, abs(expected) * near * (20 if name in ("tgamma", "lgamma") else 4)) if expected else 1e-300
        same = math.isnan(found) if math.isnan(expected) else found == expected or abs(found - expected) <= slack
        assert same, f"{name}{tuple(xs)} is {found}, not {expected}"


@pytest.mark.parametrize(("symbol", "given", "result", "x", "expected"), INTEGERS)
def test_a_function_with_integers(symbol: str, given: str, result: str, x: float, expected: int) -> None:
    assert called(symbol, [x], given, result) == expected


@pytest.mark.parametrize(("elem", "kind"), [("f32", np.float32), ("f64", np.float64)])
def test_the_neighbour_of_a_float(elem: str, kind: type) -> None:
    suffix = "f" if elem == "f32" else ""
    found = called(f"__nv_nextafter{suffix}", [1.0, 2.0], elem, elem)
    assert found == kind(1) + np.finfo(kind).eps and found != 1
