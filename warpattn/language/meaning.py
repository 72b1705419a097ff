"""Computes keys of masks and scores: values with equal keys make equal programs.

Python's own equality is too wide for that: 2, 2.0 and True are equal, and so are 0.0 and -0.0, but a mask or score that
computes with one of them is another program with the other. The meaning of a function that reads a global or a closure
changes with the value there, so the values that it reads are part of its key, and so are those that methods of a user's
class read. Where the meaning cannot be known (a list, an object that may change, another module's attributes), there is
no key.
"""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import fields
from enum import Enum
from functools import lru_cache
from itertools import chain
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, cast

import torch

from warpattn.language.expr import Table

NOT_STATE = ("_program", "_fixed", "_held", "_meaning", "_blocks")  # attributes that cache something
_PLAIN = frozenset((int, bool, str, bytes, type(None), torch.dtype, Table))
_THEMSELVES = (torch.Tensor, FunctionType, BuiltinFunctionType, ModuleType, type)
_STEADY = ("warpattn", "torch", "math", "numpy", "builtins", "operator")  # modules whose attributes do not change

_READERS = ("__import__", "eval", "exec", "globals", "input", "locals", "open", "vars")  # builtins


class UnknownError(LookupError):
    """Raised for a value whose meaning cannot be known."""


def meaning(value: Any, within: tuple[Any, ...] = ()) -> Hashable:
    """Return the key of a value; raises UnknownError if it has none. `within`: calling functions, methods' classes."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind is float:
        return kind, value.hex()
    if kind is tuple:
        return tuple([meaning(each, within) for each in value])
    if _is_frozen(kind):
        return kind, _state(value, within), () if _is_ours(kind) else _methods(kind, within)
    if kind is FunctionType:
        return value if _is_steady(value.__module__) else (value, _reads(value, within))
    if isinstance(value, Enum):
        return kind, value.name
    if isinstance(value, type):
        is_known = value in within or _is_ours(value) or issubclass(value, Enum)
        return value if is_known else (value, _methods(value, within))
    if isinstance(value, ModuleType) and _is_steady(value.__name__):
        return value
    if kind is BuiltinFunctionType and _is_steady(value.__module__):
        return value
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == () and not hasattr(value, "__setitem__"):
        return kind, value.tobytes()
    raise UnknownError


@lru_cache(maxsize=1024)
def _is_frozen(kind: type) -> bool:
    """Whether a class is a frozen dataclass."""
    parameters = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def is_users(value: Any) -> bool:
    """Whether a value's class is a user's own."""
    return not _is_ours(type(value))


@lru_cache(maxsize=1024)
def _is_ours(kind: type) -> bool:
    return _is_steady(kind.__module__)


def _state(value: Any, within: tuple[Any, ...]) -> Hashable:
    """Key of a frozen value's attributes; a subclass may have more than the fields that `==` compares."""
    own = getattr(value, "__dict__", {})
    state = []
    for name, each in own.items():
        if name not in NOT_STATE:
            state.append((name, (type(each), each) if type(each) in _PLAIN else meaning(each, within)))
    if len(own) < len(type(value).__dataclass_fields__):  # it has slots
        missing = [each.name for each in fields(value) if each.name not in own]
        state += [(name, meaning(getattr(value, name, None), within)) for name in missing]
    return tuple(state)


def _methods(kind: type, within: tuple[Any, ...]) -> Hashable:
    """Key of everything that methods and properties of a user's class read, and of its other attributes."""
    own = [each for each in kind.__mro__ if not _is_steady(each.__module__)]
    within = (*within, *own)
    named = [(name, each) for owner in own for name, each in vars(owner).items() if _is_written(name, each)]
    return tuple([(name, meaning(_function_of(each), within)) for name, each in named])


def _is_written(name: str, attribute: Any) -> bool:
    """Whether an attribute of a class was written by the user, not made by Python or `dataclass`."""
    return name == "__call__" or not (name.startswith("__") or isinstance(attribute, MemberDescriptorType))


def _function_of(attribute: Any) -> Any:
    """Return the function of a method, property or the like; other attributes unchanged."""
    for name in ("__func__", "fget", "func"):
        attribute = getattr(attribute, name, attribute)
    return attribute


def _reads(fn: FunctionType, within: tuple[Any, ...]) -> Hashable:
    """Key of a function's code and of all that it reads beside its arguments."""
    if fn in within:
        return fn
    if _looks_elsewhere(fn.__code__):
        raise UnknownError
    named = {name: fn.__globals__[name] for name in _names(fn.__code__) if name in fn.__globals__}
    named |= fn.__dict__  # attributes of the function itself
    cells = [cell.cell_contents if _is_filled(cell) else None for cell in fn.__closure__ or ()]
    given = [*named.values(), *cells, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    return fn.__code__, tuple(named), tuple([meaning(value, (*within, fn)) for value in given])


def contents(value: Any, changing: dict[int, Any]) -> Hashable:
    """Return a snapshot of what a value holds, to compare with a later one. Tensors, functions and modules count by
    identity: each call reads a tensor's values, and a function is only traced once. Lists, arrays and objects that may
    change are added to `changing`, by their ids, and visited once."""
    kind = type(value)
    if kind is float:
        return kind, value.hex()
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, (Enum, *_THEMSELVES)) or id(value) in changing:
        return Table(cast("Any", value))
    steady = kind in (tuple, frozenset, MethodType) or _is_frozen(kind) or "_fixed" in getattr(value, "__dict__", ())
    if not steady:
        changing[id(value)] = value
    inner: Any = [contents(each, changing) for each in _parts(value)]
    return kind, frozenset(inner) if isinstance(value, set | frozenset) else tuple(inner)


def _parts(value: Any) -> Iterable[Any]:
    """Return an object's elements, or its attributes (also those in slots), each with its name."""
    if isinstance(value, tuple | list | set | frozenset | deque):
        return value
    if isinstance(value, dict):
        return tuple(value.items())
    if isinstance(value, bytearray):
        return (bytes(value),)
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return str(value.dtype), value.shape, value.tobytes()
    slots = [name for kind in type(value).__mro__ for name, each in vars(kind).items() if _is_slot(each)]
    own = {name: each for name, each in getattr(value, "__dict__", {}).items() if name not in NOT_STATE}
    return (*own.items(), *((name, getattr(value, name)) for name in slots if hasattr(value, name)))


def _is_slot(attribute: Any) -> bool:
    return isinstance(attribute, MemberDescriptorType)


def _is_steady(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _STEADY


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


@lru_cache(maxsize=1024)
def _looks_elsewhere(code: CodeType) -> bool:
    """Whether code, or a function within it, imports a module that may change, or reads names that only it knows."""
    for each in dis.get_instructions(code):
        if each.opname == "IMPORT_NAME" and not _is_steady(each.argval):
            return True
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME") and each.argval in _READERS:
            return True
    return any(_looks_elsewhere(constant) for constant in code.co_consts if isinstance(constant, CodeType))


@lru_cache(maxsize=1024)
def _names(code: CodeType) -> tuple[str, ...]:
    """Return the names that code and the functions within it may read as globals."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return tuple(dict.fromkeys((*code.co_names, *chain(*inner))))
