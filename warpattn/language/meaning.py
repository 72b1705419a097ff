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

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
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
    named = _beside_arguments(fn)
    return fn.__code__, tuple(named), tuple([meaning(value, (*within, fn)) for value in named.values()])


def _beside_arguments(fn: FunctionType) -> dict[str, Any]:
    """Return what a function reads beside its arguments: globals, its closure, its defaults and its attributes."""
    named = {name: fn.__globals__[name] for name in _names(fn.__code__) if name in fn.__globals__}
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    named |= {f"{name} outside": cell.cell_contents if _is_filled(cell) else None for name, cell in cells}
    named |= {f"default {i}": value for i, value in enumerate(fn.__defaults__ or ())}
    return named | {f"default {name}": value for name, value in (fn.__kwdefaults__ or {}).items()} | fn.__dict__


def contents(value: Any, changing: dict[int, Any]) -> Hashable:
    """Return a snapshot of what a value holds, to compare with a later one. Tensors and modules count by identity: each
    call reads a tensor's values. Lists, arrays, objects that may change, and functions and classes of the user that
    read something are added to `changing`, by their ids, and visited once."""
    kind = type(value)
    if kind is float:
        return kind, value.hex()
    if kind in _PLAIN:
        return kind, value
    if kind is FunctionType:
        return _contents_of_function(value, changing)
    if isinstance(value, (Enum, *_THEMSELVES)) or id(value) in changing:
        return Table(cast("Any", value))
    is_traced = "_fixed" in getattr(value, "__dict__", ())
    if not (kind in (tuple, frozenset, MethodType) or _is_frozen(kind) or is_traced):
        changing[id(value)] = value
    inner: Any = [contents(each, changing) for each in _parts(value)]
    if is_traced and not _is_ours(kind):
        inner.append(_contents_of_class(kind, changing))
    return kind, frozenset(inner) if isinstance(value, set | frozenset) else tuple(inner)


def _contents_of_function(fn: FunctionType, changing: dict[int, Any]) -> Hashable:
    """Snapshot of what a function reads, as `contents`."""
    named = {} if id(fn) in changing or _is_steady(fn.__module__) else _beside_arguments(fn)
    named = {name: value for name, value in named.items() if not _stays(value)}
    if named:
        changing[id(fn)] = fn
    return Table(cast("Any", fn)), tuple([(name, _contents_read(value, changing)) for name, value in named.items()])


def _contents_of_class(kind: type, changing: dict[int, Any]) -> Hashable:
    """Snapshot of what a user's class of masks or scores has, and of what its methods read."""
    own = [each for each in kind.__mro__ if not _is_ours(each)]
    named = [(name, _function_of(x)) for each in own for name, x in vars(each).items() if _is_written(name, x)]
    if any(not isinstance(x, FunctionType) for _, x in named):
        changing[id(kind)] = kind
    return tuple([(name, _contents_read(x, changing)) for name, x in named])


def _contents_read(value: Any, changing: dict[int, Any]) -> Hashable:
    """Snapshot of a value that a function or a class reads: an object that may change counts by identity, because it
    often holds far more than the function reads, such as a model."""
    kind = type(value)
    if kind in (tuple, list, set, frozenset, dict) or (_is_frozen(kind) and not isinstance(value, _THEMSELVES)):
        inner = [_contents_read(each, changing) for each in _parts(value)]
        return kind, frozenset(inner) if kind in (set, frozenset) else tuple(inner)
    is_known = kind is float or kind in _PLAIN or kind is FunctionType or kind.__module__ == "numpy"
    return contents(value, changing) if is_known else Table(cast("Any", value))


def _stays(value: Any) -> bool:
    """Whether a value that a function reads is a module or a function that does not change."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(value, FunctionType | BuiltinFunctionType | ModuleType | type) and _is_steady(name)


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
    own = {name: each for name, each in getattr(value, "__dict__", {}).items() if name not in NOT_STATE}
    return (*own.items(), *((name, getattr(value, name)) for name in slots(type(value)) if hasattr(value, name)))


@lru_cache(maxsize=1024)
def slots(kind: type) -> tuple[str, ...]:
    """Return the names of a class's attributes that are in slots."""
    named = [item for each in kind.__mro__ for item in vars(each).items()]
    return tuple([name for name, each in named if isinstance(each, MemberDescriptorType)])


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
        if each.opname in _GLOBAL and each.argval in _READERS:
            return True
    return any(_looks_elsewhere(constant) for constant in code.co_consts if isinstance(constant, CodeType))


@lru_cache(maxsize=1024)
def _names(code: CodeType) -> tuple[str, ...]:
    """Return the names that code and the functions within it read as globals."""
    own = [each.argval for each in dis.get_instructions(code) if each.opname in _GLOBAL]
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return tuple(dict.fromkeys((*own, *chain(*inner))))
