"""Binds the caller's arguments to parameters: tensors to addresses, descriptors to boxes, numbers to scalars.

Tensors are NumPy arrays or torch CPU tensors with any strides; the kernel reads and writes their own memory. Tensors
that share memory share a buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from .errors import SimulationError, of_type
from .ir.formats import register_dtype, wrap
from .ir.module import Block, Module
from .ir.valuetypes import Type, parse_type
from .memory.descriptor import Descriptor, TensorDescriptor, misaligned
from .memory.findings import many
from .memory.global_memory import GlobalMemory

_ELEMENTS = {
    "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64", "int8": "i8", "uint8": "i8",
    "int16": "i16", "uint16": "i16", "int32": "i32", "uint32": "i32", "int64": "i64", "uint64": "i64", "bool": "i8",
    "float8_e4m3fn": "f8E4M3FN", "float8_e5m2": "f8E5M2", "float8_e4m3fnuz": "f8E4M3FNUZ",
    "float8_e5m2fnuz": "f8E5M2FNUZ",
}  # fmt: skip


@dataclass(frozen=True)
class PointerTable:
    """A table of addresses that a kernel loads and uses as pointers: an argument of type *i64 or *u64.

    tensors: the only memory that a kernel may reach through the table. table: the addresses as an int64 array or
    tensor; by default those of the tensors' first elements, in order.
    """

    tensors: Sequence[Any]
    table: Any = None

    def addresses(self) -> Any:
        """The table that the kernel reads."""
        if self.table is not None:
            return self.table
        return np.array([memory_of(tensor, f"tensors[{i}]").address for i, tensor in enumerate(self.tensors)])


@dataclass(frozen=True)
class Memory:
    """A tensor's memory: address of element 0, first byte, one past the last, element, shape and strides."""

    address: int
    low: int
    high: int
    elem: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    itemsize: int


def memory_of(tensor: Any, name: str) -> Memory:
    """Return the memory of a NumPy array or a torch CPU tensor."""
    if isinstance(tensor, np.ndarray):
        address, itemsize = tensor.__array_interface__["data"][0], tensor.itemsize
        strides, dtype = tuple(s // itemsize for s in tensor.strides), str(tensor.dtype)
        if not tensor.flags.writeable:
            raise SimulationError(f"{name} is a read-only array; pass a copy")
    elif hasattr(tensor, "data_ptr"):
        if tensor.device.type != "cpu":
            raise SimulationError(f"{name} is on {tensor.device}; the simulator takes CPU tensors")
        address, itemsize = address_of(tensor, name), tensor.element_size()
        strides, dtype = tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch.")
    else:
        raise SimulationError(f"{name} is {of_type(tensor)}; a NumPy array or torch CPU tensor is needed")
    if dtype not in _ELEMENTS:
        raise SimulationError(f"{name} has dtype {dtype}, which the simulator does not know")
    shape = tuple(tensor.shape)
    spans = [(n - 1) * s * itemsize for n, s in zip(shape, strides, strict=False)] if 0 not in shape else [0]
    low = address + sum(min(0, s) for s in spans)
    high = address + sum(max(0, s) for s in spans) + (itemsize if 0 not in shape else 0)
    return Memory(address, low, high, _ELEMENTS[dtype], shape, strides, itemsize)


def address_of(tensor: Any, name: str) -> int:
    """Return the address of a torch tensor's first element."""
    try:
        found = tensor.data_ptr()
        tensor.stride()
    except RuntimeError:
        text = f"{name} is {of_type(tensor)} of layout {tensor.layout} without plain memory"
        raise SimulationError(f"{text}; the simulator takes dense tensors") from None
    return found


def bind(module: Module, memory: GlobalMemory, args: Mapping[str, Any]) -> list[Any]:
    """Return values for the parameters of the kernel, in order."""
    block = module.functions[module.entry]
    names = [module.parameter_names.get(name, name.lstrip("%")) for name in block.arguments]
    flat = _flattened(args, names, block)
    tables = [(name, value) for name, value in flat.items() if isinstance(value, PointerTable)]
    flat |= {name: value.addresses() for name, value in tables}
    memory.owners.append(flat)
    tensors: dict[str, Memory] = {}
    for name, kind in zip(names, block.types, strict=False):
        value = flat.get(name)
        if kind.kind == "desc":
            tensor = value.tensor if isinstance(value, TensorDescriptor) else value
            tensors[name] = memory_of(tensor, name)
        elif kind.elem == "ptr" and value is not None:
            tensors[name] = _pointee_memory(value, name)
    reached = {f"{name}[{i}]": tensor for name, value in tables for i, tensor in enumerate(value.tensors)}
    addresses = _place(memory, tensors | {name: memory_of(tensor, name) for name, tensor in reached.items()})
    _check_divisors(
        {module.parameter_names.get(n, n.lstrip("%")): d for n, d in module.divisors.items()}, flat, tensors
    )
    values = []
    for name, kind in zip(names, block.types, strict=False):
        if kind.kind == "desc":
            _check_box(name, flat[name], kind)
            made = _describe(memory, name, _viewed(flat[name], tensors[name]), addresses[name], kind)
            values.append(_with_options(made, name, flat[name]))
        elif kind.elem == "ptr":
            values.append(_pointer(name, kind, tensors.get(name), addresses.get(name, 0)))
        else:
            values.append(_scalar(name, kind, flat[name]))
    return values


def _check_divisors(divisors: Mapping[str, int], flat: Mapping[str, Any], tensors: Mapping[str, Memory]) -> None:
    """Refuse arguments that the kernel was not compiled for."""
    for name, divisor in divisors.items():
        value = tensors[name].address if name in tensors else flat.get(name)
        if isinstance(value, (int, np.integer)) and value % divisor:
            what, remedy = ("address", "'*fp32:4'") if name in tensors else ("value", "'i32'")
            raise SimulationError(
                f"{name} has {what} {value}, and the kernel was compiled for multiples of {divisor}; "
                f"compile_for takes it as an example, or {remedy} for any"
            )


def without_folded(args: Mapping[str, Any], folded: Mapping[str, int]) -> Mapping[str, Any]:
    """Return the arguments without those that are constants in the compiled kernel."""
    for name, constant in folded.items():
        if name in args and args[name] != constant:
            raise SimulationError(f"{name} is {args[name]}, and the kernel was compiled for {constant}")
    return {name: value for name, value in args.items() if name not in folded}


def _pointee_memory(value: Any, name: str) -> Memory:
    if isinstance(value, (int, np.integer)):
        raise SimulationError(
            f"{name} is {value}; for a pointer the simulator takes a tensor, or None for a null pointer"
        )
    return memory_of(value, name)


def mark_preceding_writes(memory: GlobalMemory, tensors: Sequence[Any]) -> None:
    """Record every element of tensors, or of parts of them, as written by the preceding launch."""
    for number, tensor in enumerate(tensors):
        found = memory_of(tensor, f"running[{number}]")
        inside = [b for b in memory.buffers if b.address <= found.low and found.high <= b.address + b.nbytes]
        if not inside:
            raise SimulationError(f"running[{number}] is no part of an argument")
        at = np.asarray(found.address - inside[0].address)
        for size, stride in zip(found.shape, found.strides, strict=True):
            at = np.expand_dims(at, -1) + np.arange(size) * (stride * found.itemsize)
        touched = np.expand_dims(at, -1) + np.arange(found.itemsize)
        memory.mark_preceding_writes(inside[0], np.unique(touched // inside[0].granule))


def _flattened(args: Mapping[str, Any], names: Sequence[str], block: Block) -> dict[str, Any]:
    """Return arguments by parameter: tuples become `name.0`, `name.1`, … or `name.field`; descriptors add their shapes
    and strides."""
    flat: dict[str, Any] = {}
    for name, value in args.items():
        _flatten(name, value, names, flat)
    kinds = dict(zip(names, block.types, strict=False))
    for name, value in list(flat.items()):
        kind = kinds.get(name)
        if kind is not None and kind.kind == "desc":
            found = _viewed(value, memory_of(value.tensor if isinstance(value, TensorDescriptor) else value, name))
            rank = len(kind.shape or ())
            if len(found.shape) != rank and not kind.of_pixels:
                raise SimulationError(f"{name} has shape {found.shape}; its descriptor has {many(rank, 'dimension')}")
            flat.update(_sizes_of(name, found))
        elif kind is not None and kind.elem == "ptr" and isinstance(value, TensorDescriptor):
            # For AMD, Triton splits a descriptor of the host into separate arguments.
            if f"{name}.padding" not in names:
                raise SimulationError(f"{name} is a descriptor; the kernel was compiled for a pointer")
            flat.update(_sizes_of(name, _viewed(value, memory_of(value.tensor, name))))
            flat |= {name: value.tensor, f"{name}.padding": value.padding == "nan",
                     f"{name}.roundF32ToTF32": value.tf32}  # fmt: skip
    derived = {f"{name}.{part}.{i}" for name in kinds for part in ("shape", "stride") for i in range(6)}
    unknown = sorted(name for name in flat if name not in names and name not in derived)
    if unknown:
        raise SimulationError(f"the kernel has no parameter {unknown[0]!r}; it has {', '.join(_roots(names))}")
    missing = [name for name in names if name not in flat]
    if missing:
        raise SimulationError(f"the argument {missing[0]!r} is missing; the kernel takes {', '.join(_roots(names))}")
    return flat


def _sizes_of(name: str, found: Memory) -> dict[str, int]:
    """Return the arguments that a descriptor adds."""
    shape = {f"{name}.shape.{i}": n for i, n in enumerate(found.shape)}
    return shape | {f"{name}.stride.{i}": s for i, s in enumerate(found.strides)}


def _flatten(name: str, value: Any, names: Sequence[str], flat: dict[str, Any]) -> None:
    known = name in names
    if isinstance(value, (tuple, list)) and not known and not isinstance(value, TensorDescriptor):
        for field, part in zip(getattr(value, "_fields", range(len(value))), value, strict=True):
            _flatten(f"{name}.{field}", part, names, flat)
    else:
        flat[name] = TensorDescriptor(*value) if known and isinstance(value, tuple) else value


def _roots(names: Sequence[str]) -> list[str]:
    """Return the parameters' names in Python."""
    return list(dict.fromkeys(name.split(".")[0] for name in names))


def _place(memory: GlobalMemory, tensors: Mapping[str, Memory]) -> dict[str, int]:
    """Make a buffer for every range of memory that tensors cover; return each tensor's address in it."""
    groups: list[tuple[int, int, list[str]]] = []
    for name in sorted(tensors, key=lambda n: tensors[n].low):
        low, high = tensors[name].low, tensors[name].high
        if groups and low < groups[-1][1]:
            groups[-1] = (groups[-1][0], max(high, groups[-1][1]), [*groups[-1][2], name])
        else:
            groups.append((low, high, [name]))
    addresses = {}
    for low, high, members in groups:
        granule = min(tensors[name].itemsize for name in members)
        buffer = memory.add(" and ".join(members), low, high - low, granule)
        addresses.update({name: buffer.base + tensors[name].address - low for name in members})
    return addresses


def _viewed(value: Any, found: Memory) -> Memory:
    """The memory of a tensor in the shape and strides that its descriptor gives it."""
    if not isinstance(value, TensorDescriptor):
        return found
    return replace(found, shape=value.shape or found.shape, strides=value.strides or found.strides)


def _check_box(name: str, value: Any, kind: Type) -> None:
    box, copied = (value.box, value.copied) if isinstance(value, TensorDescriptor) else (None, None)
    if box is not None and tuple(box) != kind.shape:
        raise SimulationError(f"{name} has a box of {tuple(box)}; the kernel was compiled for {kind.shape}")
    if copied is not None and (not kind.shape or copied[-1] != kind.shape[-1] or prod(copied) > prod(kind.shape)):
        raise SimulationError(f"{name} copies boxes of {copied}, which are no first rows of {kind.shape}")


def _describe(memory: GlobalMemory, name: str, found: Memory, address: int, kind: Type) -> Descriptor:
    if found.elem != kind.elem:
        raise SimulationError(f"{name} has elements {found.elem}; the kernel was compiled for {kind.elem}")
    if found.shape and found.strides[-1] != 1 and found.shape[-1] > 1:
        raise SimulationError(f"{name} has strides {found.strides}; the last one of a descriptor's tensor must be 1")
    fault = misaligned(found.address, found.strides, found.itemsize)
    if fault:
        raise SimulationError(f"the descriptor of {name} has {fault}")
    buffer = memory.find(address)
    assert buffer is not None
    return Descriptor(buffer, address - buffer.base, found.shape, found.strides, kind)


def _with_options(made: Descriptor, name: str, value: Any) -> Descriptor:
    """Apply the caller's options to a descriptor."""
    given = value if isinstance(value, TensorDescriptor) else TensorDescriptor(value)
    if made.kind.of_pixels != (given.pixels is not None):
        raise SimulationError(f"{name} is {'' if given.pixels else 'not '}in im2col mode, unlike what the kernel takes")
    made.tf32, made.pixels = given.tf32, given.pixels
    made.outside = made.outside_of(given.padding == "nan")
    made.box = given.copied or made.box
    return made


def _pointer(name: str, kind: Type, found: Memory | None, address: int) -> int:
    pointee = parse_type(kind.pointee)
    if found is not None and found.elem != pointee.elem and not (pointee.elem == "i1" and found.elem == "i8"):
        raise SimulationError(f"{name} has elements {found.elem}; the kernel was compiled for a pointer to {pointee}")
    return address


def _scalar(name: str, kind: Type, value: Any) -> Any:
    if isinstance(value, (np.generic, bool, int, float)):
        if kind.is_float:
            return register_dtype(kind.elem)(value)
        if not np.isfinite(value) or float(value) != int(value):
            raise SimulationError(f"{name} is {value!r}; the kernel takes an integer ({kind})")
        if not -(1 << (kind.bits - 1)) <= int(value) < 1 << kind.bits:
            raise SimulationError(f"{name} is {value}, which does not fit into {kind}")
        return bool(value) if kind.elem == "i1" else wrap(int(value), kind.bits)
    raise SimulationError(f"{name} is {of_type(value)}; the kernel takes a number ({kind})")
