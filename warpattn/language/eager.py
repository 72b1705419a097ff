"""Defines each op of the mask and score language on numbers and torch tensors.

Constant folding, the functions that users call, and the interpreter all compute with one table, `OPS`, so they cannot
disagree. Every function takes Python numbers, tensors, or a mixture that broadcasts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

INT32 = (-(2**31), 2**31 - 1)


def where(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where `condition`, else `no`."""
    if isinstance(condition, Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


def minimum(a: Any, b: Any) -> Any:
    """The smaller one."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.minimum(a, b)
    if isinstance(a, Tensor):
        return torch.where(a > b, b, a)  # at a tie a gets all of the gradient; with clamp torch's versions differ
    return minimum(b, a) if isinstance(b, Tensor) else min(a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger one."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.maximum(a, b)
    if isinstance(a, Tensor):
        return torch.where(a < b, b, a)
    return maximum(b, a) if isinstance(b, Tensor) else max(a, b)


def exp(x: Any) -> Any:
    """Exponential function, inf on overflow."""
    if isinstance(x, Tensor):
        return torch.exp(x)
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def log(x: Any) -> Any:
    """Natural logarithm, -inf at 0, nan below."""
    if isinstance(x, Tensor):
        return torch.log(x)
    return math.log(x) if x > 0 else -math.inf if x == 0 else math.nan


def tanh(x: Any) -> Any:
    """Hyperbolic tangent."""
    return torch.tanh(x) if isinstance(x, Tensor) else math.tanh(x)


def to_float(x: Any) -> Any:
    """`x` as a float; integer and bool tensors become fp32."""
    if isinstance(x, Tensor):
        return x if x.is_floating_point() else x.to(torch.float32)
    return float(x)


def to_int(x: Any) -> Any:
    """`x` as an int: a float is cut towards zero, to 32 bits at most; nan gives 0."""
    if isinstance(x, Tensor):
        x = x.double().nan_to_num(0.0).clamp(*INT32) if x.is_floating_point() else x
        return x.to(torch.int64)
    if isinstance(x, float):
        return 0 if x != x else int(min(max(x, INT32[0]), INT32[1]))
    return int(x)


def to_int64(x: Any) -> Any:
    """A bool or an int as a 64-bit int."""
    return x.to(torch.int64) if isinstance(x, Tensor) else int(x)


def read(tensor: Tensor, index: tuple[Any, ...]) -> Any:
    """Element at `index` (ints or broadcastable int tensors, one per dimension); 0 (False) outside.

    With Python ints only, an int or bool element is returned as a Python number; floats stay tensors, which keeps them
    differentiable. Ints of fewer than 32 bits become int32, so that arithmetic on them does not wrap around.
    """
    inside: Any = True
    for size, i in zip(tensor.shape, index, strict=True):
        inside = inside & (i >= 0) & (i < size)
    if not isinstance(inside, Tensor):
        value = tensor[index] if inside else tensor.new_zeros(())
        return value if tensor.is_floating_point() else value.item()
    dtype = torch.int32 if tensor.dtype in (torch.uint8, torch.int8, torch.int16) else tensor.dtype
    if tensor.numel() == 0:
        return torch.zeros(inside.shape, dtype=dtype, device=inside.device)
    value = tensor[tuple(maximum(minimum(i, size - 1), 0) for size, i in zip(tensor.shape, index, strict=True))]
    return torch.where(inside, value.to(dtype), torch.zeros((), dtype=dtype, device=tensor.device))


def _truediv(a: Any, b: Any) -> Any:
    if isinstance(a, Tensor) or isinstance(b, Tensor) or b:
        return a / b
    return a * math.copysign(math.inf, b)


def _floordiv(a: Any, b: Any) -> Any:
    """a // b; ints are never divided by 0, see `expr`."""
    return a // b if isinstance(a, Tensor) or isinstance(b, Tensor) or b else _truediv(a, b)


def _mod(a: Any, b: Any) -> Any:
    return a % b if isinstance(a, Tensor) or isinstance(b, Tensor) or b else math.nan


def _not(x: Any) -> Any:
    return not x if isinstance(x, bool) else ~x


_SAME = ("add", "sub", "mul", "neg", "abs", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "xor")
OPS: dict[str, Callable[..., Any]] = {name.strip("_"): getattr(operator, name) for name in _SAME} | {
    "truediv": _truediv,
    "floordiv": _floordiv,
    "mod": _mod,
    "not": _not,
    "shl": operator.lshift,
    "shr": operator.rshift,
    "where": where,
    "minimum": minimum,
    "maximum": maximum,
    "exp": exp,
    "log": log,
    "tanh": tanh,
    "float": to_float,
    "int": to_int,
    "int64": to_int64,
}
