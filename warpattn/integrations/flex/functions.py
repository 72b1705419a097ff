"""Translates torch's functions and methods to operations on one score or index, a number or symbol (`language.expr`).

`function(name)` finds one by torch's name of a function (`where`), a method (`masked_fill`) or an operator
(`__radd__`). Others (random numbers, reductions, gamma functions, ...) do not exist in the language of masks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from warpattn.integrations.flex import elementary
from warpattn.integrations.flex.elementary import is_float, root, truncate
from warpattn.language import expr
from warpattn.language.expr import Expr
from warpattn.language.nodes import postorder

BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
UNARY = ("neg", "abs", "invert")
LARGEST_POWER = 8  # x ** n is written out as products up to this n


class NoTranslation(Exception):
    """An operation that the language of masks and scores does not have."""


class NoMethod(NoTranslation, AttributeError):
    """The same for a method, so that `hasattr` works."""


def function(name: str) -> Callable[..., Any] | None:
    """Return the translation of torch's function, method or operator `name`; None if there is none."""
    name = name.strip("_").removeprefix("special_")
    if name[:1] == "r" and name[1:] in BINARY and name not in FUNCTIONS:
        plain = FUNCTIONS[name[1:]]
        return lambda a, b: plain(b, a)
    return FUNCTIONS.get(name)


def _cast(x: Any, *to: Any, dtype: torch.dtype | None = None) -> Any:
    """`x.to(...)`: a dtype or another value's dtype counts, devices do not. Nothing is rounded to a narrow float."""
    kinds = [t if isinstance(t, torch.dtype) else _dtype(t) for t in to]
    wanted = dtype or next((kind for kind in kinds if kind is not None), None)
    if wanted is None:
        return x
    return expr.to_float(x) if wanted.is_floating_point else _boolean(x) if wanted == torch.bool else expr.to_int(x)


TORCH_DTYPES = {"bool": torch.bool, "int": torch.int32, "int64": torch.int64, "float": torch.float32}


def _dtype(value: Any) -> torch.dtype | None:
    return TORCH_DTYPES[value.dtype] if isinstance(value, Expr) else None


def _boolean(x: Any) -> Any:
    return x if isinstance(x, bool) or (isinstance(x, Expr) and x.dtype == "bool") else x != 0


def _not(x: Any) -> Any:
    x = _boolean(x)
    return not x if isinstance(x, bool) else ~x


def _constant(number: Any) -> Callable[..., Any]:
    """Translate `score.new_ones(())`, `torch.zeros_like(score)`: a number of the given dtype, else of `x`'s."""

    def make(x: Any, size: Any = (), *, dtype: torch.dtype | None = None) -> Any:
        return _full(x, size, number, dtype=dtype)

    return make


def _full(x: Any, size: Any, number: Any, *, dtype: torch.dtype | None = None) -> Any:
    shape = (size,) if isinstance(size, int) else tuple(size)
    if shape:
        raise NoTranslation(f"a new tensor of shape {shape} has no translation")
    return _cast(number, _dtype(x) if dtype is None else dtype)


def _are_boolean(*values: Any) -> bool:
    return all(isinstance(x, bool) or (isinstance(x, Expr) and x.dtype == "bool") for x in values)


def _of_numbers(of_bools: Callable[..., Any], of_numbers: Callable[..., Any]) -> Callable[..., Any]:
    """Translate a function that torch takes for a logical one where both operands are bools."""
    return lambda a, b: (of_bools if _are_boolean(a, b) else of_numbers)(a, b)


def _add(a: Any, b: Any, *, alpha: Any = 1) -> Any:
    if _are_boolean(a, b):
        return a | (b & (alpha != 0))
    return a + (b if alpha == 1 else b * alpha)


def _subtract(a: Any, b: Any, *, alpha: Any = 1) -> Any:
    return a - (b if alpha == 1 else b * alpha)


def _divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return a / b
    if rounding_mode == "floor":
        return a // b
    return truncate(a / b) if is_float(a, b) else _quotient_to_zero(a, b)


def _quotient_to_zero(a: Any, b: Any) -> Any:
    down = a // b
    return down + ((down * b != a) & ((a < 0) != (b < 0))) * 1


def _power(x: Any, n: Any) -> Any:
    n = n.node.value if isinstance(n, Expr) and n.node.is_constant else n
    if isinstance(n, Expr):
        if isinstance(x, int) and x == 2 and n.dtype in ("int", "int64"):
            return 1 << n
        if not is_float(x, n):
            raise NoTranslation("a power of ints with an exponent that is not a constant has no translation")
        return expr.exp(n * math.log(x)) if isinstance(x, int | float) and x > 0 else elementary.power(x, n)
    if n != int(n):
        return root(x, n)
    if abs(n) > LARGEST_POWER:
        raise NoTranslation(f"the power {n} has no translation; fractions and ints up to {LARGEST_POWER} have one")
    product: Any = 1
    for _ in range(abs(int(n))):
        product = x * product
    return 1.0 / product if n < 0 else product


def _isin(x: Any, elements: tuple[Any, ...], *, invert: bool = False, assume_unique: bool = False) -> Any:
    found: Any = False
    for element in elements:
        found = found | (x == element)
    return _not(found) if invert else found


def _detach(x: Any) -> Any:
    """Leave a number that no gradient reaches as it is; the language has no constants that depend on a score."""
    nodes = postorder((x.node,)) if isinstance(x, Expr) and x.dtype == "float" else ()
    if any(node.dtype == "float" and node.op in ("sym", "load") for node in nodes):
        raise NoTranslation("torch's detach of a number that gradients may reach has no translation")
    return x


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    x = x if min is None else expr.maximum(x, min)
    return x if max is None else expr.minimum(x, max)


_SAME = ("floordiv", "mod", "neg", "abs", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "xor", "invert",
         "lshift", "rshift")  # fmt: skip
_OPERATORS: dict[str, Callable[..., Any]] = {name.strip("_"): getattr(operator, name) for name in _SAME}

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": _add,
    "mul": _of_numbers(operator.and_, operator.mul),
    "sub": _subtract,
    "rsub": lambda a, b, alpha=1: _subtract(b, a, alpha=alpha),
    "div": _divide,
    "rdiv": lambda a, b: _divide(b, a),
    "pow": _power,
    "pos": lambda x: x,
    "float_power": lambda x, n: _power(expr.to_float(x), n),
    "square": lambda x: _of_numbers(operator.and_, operator.mul)(x, x),
    "minimum": _of_numbers(operator.and_, expr.minimum),
    "maximum": _of_numbers(operator.or_, expr.maximum),
    "clamp": _clamp,
    "clamp_min": lambda x, min: expr.maximum(x, min),
    "clamp_max": lambda x, max: expr.minimum(x, max),
}

_LOGIC: dict[str, Callable[..., Any]] = {
    "logical_and": lambda a, b: _boolean(a) & _boolean(b),
    "logical_or": lambda a, b: _boolean(a) | _boolean(b),
    "logical_xor": lambda a, b: _boolean(a) ^ _boolean(b),
    "logical_not": _not,
    "where": lambda condition, yes, no: expr.where(condition, yes, no),
    "tensor_where": lambda yes, condition, no: expr.where(condition, yes, no),
    "isin": _isin,
    "masked_fill": lambda x, mask, value: expr.where(mask, value, x),
    "isnan": lambda x: x != x,
    "isinf": lambda x: abs(x) == math.inf,
}

_KINDS: dict[str, Callable[..., Any]] = {
    "to": _cast,
    "type": _cast,
    "type_as": _cast,
    "float": expr.to_float,
    "double": expr.to_float,
    "half": expr.to_float,
    "bfloat16": expr.to_float,
    "int": expr.to_int,
    "long": expr.to_int,
    "short": expr.to_int,
    "char": expr.to_int,
    "byte": expr.to_int,
    "bool": _boolean,
    "clone": lambda x: x,
    "contiguous": lambda x: x,
    "detach": _detach,
    "squeeze": lambda x, dim=0: x,
    "as_tensor": lambda x: x,
    "new_ones": _constant(1),
    "new_zeros": _constant(0),
    "new_full": _full,
    "new_tensor": lambda x, data, dtype=None: _full(x, (), data, dtype=dtype),
    "ones_like": _constant(1),
    "zeros_like": _constant(0),
    "full_like": lambda x, fill_value, dtype=None: _full(x, (), fill_value, dtype=dtype),
}

FUNCTIONS = _OPERATORS | _ARITHMETIC | _LOGIC | elementary.FUNCTIONS | _KINDS
_ALIASES = {
    "sub": "subtract", "mul": "multiply", "div": "divide true_divide truediv", "floordiv": "floor_divide",
    "mod": "remainder", "neg": "negative", "abs": "absolute", "minimum": "min fmin",
    "maximum": "max fmax", "clamp": "clip", "sigmoid": "expit", "sign": "sgn",
    "pos": "positive", "asin": "arcsin", "acos": "arccos", "asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh",
    "log_sigmoid": "logsigmoid",
    "atan": "arctan", "atan2": "arctan2", "trunc": "fix", "lt": "less", "le": "less_equal", "gt": "greater",
    "ge": "greater_equal", "ne": "not_equal", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "invert": "bitwise_not", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}  # fmt: skip
FUNCTIONS |= {alias: FUNCTIONS[name] for name, aliases in _ALIASES.items() for alias in aliases.split()}
