"""Which functions of users mean the same: the function itself, and all that it reads beside its arguments.

A function is traced once, and equal values share the program. A function that reads a global or a closure means
something else once that has another value, so what it reads is part of its identity. Where that cannot be known (a
list, an object, another module's attributes), a value is equal to itself alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from itertools import chain
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from warpattn.language.expr import Table

PLAIN = (bool, int, str, bytes, type(None), torch.dtype, Table)  # and floats, by their bits
STEADY = ("warpattn", "torch", "math", "numpy", "builtins", "operator")  # modules whose attributes stay


class OfFunction:
    """A frozen value that is made of a function of users and of what that captures."""

    fn: Callable[..., Any]
    captured: tuple[tuple[str, Any], ...]

    @cached_property
    def _meaning(self) -> tuple[Any, ...]:
        names, values = zip(*self.captured, strict=True) if self.captured else ((), ())
        return (self.fn, names, tuple(map(_identity, values)), _reads(self.fn))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._meaning == self._meaning  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self._meaning)


def _reads(fn: Any, within: tuple[Any, ...] = ()) -> Any:
    """What a function reads beside its arguments, as values that compare; unlike anything else where that is unknown.
    `within`: functions that call it."""
    if not isinstance(fn, FunctionType):
        return _unknown()
    if fn in within:
        return fn
    named = {name: fn.__globals__[name] for name in _names(fn.__code__) if name in fn.__globals__}
    cells = [cell.cell_contents if _is_filled(cell) else None for cell in fn.__closure__ or ()]
    given = [*named.values(), *cells, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    return (fn.__code__, tuple(named), tuple(_identity(value, (*within, fn)) for value in given))


def _identity(value: Any, within: tuple[Any, ...] = ()) -> Any:
    """A value with its type: 0, 0.0, -0.0 and False are equal, and mean different things."""
    if isinstance(value, FunctionType):
        return value if _is_steady(value.__module__) else (value, _reads(value, within))
    if isinstance(value, ModuleType):
        return value if _is_steady(value.__name__) else _unknown()
    if isinstance(value, type | BuiltinFunctionType):
        return value if _is_steady(value.__module__) else _unknown()
    if type(value) is float:
        return (float, value.hex())
    if type(value) is tuple:
        return tuple(_identity(each, within) for each in value)
    return (type(value), value) if type(value) in PLAIN else _unknown()


def _unknown() -> object:
    return object()


def _is_steady(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in STEADY


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


@lru_cache(maxsize=1024)
def _names(code: CodeType) -> tuple[str, ...]:
    """The names that code and the functions within it may read as globals."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return tuple(dict.fromkeys((*code.co_names, *chain(*inner))))
