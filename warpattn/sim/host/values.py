"""Converts a launch's arguments from Triton's binder for the simulator."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch

from ..arguments import PointerTable, address_of
from ..memory.descriptor import PixelBox, TensorDescriptor

_LEAST_ADDRESS = 1 << 32  # smaller elements of an int64 tensor are no addresses


def simulated_arguments(bound: Mapping[str, Any], signature: Mapping[str, Any]) -> dict[str, Any]:
    """Return the runtime arguments under the simulator's names: parts of tuples as `name.0` or `name.field`."""
    found: dict[str, Any] = {}
    for name, value in bound.items():
        _collect(name, value, signature[name], found)
    return found


def check_addresses(given: Mapping[str, Any]) -> None:
    """Raise SimulationError for a tensor without plain memory among arguments, such as a sparse one."""
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            address_of(value, name)
        elif isinstance(value, tuple):
            check_addresses({f"{name}.{field}": part for field, part in enumerate(value)})


def _collect(name: str, value: Any, kind: Any, found: dict[str, Any]) -> None:
    if isinstance(kind, tuple):
        fields = getattr(value, "_fields", range(len(kind)))
        for field, part, part_kind in zip(fields, value, kind, strict=True):
            _collect(f"{name}.{field}", part, part_kind, found)
    elif kind != "constexpr":
        found[name] = _argument(value)


def _argument(value: Any) -> Any:
    """Convert a value to what `simulate` takes."""
    if hasattr(value, "base") and hasattr(value, "block_shape"):  # a descriptor made on the host
        box, shape, strides = (tuple(part) for part in (value.block_shape, value.shape, value.strides))
        padding, tf32 = getattr(value, "padding", "zero"), getattr(value, "round_f32_to_tf32", False)
        return TensorDescriptor(value.base, box, shape, strides, None, padding, tf32, _pixels(value))
    if isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.uint64) and value.device.type == "cpu":
        reached = pointed_into(value)
        return PointerTable(reached, value) if reached else value
    return value


def _pixels(value: Any) -> PixelBox | None:
    """Return the pixels of a descriptor in im2col mode."""
    if not hasattr(value, "pixel_box_lower_corner"):
        return None
    steps = value.element_strides or (1 for _ in value.shape)
    return PixelBox(tuple(value.pixel_box_lower_corner), tuple(value.pixel_box_upper_corner), tuple(steps))


def pointed_into(table: torch.Tensor) -> list[torch.Tensor]:
    """Return the living tensors whose addresses an int64 tensor holds; none if it holds anything else."""
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
