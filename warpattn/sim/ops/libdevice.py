"""Functions of libdevice and OCML, which kernels call by symbol: computed in fp64 and rounded once.

`__nv_sinf` and `__ocml_sin_f32` are `sin`. Functions here are exact to the last bit or two of fp32, where the libraries
promise a few units; functions with a directed rounding (`__nv_fadd_rz`) are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import SimulationError
from ..ir.formats import as_register, register_dtype
from ..ir.module import Op
from ..machine.registry import plain

# Prefixes of a function's name; a fast approximation counts as the function.
_PREFIXES = re.compile(r"__nv_(?:fast_)?|__ocml_|__ockl_|__triton_hip_(?:fast_)?")
_CONVERSION = re.compile(r"(?:float|double)2(?:u?int|u?ll)_r([ndzu])")
_ROUNDED = {"n": np.rint, "d": np.floor, "u": np.ceil, "z": np.trunc}


def _special(name: str) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function of torch.special, on arrays."""

    def function(x: np.ndarray) -> np.ndarray:
        import torch

        return getattr(torch.special, name)(torch.from_numpy(np.array(x, np.float64))).numpy()

    return function


def _round_half_away(x: np.ndarray) -> np.ndarray:
    return np.trunc(x + np.copysign(0.5, x))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "fabs": np.abs, "iabs": np.abs, "llabs": np.abs, "acos": np.arccos, "acosh": np.arccosh,
    "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan, "atan2": np.arctan2, "atanh": np.arctanh,
    "cbrt": np.cbrt, "rcbrt": lambda x: 1 / np.cbrt(x), "ceil": np.ceil, "floor": np.floor, "trunc": np.trunc,
    "rint": np.rint, "nearbyint": np.rint, "llrint": np.rint, "round": _round_half_away, "llround": _round_half_away,
    "copysign": np.copysign, "cos": np.cos, "cosh": np.cosh, "cospi": lambda x: np.cos(np.pi * x), "sin": np.sin,
    "sinh": np.sinh, "sinpi": lambda x: np.sin(np.pi * x), "tan": np.tan, "tanh": np.tanh,
    "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: np.power(10.0, x), "expm1": np.expm1, "log": np.log,
    "log2": np.log2, "log10": np.log10, "log1p": np.log1p, "logb": lambda x: np.floor(np.log2(np.abs(x))),
    "pow": np.power, "powi": np.power, "pown": np.power, "sqrt": np.sqrt, "fsqrt_rn": np.sqrt, "dsqrt_rn": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x), "frsqrt_rn": lambda x: 1 / np.sqrt(x), "frcp_rn": np.reciprocal,
    "drcp_rn": np.reciprocal, "fadd_rn": np.add, "dadd_rn": np.add, "fsub_rn": np.subtract, "dsub_rn": np.subtract,
    "fmul_rn": np.multiply, "dmul_rn": np.multiply, "fdiv_rn": np.divide, "ddiv_rn": np.divide,
    "fdivide": np.divide, "fma": lambda a, b, c: a * b + c, "fma_rn": lambda a, b, c: a * b + c,
    "fdim": lambda a, b: np.where(np.isnan(a) | np.isnan(b), np.nan, np.maximum(a - b, 0)), "fmod": np.fmod,
    "remainder": lambda a, b: a - b * np.rint(a / b), "hypot": np.hypot, "rhypot": lambda a, b: 1 / np.hypot(a, b),
    "norm3d": lambda a, b, c: np.sqrt(a * a + b * b + c * c), "nextafter": np.nextafter,
    "norm4d": lambda a, b, c, d: np.sqrt(a * a + b * b + c * c + d * d), "ldexp": lambda x, n: x * np.exp2(n),
    "scalbn": lambda x, n: x * np.exp2(n), "saturate": lambda x: np.fmin(np.fmax(x, 0), 1),
    "isinf": np.isinf, "isnan": np.isnan, "isfinite": np.isfinite, "finite": np.isfinite, "signbit": np.signbit,
    "ilogb": lambda x: np.floor(np.log2(np.abs(x))), "erf": _special("erf"), "erfc": _special("erfc"),
    "erfcx": _special("erfcx"), "erfinv": _special("erfinv"), "erfcinv": lambda x: _special("erfinv")(1 - x),
    "lgamma": _special("gammaln"), "tgamma": lambda x: np.exp(_special("gammaln")(x)), "normcdf": _special("ndtr"),
    "normcdfinv": _special("ndtri"), "j0": _special("bessel_j0"), "j1": _special("bessel_j1"),
    "y0": _special("bessel_y0"), "y1": _special("bessel_y1"), "i0": _special("i0"), "i1": _special("i1"),
    "cyl_bessel_i0": _special("i0"), "cyl_bessel_i1": _special("i1"), "popc": np.bitwise_count,
    "popcll": np.bitwise_count, "popcount_u32": np.bitwise_count, "popcount_u64": np.bitwise_count,
}  # fmt: skip
_INTEGERS = ("popc", "abs", "iabs", "llabs")


@plain("tt.extern_elementwise")
def _called(op: Op) -> Callable[..., Any]:
    symbol = op.raw.partition('symbol = "')[2].partition('"')[0]
    name, function = function_of(symbol)
    if function is None:
        raise SimulationError(f"the simulator does not know the function {symbol} at {op.where}")
    kind = op.type
    integers = name.startswith(_INTEGERS) and not op.inputs[0].is_float

    def run(*xs: Any) -> Any:
        given = [np.asarray(x) if integers else np.asarray(x, np.float64) for x in xs]
        value = np.asarray(function(*given))
        if not kind.is_float:
            value = np.nan_to_num(value, nan=0.0) if value.dtype.kind == "f" else value
        return as_register(value.astype(register_dtype(kind.elem)), kind)

    return run


def function_of(symbol: str) -> tuple[str, Callable[..., Any] | None]:
    """Return (name, function) of a symbol; function None if it is unknown."""
    name = _PREFIXES.sub("", symbol, count=1)
    name = re.sub(r"_f(32|64)$", "", name)
    conversion = _CONVERSION.fullmatch(name)
    if conversion:
        return name, _ROUNDED[conversion[1]]
    for each in (name, name.removesuffix("f"), name.removesuffix("d")):
        if each in _FUNCTIONS:
            return each, _FUNCTIONS[each]
    return name, None
