"""A launch's arguments, from Triton's binder to the simulator."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch

from ..arguments import PointerTable
from ..errors import SimulationError
from ..memory.descriptor import TensorDescriptor

_LEAST_ADDRESS = 1 << 32  # smaller numbers of an int64 tensor are taken for numbers


def simulated_arguments(bound: Mapping[str, Any], signature: Mapping[str, Any]) -> dict[str, Any]:
    """The runtime arguments under the simulator's names: parts of tuples as `name.0` or `name.field`."""
    found: dict[str, Any] = {}
    for name, value in bound.items():
        _collect(name, value, signature[name], found)
    return found


def _collect(name: str, value: Any, kind: Any, found: dict[str, Any]) -> None:
    if isinstance(kind, tuple):
        fields = getattr(value, "_fields", range(len(kind)))
        for field, part, part_kind in zip(fields, value, kind, strict=True):
            _collect(f"{name}.{field}", part, part_kind, found)
    elif kind != "constexpr":
        found[name] = _argument(value)


def _argument(value: Any) -> Any:
    """A value as `simulate` takes it."""
    if hasattr(value, "base") and hasattr(value, "block_shape"):  # a descriptor made on the host
        if getattr(value, "padding", "zero") != "zero":
            raise SimulationError(f"a descriptor pads with {value.padding!r}; only padding with zeros is simulated")
        return TensorDescriptor(value.base, tuple(value.block_shape), tuple(value.shape), tuple(value.strides))
    if isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.uint64) and value.device.type == "cpu":
        reached = pointed_into(value)
        return PointerTable(reached, value) if reached else value
    return value


def pointed_into(table: torch.Tensor) -> list[torch.Tensor]:
    """The living tensors that an int64 tensor has addresses of; none if it holds anything else."""
    values = {int(x) for x in table.reshape(-1).tolist()} - {0}
    if not values or min(values) < _LEAST_ADDRESS or len(values) > 1 << 16:
        return []
    found: list[torch.Tensor] = []
    for other in [x for x in gc.get_objects() if type(x) is torch.Tensor or type(x) is torch.nn.Parameter]:
        if other.device.type == "cpu" and other.numel() and other is not table:
            try:
                low = other.data_ptr()
            except RuntimeError:  # a sparse tensor, or one inside of a transform: it has no address
                continue
            inside = {v for v in values if low <= v < low + other.numel() * other.element_size()}
            if inside:
                found.append(other)
                values -= inside
    return [] if values else found
