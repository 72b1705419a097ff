"""torch's functions of one number that the language of masks and scores composes of arithmetic, exp, log and tanh.

Each takes an `Expr` (or a number beside one) and returns one, so kernels and derivatives need no more operations. The
absolute error of sine, cosine and angles is below 4e-7, beyond 10^5 that of an argument rounded to fp32; that of `erf`
is 5e-7, of its derivative 1e-5. A difference of two numbers near 1, such as sinh of a small one, has the error of fp32
beside 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from warpattn.language.expr import Expr, exp, log, maximum, minimum, tanh, to_float, to_int, where

WHOLE = 2.0**23  # from here on floats of 32 bits are whole numbers
PI_PARTS = (201 / 64, 507 / 2**19, 6.278329573009626e-07)  # of pi; two of 9 bits, whose products with k are exact
FARTHEST = 1.67  # a little more than pi / 2, since k is rounded
SINE = (-1 / 6, 1 / 120, -1 / 5040, 1 / 362880, -1 / 39916800)  # of x^3, x^5, ...; 1.3e-7 is left at 1.67
ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)  # Abramowitz and Stegun 7.1.26
ARC = (1.0, -0.333333225, 0.199995581, -0.14278576, 0.110507712, -0.0878504317, 0.0668528127, -0.0439284074,
       0.021912943, -0.00703066815, 0.00105760717)  # of x, x^3, ... for the angle of a tangent up to 1  # fmt: skip
LARGEST = 3.4028234663852886e38


def is_float(*values: Any) -> bool:
    """Whether one of the values is a float."""
    return any(isinstance(x, float) or (isinstance(x, Expr) and x.dtype == "float") for x in values)


def truncate(x: Any) -> Any:
    """Round towards zero."""
    return where(abs(x) < WHOLE, to_float(to_int(x)), x) if is_float(x) else x


def floor(x: Any) -> Any:
    """Round down."""
    cut = truncate(x)
    return cut - where(cut > x, 1.0, 0.0) if is_float(x) else x


def round_half_even(x: Any) -> Any:
    """Round to the nearest whole number, halves to the even one."""
    if not is_float(x):
        return x
    below = floor(x)
    rest = x - below
    return where((rest > 0.5) | ((rest == 0.5) & _is_odd(below)), below + 1.0, below)


def _rounded(x: Any, decimals: int = 0) -> Any:
    """Round to a number of decimals, which may be negative."""
    if not decimals or not is_float(x):
        return round_half_even(x)
    unit = 10.0 ** abs(decimals)
    return round_half_even(x * unit) / unit if decimals > 0 else round_half_even(x / unit) * unit


def _is_odd(whole: Any) -> Any:
    """Whether a whole number of floating type is odd."""
    return floor(whole * 0.5) * 2.0 != whole


def sine(x: Any, turned: float = 0.0) -> Any:
    """The sine of x + turned - k pi, which is about pi / 2 at most, by its series; with the other sign for odd k."""
    x = to_float(x)
    k = floor(x * (1.0 / math.pi) + (0.5 + turned / math.pi))
    rest = x
    for part in PI_PARTS:
        rest = rest - k * part
    rest = rest + turned if turned else rest
    rest = between(rest, -FARTHEST, FARTHEST)
    square = rest * rest
    value = rest + rest * square * _polynomial(square, SINE)
    return where(_is_odd(k), -value, value)


def cosine(x: Any) -> Any:
    """The sine a quarter of a turn later."""
    return sine(x, math.pi / 2)


def _polynomial(x: Any, coefficients: tuple[float, ...]) -> Any:
    """c0 + c1 x + c2 x^2 + ..."""
    *lower, total = coefficients
    for coefficient in reversed(lower):
        total = total * x + coefficient
    return total


def _size(x: Any) -> Any:
    """|x|, whose derivative at 0 is 1, so that a function made of both halves has its own there."""
    return where(x < 0, -x, x)


def root(x: Any, power: float = 0.5) -> Any:
    """A power of a number that is not negative; of others NaN, as torch's for powers that are no whole numbers."""
    return exp(log(x) * power)


def power(x: Any, n: Any) -> Any:
    """x ** n of a float x or n: with the sign of x for an odd n, NaN for a number below 0 and a fraction."""
    x, n = to_float(x), to_float(n)
    size = abs(x)
    value = exp(log(where(size == 0.0, 1.0, size)) * n)
    value = where(size == 0.0, where(n < 0.0, math.inf, 0.0), value)
    below = where(floor(n) != n, math.nan, where(_is_odd(n), -value, value))
    return where((n == 0.0) | (x == 1.0), 1.0, where(x < 0.0, below, value))


def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x), by an exponential that is at most 1: the derivative of a larger one may be NaN."""
    small = exp(-_size(x))
    return where(x < 0, small, 1.0) / (small + 1.0)


def erf(x: Any) -> Any:
    """The error function."""
    x = to_float(x)
    size = _size(x)
    t = 1.0 / (size * 0.3275911 + 1.0)
    value = 1.0 - t * _polynomial(t, ERF) * exp(-(size * size))
    return where(x < 0.0, -value, value)


def logit(x: Any) -> Any:
    """The number whose sigmoid is x."""
    return log(x / (1.0 - x))


def softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """log(1 + e^(beta x)) / beta, and x itself above the threshold."""
    y = x * beta
    value = maximum(y, 0.0) + log(exp(-_size(y)) + 1.0)
    return where(y > threshold, to_float(x), value / beta)


def gelu(x: Any, approximate: str = "none") -> Any:
    """x times the normal distribution's share below x, or its approximation by tanh."""
    if approximate == "tanh":  # by an exponential: the tanh of kernels has an error of 2^-11
        return x * sigmoid((x + x * x * x * 0.044715) * (2.0 * math.sqrt(2.0 / math.pi)))
    if approximate != "none":
        raise ValueError(f"approximate is {approximate!r}; it must be 'none' or 'tanh'")
    return x * (erf(x * math.sqrt(0.5)) + 1.0) * 0.5


def mish(x: Any) -> Any:
    """x tanh(softplus(x)), by an exponential that is at most 1."""
    small = exp(-_size(x))
    above = where(x < 0, small * (small + 2.0), small * 2.0 + 1.0)
    return x * above / (above + where(x < 0, 2.0, small * small * 2.0))


def elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    """scale x, and below 0 scale alpha (e^(input_scale x) - 1)."""
    return where(x > 0, to_float(x), (exp(minimum(x, 0) * input_scale) - 1.0) * alpha) * scale


def remainder_to_zero(a: Any, b: Any) -> Any:
    """The remainder of a division that is rounded towards zero, with the sign of a."""
    rest = _size(a) % abs(b)
    return where(a < 0, -rest, rest)


def between(x: Any, low: float, high: float) -> Any:
    """x cut to an interval, at whose ends the derivative is 0; NaN stays."""
    return where(x <= low, low, where(x >= high, high, x))


def _is_negative(x: Any) -> Any:
    """Whether the sign of a float is minus, also that of -0.0."""
    return (x < 0.0) | ((x == 0.0) & (1.0 / x < 0.0))


def with_sign(x: Any, of: Any) -> Any:
    """|x| with the sign of another number."""
    size = abs(to_float(x))
    return where(_is_negative(to_float(of)), -size, size)


def times_log(x: Any, y: Any) -> Any:
    """x log y; 0 for an x of 0 where the logarithm is not finite, but not for a NaN."""
    return where((x == 0) & ((y <= 0) | (y == math.inf)), 0.0, x * log(y))


def _angle(across: Any, along: Any) -> Any:
    """The angle of a point with positive coordinates, by a series for the shorter over the longer one."""
    steep = across > along
    longer = where(steep, across, where(along == 0.0, 1.0, along))
    near = where(steep, along, across) / longer
    value = near * _polynomial(near * near, ARC)
    return where(steep, math.pi / 2 - value, value)


def arc_tangent(x: Any) -> Any:
    """The angle whose tangent is x."""
    x = to_float(x)
    angle = _angle(_size(x), 1.0)
    return where(x < 0.0, -angle, angle)


def arc_tangent_of_quotient(y: Any, x: Any) -> Any:
    """The angle of the point (x, y)."""
    y, x = to_float(y), to_float(x)
    angle = _angle(_size(y), _size(x))
    angle = where(_is_negative(x), math.pi - angle, angle)
    return where(_is_negative(y), -angle, angle)


def finite_number(x: Any, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Any:
    """x with numbers in the place of NaN and infinities; the largest ones unless they are given."""
    if not is_float(x):
        return x
    high, low = LARGEST if posinf is None else posinf, -LARGEST if neginf is None else neginf
    return where(x != x, nan, where(x == math.inf, high, where(x == -math.inf, low, x)))


def _area(x: Any, step: float) -> Any:
    """log(x + sqrt(x^2 + step)) of an x that is not negative."""
    near = minimum(to_float(x), WHOLE)
    return where(x > WHOLE, log(maximum(x, 1.0)) + math.log(2.0), log(near + root(near * near + step)))


def _area_sine(x: Any) -> Any:
    """The number whose hyperbolic sine is x."""
    value = _area(_size(x), 1.0)
    return where(x < 0, -value, value)


def is_close(a: Any, b: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Any:
    """Whether |a - b| is at most atol + rtol |b|, or both are equal."""
    distance = abs(a - b)
    close = (a == b) | ((distance < math.inf) & (distance <= abs(b * rtol) + atol))
    return close | ((a != a) & (b != b)) if equal_nan else close


def log_sum_exp(a: Any, b: Any) -> Any:
    """log(e^a + e^b)."""
    return where((a == b) & (abs(a) == math.inf), a, maximum(a, b) + log(exp(-abs(a - b)) + 1.0))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "floor": floor,
    "ceil": lambda x: -floor(-x),
    "trunc": truncate,
    "round": _rounded,
    "frac": lambda x: x - truncate(x),
    "fmod": remainder_to_zero,
    "sign": lambda x: where(x > 0, 1, where(x < 0, -1, 0)) * (1.0 if is_float(x) else 1),
    "heaviside": lambda x, values: where(x > 0, 1.0, where(x < 0, 0.0, values)),
    "isfinite": lambda x: abs(x) < math.inf,
    "isposinf": lambda x: x == math.inf,
    "isneginf": lambda x: x == -math.inf,
    "isclose": is_close,
    "signbit": lambda x: _is_negative(x) if is_float(x) else x < 0,
    "nan_to_num": finite_number,
    "exp": exp,
    "exp2": lambda x: exp(x * math.log(2.0)),
    "expm1": lambda x: exp(x) - 1.0,
    "log": log,
    "log2": lambda x: log(x) * (1.0 / math.log(2.0)),
    "log10": lambda x: log(x) * (1.0 / math.log(10.0)),
    "log1p": lambda x: log(x + 1.0),
    "logaddexp": log_sum_exp,
    "logaddexp2": lambda a, b: log_sum_exp(a * math.log(2.0), b * math.log(2.0)) / math.log(2.0),
    "logit": lambda x, eps=None: logit(x if eps is None else minimum(maximum(x, eps), 1.0 - eps)),
    "sqrt": root,
    "rsqrt": lambda x: root(x, -0.5),
    "hypot": lambda a, b: root(a * a + b * b),
    "sin": sine,
    "cos": cosine,
    "tan": lambda x: sine(x) / cosine(x),
    "tanh": tanh,
    "sinh": lambda x: (exp(x) - exp(-x)) * 0.5,
    "cosh": lambda x: (exp(x) + exp(-x)) * 0.5,
    "asinh": _area_sine,
    "acosh": lambda x: _area(x, -1.0),
    "atanh": lambda x: log((x + 1.0) / (1.0 - x)) * 0.5,
    "asin": lambda x: arc_tangent_of_quotient(x, root(1.0 - x * x)),
    "acos": lambda x: arc_tangent_of_quotient(root(1.0 - x * x), x),
    "deg2rad": lambda x: x * (math.pi / 180.0),
    "rad2deg": lambda x: x * (180.0 / math.pi),
    "copysign": with_sign,
    "xlogy": times_log,
    "atan": arc_tangent,
    "atan2": arc_tangent_of_quotient,
    "erf": erf,
    "erfc": lambda x: 1.0 - erf(x),
    "sigmoid": sigmoid,
    "log_sigmoid": lambda x: -softplus(-x, threshold=math.inf),
    "softplus": softplus,
    "silu": lambda x: x * sigmoid(x),
    "gelu": gelu,
    "mish": mish,
    "elu": elu,
    "celu": lambda x, alpha=1.0: elu(x, alpha, 1.0, 1.0 / alpha),
    "selu": lambda x: elu(x, 1.6732632423543772, 1.0507009873554805),
    "relu": lambda x: where(x <= 0, 0, x),
    "relu6": lambda x: between(x, 0, 6),
    "leaky_relu": lambda x, negative_slope=0.01: where(x > 0, to_float(x), x * negative_slope),
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0: between(x, min_val, max_val),
    "hardsigmoid": lambda x: between(x / 6.0 + 0.5, 0.0, 1.0),
    "hardswish": lambda x: x * between(x / 6.0 + 0.5, 0.0, 1.0),
    "softshrink": lambda x, lambd=0.5: where(x > lambd, x - lambd, where(x < -lambd, x + lambd, x * 0.0)),
    "hardshrink": lambda x, lambd=0.5: where((x >= -lambd) & (x <= lambd), 0.0, x),
    "tanhshrink": lambda x: x - tanh(x),
    "prelu": lambda x, weight: where(x > 0, x, x * weight),
    "softsign": lambda x: x / (abs(x) + 1.0),
    "threshold": lambda x, threshold, value: where(x <= threshold, value, x),
    "reciprocal": lambda x: 1.0 / x,
    "lerp": lambda a, b, weight: a + (b - a) * weight,
    "addcmul": lambda x, a, b, value=1: x + a * b * value,
    "addcdiv": lambda x, a, b, value=1: x + a / b * value,
}
