"""Derives Triton's types of a kernel's parameters from the arguments of its launch.

    tensor     pointer to its elements; None: a pointer that the kernel does not read
    float      fp32
    int        i32; i64 for a field of a named tuple that is annotated `Int64`
    tuple      a tuple with the same field names

The type of a tensor map cannot be derived: it has the box and the layout in shared memory, which are in no argument.
Types of tensor maps and of captured tensors are given by path, such as "q_maps" or "k_source.map".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, get_type_hints

from torch import Tensor

from warpattn.problem.element import FP32, element_of

Int64 = Annotated[Any, "i64"]  # a field of 64 bits
NOTHING: Mapping[str, Any] = {}


def argument_types(args: Mapping[str, Any], given: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """Return the type of every argument; `given`: types by path, which replace those derived from values."""
    return {name: _type(name, value, "i32", given) for name, value in args.items()}


def _type(path: str, value: Any, integer: str, given: Mapping[str, Any]) -> Any:
    """Return the type of a value; `integer` is the type of an int."""
    if path in given:
        return given[path]
    if isinstance(value, tuple):
        wide = _wide_fields(type(value))
        parts = [_type(f"{path}.{name}", x, "i64" if name in wide else "i32", given) for name, x in fields(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if value is None:
        return FP32.pointer
    if isinstance(value, Tensor):
        return element_of(value.dtype).pointer
    return FP32.name if isinstance(value, float) else integer


def fields(value: tuple[Any, ...]) -> Iterable[tuple[str, Any]]:
    """The parts of a tuple, each with its field's name, or its index in a tuple without names."""
    return zip(getattr(value, "_fields", map(str, range(len(value)))), value, strict=True)


@cache
def _wide_fields(kind: type) -> frozenset[str]:
    """Names of the fields of a tuple that have 64 bits."""
    return frozenset(name for name, hint in get_type_hints(kind, include_extras=True).items() if hint == Int64)
