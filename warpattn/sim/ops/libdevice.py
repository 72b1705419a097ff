"""Functions of libdevice and OCML, which kernels call by symbol: computed in fp64 and rounded once.

`__nv_sinf` and `__ocml_sin_f32` are `sin`. Functions here are exact to the last bit or two of fp32, where the libraries
promise a few units; functions with a directed rounding (`__nv_fadd_rz`) are refused. Conversions to integers end at the
least and the largest one, as the instructions do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import SimulationError
from ..ir.formats import as_integers, as_register, register_dtype
from ..ir.module import Op
from ..ir.valuetypes import Type
from ..machine.registry import plain

# Prefixes of a function's name; a fast approximation counts as the function.
_PREFIXES = re.compile(r"__nv_(?:fast_)?|__ocml_|__ockl_|__triton_hip_(?:fast_)?")
_CONVERSION = re.compile(r"(?:float|double)2(u?)(int|ll)_r([ndzu])")
_ROUNDED = {"n": np.rint, "d": np.floor, "u": np.ceil, "z": np.trunc}
_BITS = {"int": 32, "ll": 64}


def _special(name: str) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function of torch.special, on arrays."""

    def function(x: np.ndarray) -> np.ndarray:
        import torch

        return getattr(torch.special, name)(torch.from_numpy(np.array(x, np.float64))).numpy()

    return function


def _round_half_away(x: np.ndarray) -> np.ndarray:
    whole = np.trunc(x)
    return np.where(np.abs(x - whole) >= 0.5, whole + np.copysign(1, x), whole)


def _as_integer(rounded: Callable[[np.ndarray], np.ndarray], bits: int, *, signed: bool) -> Callable[..., np.ndarray]:
    return lambda x: as_integers(rounded(x), bits, signed=signed)


def _exponent(x: np.ndarray) -> np.ndarray:
    """Return the exponent of a float, as a float: -inf of 0."""
    known = np.isfinite(x) & (x != 0)
    return np.where(known, np.frexp(x)[1] - 1.0, np.where(x == 0, -np.inf, np.abs(x)))


def _integer_exponent(x: np.ndarray) -> np.ndarray:
    return np.where(np.isinf(x), 2**31 - 1, np.where(np.isnan(x) | (x == 0), -(2**31), np.nan_to_num(_exponent(x))))


def _sine_of_turns(x: np.ndarray) -> np.ndarray:
    """Return sin(pi x), exact where x is whole."""
    turned = np.sin(np.pi * (x - 2 * np.rint(x / 2)))
    return np.where(np.isfinite(x) & (np.rint(x) == x), np.copysign(0.0, x), turned)


def _cosine_of_turns(x: np.ndarray) -> np.ndarray:
    turned = np.cos(np.pi * (x - 2 * np.rint(x / 2)))
    return np.where(np.isfinite(x) & (np.rint(x - 0.5) == x - 0.5), 0.0, turned)


def _gamma(x: np.ndarray) -> np.ndarray:
    size = np.exp(_special("gammaln")(x))
    below = np.where((x < 0) & (np.fmod(np.floor(x), 2) != 0), -size, size)
    return np.where((x < 0) & (np.floor(x) == x), np.nan, np.where(x == 0, np.copysign(np.inf, x), below))


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return what is left of a after the nearest multiple of b, the even one of two: each step is exact."""
    size = np.abs(b)
    left = np.fmod(np.abs(a), 2 * size)
    less = np.where(2 * (left - size) >= size, left - size - size, left - size)
    left = np.where(2 * left > size, less, left)
    return np.where(np.signbit(a), -left, left)


def _scaled(x: np.ndarray, n: np.ndarray) -> np.ndarray:
    return np.ldexp(x, n.astype(np.int32))


def _ones(x: np.ndarray) -> np.ndarray:
    return np.bitwise_count(x.view(f"u{x.itemsize}"))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "fabs": np.abs, "iabs": np.abs, "llabs": np.abs, "acos": np.arccos, "acosh": np.arccosh,
    "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan, "atan2": np.arctan2, "atanh": np.arctanh,
    "cbrt": np.cbrt, "rcbrt": lambda x: 1 / np.cbrt(x), "ceil": np.ceil, "floor": np.floor, "trunc": np.trunc,
    "rint": np.rint, "nearbyint": np.rint, "round": _round_half_away, "llrint": _as_integer(np.rint, 64, signed=True),
    "llround": _as_integer(_round_half_away, 64, signed=True),
    "copysign": np.copysign, "cos": np.cos, "cosh": np.cosh, "cospi": _cosine_of_turns, "sin": np.sin,
    "sinh": np.sinh, "sinpi": _sine_of_turns, "tan": np.tan, "tanh": np.tanh,
    "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: np.power(10.0, x), "expm1": np.expm1, "log": np.log,
    "log2": np.log2, "log10": np.log10, "log1p": np.log1p, "logb": _exponent,
    "pow": np.power, "powi": np.power, "pown": np.power, "sqrt": np.sqrt, "fsqrt_rn": np.sqrt, "dsqrt_rn": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x), "frsqrt_rn": lambda x: 1 / np.sqrt(x), "frcp_rn": np.reciprocal,
    "drcp_rn": np.reciprocal, "fadd_rn": np.add, "dadd_rn": np.add, "fsub_rn": np.subtract, "dsub_rn": np.subtract,
    "fmul_rn": np.multiply, "dmul_rn": np.multiply, "fdiv_rn": np.divide, "ddiv_rn": np.divide,
    "fdivide": np.divide, "fma": lambda a, b, c: a * b + c, "fma_rn": lambda a, b, c: a * b + c,
    "fdim": lambda a, b: np.where(np.isnan(a) | np.isnan(b), np.nan, np.where(a > b, a - b, 0)), "fmod": np.fmod,
    "remainder": _remainder, "hypot": np.hypot, "rhypot": lambda a, b: 1 / np.hypot(a, b),
    "norm3d": lambda a, b, c: np.hypot(np.hypot(a, b), c), "nextafter": np.nextafter,
    "norm4d": lambda a, b, c, d: np.hypot(np.hypot(a, b), np.hypot(c, d)), "ldexp": _scaled,
    "scalbn": _scaled, "saturate": lambda x: np.fmin(np.fmax(x, 0), 1),
    "isinf": np.isinf, "isnan": np.isnan, "isfinite": np.isfinite, "finite": np.isfinite, "signbit": np.signbit,
    "ilogb": _integer_exponent, "erf": _special("erf"), "erfc": _special("erfc"),
    "erfcx": _special("erfcx"), "erfinv": _special("erfinv"),
    "erfcinv": lambda x: -_special("ndtri")(x / 2) / np.sqrt(2),
    "lgamma": _special("gammaln"), "tgamma": _gamma, "normcdf": _special("ndtr"),
    "normcdfinv": _special("ndtri"), "j0": _special("bessel_j0"), "j1": _special("bessel_j1"),
    "y0": _special("bessel_y0"), "y1": _special("bessel_y1"), "i0": _special("i0"), "i1": _special("i1"),
    "cyl_bessel_i0": _special("i0"), "cyl_bessel_i1": _special("i1"), "popc": _ones,
    "popcll": _ones, "popcount_u32": _ones, "popcount_u64": _ones,
}  # fmt: skip


@plain("tt.extern_elementwise")
def _called(op: Op) -> Callable[..., Any]:
    symbol = op.raw.partition('symbol = "')[2].partition('"')[0]
    name, function = function_of(symbol)
    if function is None:
        raise SimulationError(f"the simulator does not know the function {symbol} at {op.where}")
    return typed(name, function, op.inputs, op.type)


def typed(name: str, function: Callable[..., Any], inputs: Sequence[Type], kind: Type) -> Callable[..., Any]:
    """Return a function of `_FUNCTIONS` on register values: of floats in fp64, but of integers, and where neighbours
    count, as they are."""
    own = name == "nextafter" or not inputs[0].is_float
    kinds = [register_dtype(each.elem) if own else np.float64 for each in inputs]

    def run(*xs: Any) -> Any:
        value = np.asarray(function(*map(np.asarray, xs, kinds)))
        return as_register(value.astype(register_dtype(kind.elem)), kind)

    return run


def function_of(symbol: str) -> tuple[str, Callable[..., Any] | None]:
    """Return (name, function) of a symbol; function None if it is unknown."""
    name = _PREFIXES.sub("", symbol, count=1)
    name = re.sub(r"_f(32|64)$", "", name)
    conversion = _CONVERSION.fullmatch(name)
    if conversion:
        unsigned, width, rounding = conversion.groups()
        return name, _as_integer(_ROUNDED[rounding], _BITS[width], signed=not unsigned)
    for each in (name, name.removesuffix("f"), name.removesuffix("d")):
        if each in _FUNCTIONS:
            return each, _FUNCTIONS[each]
    return name, None
