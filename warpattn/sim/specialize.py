"""Specialises a kernel's parameters (types, constants, divisibility) as a launch would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import SimulationError, of_type

_DIVISOR = 16  # the only divisibility that Triton compiles for


@dataclass
class Parameters:
    """Types by name, constants and attributes by position, and integers that became constants because they are 1."""

    types: dict[str, str] = field(default_factory=dict)
    constants: dict[tuple[int, ...], Any] = field(default_factory=dict)
    attributes: dict[tuple[int, ...], list[list[Any]]] = field(default_factory=dict)
    folded: dict[str, int] = field(default_factory=dict)


def specialised(
    params: Sequence[Any], given: Mapping[str, Any], constexprs: Mapping[str, Any], backend: Any
) -> Parameters:
    """Specialise the parameters of a kernel, each given by a value or a type."""
    names = [param.name for param in params]
    for name in [*given, *constexprs]:
        if name not in names:
            raise SimulationError(f"the kernel has no parameter {name!r}; it has {', '.join(names)}")
    found = Parameters()
    for i, param in enumerate(params):
        name = param.name
        value = given.get(name, param.default if param.has_default else None)
        constant = isinstance(value, str) and value == "constexpr"
        if name in constexprs or param.is_constexpr or constant:
            if name not in constexprs and (value is None or constant):
                raise SimulationError(f"{name} is constexpr; its value is missing in constexprs")
            found.types[name], found.constants[i,] = "constexpr", constexprs.get(name, value)
            continue
        if value is None:
            raise SimulationError(f"{name} is missing in the signature; give a value or a type such as 'i32'")
        kind, hint = _spelled(value) if isinstance(value, (str, tuple)) else _launched(value, param, backend)
        found.types[name] = kind
        if kind == "constexpr":
            found.constants[i,] = found.folded[name] = 1
        elif hint:
            found.attributes[i,] = backend.parse_attr(hint)
    return found


def _spelled(text: Any) -> tuple[Any, str]:
    """Split a type from its divisor: (type, what is known of the value in Triton's letters)."""
    if isinstance(text, tuple):  # of the parts of a tuple
        return text, ""
    kind, _, divisor = text.partition(":") if not text.startswith("tensordesc") else (text, "", "")
    if not _known(kind):
        raise SimulationError(f"the type {text!r} is not known to Triton; write 'i32', '*fp32' or 'tensordesc<…>'")
    if divisor and not divisor.isdigit():
        raise SimulationError(f"the type {text!r} has no number after its colon; write 'i32:16' or '*fp32:4'")
    if kind.startswith("*"):
        return kind, "DS" if not divisor or int(divisor) % _DIVISOR == 0 else "S"
    if divisor == "1":
        return "constexpr", ""
    return kind, "D" if divisor and int(divisor) % _DIVISOR == 0 else ""


def _known(kind: str) -> bool:
    """Whether Triton knows a type's name; it reads descriptors' when it compiles."""
    from triton.language import str_to_ty

    try:
        return kind.startswith(("tensordesc", "nvTmaDesc")) or str_to_ty(kind, None) is not None
    except (KeyError, IndexError, AttributeError):
        return False


def _launched(value: Any, param: Any, backend: Any) -> tuple[str, str]:
    """Return the same for a value, by Triton's own rules."""
    from triton._C.libtriton import native_specialize_impl

    if isinstance(value, np.ndarray):
        import torch

        value = torch.from_numpy(value)
    value = value.item() if isinstance(value, np.generic) else value
    if not isinstance(value, (bool, int, float)) and not hasattr(value, "data_ptr"):
        example = "'tensordesc<fp16[64, 64], …>'"
        raise SimulationError(f"{param.name} is {of_type(value)}; give its type instead, such as {example}")
    exact, aligned = not param.do_not_specialize, not param.do_not_specialize_on_alignment
    kind, hint = native_specialize_impl(backend, value, param.is_const, exact, aligned)
    if param.annotation_type and kind != "constexpr":
        kind = param.annotation_type
    return kind, hint if isinstance(hint, str) else ""
