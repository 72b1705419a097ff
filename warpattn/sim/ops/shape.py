"""Shape operations, which only move elements, and programs' places in the grid."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..ir.formats import as_register, decode, encode, register_dtype
from ..ir.module import Op
from ..ir.parts import to_registers
from ..ir.valuetypes import Type, element_bits
from ..machine.registry import acting, plain
from ..memory.shared import MemDesc


@plain("tt.make_range")
def _make_range(op: Op) -> Callable[..., Any]:
    value = np.arange(op.integer("start"), op.integer("end"), dtype=np.int32)
    return lambda: value


@plain("tt.splat")
def _splat(op: Op) -> Callable[..., Any]:
    shape, dtype = op.type.shape or (), register_dtype(op.type.elem)
    if op.inputs[0].kind == "scalar":
        return lambda x: np.full(shape, x, dtype)
    ones = (1,) * len(shape)  # in the body of a reduction a scalar is an array

    def spread(x: Any) -> np.ndarray:
        many = np.asarray(x, dtype)
        return np.broadcast_to(many.reshape(many.shape + ones), many.shape + shape)

    return spread


@plain("tt.unsplat")
def _unsplat(op: Op) -> Callable[..., Any]:
    """Return the only element; its type is printed as the tensor's, so the shape tells what it is."""
    elem, rank = op.inputs[0].elem, len(op.inputs[0].shape or ())
    scalar = Type("scalar", elem, None, elem)

    def run(x: np.ndarray) -> Any:
        value = x.reshape(*x.shape[: x.ndim - rank], -1)[..., 0]
        return value if value.ndim else as_register(value[()], scalar)

    return run


@plain("tt.expand_dims", "tt.reshape")
def _reshape(op: Op) -> Callable[..., Any]:
    shape, rank = op.outputs[0].shape or (), len(op.inputs[0].shape or ())
    return lambda x: x.reshape(x.shape[: x.ndim - rank] + shape)


@plain("tt.broadcast")
def _broadcast(op: Op) -> Callable[..., Any]:
    shape, rank = op.outputs[0].shape or (), len(op.inputs[0].shape or ())
    return lambda x: np.broadcast_to(x, x.shape[: x.ndim - rank] + shape)


@plain("tt.trans")
def _trans(op: Op) -> Callable[..., Any]:
    order = op.integers("order")

    def transposed(x: np.ndarray) -> np.ndarray:
        first = x.ndim - len(order)
        return x.transpose(*range(first), *(first + axis for axis in order))

    return transposed


@plain("tt.split")
def _split(op: Op) -> Callable[..., Any]:
    return lambda x: (np.ascontiguousarray(x[..., 0]), np.ascontiguousarray(x[..., 1]))


@plain("tt.join")
def _join(op: Op) -> Callable[..., Any]:
    return lambda a, b: np.stack(np.broadcast_arrays(a, b), axis=-1)


@plain("tt.cat")
def _cat(op: Op) -> Callable[..., Any]:
    return lambda a, b: np.concatenate((a, b))


@plain("ttg.convert_layout")
def _convert_layout(op: Op) -> Callable[..., Any]:
    return lambda x: x.reshape(x.shape)  # a layout moves elements between threads, not between indices


@plain("tt.gather")
def _gather(op: Op) -> Callable[..., Any]:
    axis = op.integer("axis")
    return lambda source, index: np.take_along_axis(source, index.astype(np.int64), axis)


@plain("tt.histogram")
def _histogram(op: Op) -> Callable[..., Any]:
    bins = (op.outputs[0].shape or (1,))[0]

    def run(x: Any, mask: Any = None) -> Any:
        kept = x.reshape(-1) if mask is None else x[mask]
        return np.bincount(kept[(kept >= 0) & (kept < bins)], minlength=bins).astype(np.int32)

    return run


@plain("tt.addptr")
def _addptr(op: Op) -> Callable[..., Any]:
    size = max(1, element_bits(op.type.pointee) // 8)
    if op.type.kind == "scalar":
        return lambda pointer, offset: pointer + offset * size
    return lambda pointer, offset: pointer + np.asarray(offset, np.int64) * size


@acting("tt.get_program_id", "tt.get_num_programs")
def _program(op: Op) -> Callable[..., Any]:
    axis = "xyz".index(op.text.split()[0])
    if op.name == "tt.get_program_id":
        return lambda role: role.program.index[axis]
    return lambda role: role.run.grid[axis]


@plain(
    "ttg.barrier",
    "gpu.barrier",
    "llvm.intr.assume",
    "ttg.mask_return",
    "tt.assume",
    "ttng.fence_mbarrier_init_release_cluster",
    "tt.grid_dependency_launch_dependents",
)
def _nothing(op: Op) -> Callable[..., Any]:
    return lambda *_: None  # the warps of a role run in lockstep here


@acting("ttg.local_gather")
def _local_gather(op: Op) -> Callable[..., Any]:
    elem, spread = op.outputs[0].elem, to_registers(op, op.inputs[0], op.inputs[0])
    axis = int(re.findall(r"axis = (\d+)", op.text)[0])

    def run(role: Any, view: MemDesc, index: Any) -> Any:
        bits, _ = view.buffer.read(role.access(view, False), role.clock)
        return np.take_along_axis(spread(decode(bits, elem), role.program.cta), index, axis)

    return run


@acting("ttg.local_scatter")
def _local_scatter(op: Op) -> Callable[..., Any]:
    """Scatter into a tile; the rest of the tile is read and written unchanged."""
    elem, axis = op.inputs[0].elem, int(re.findall(r"axis = (\d+)", op.text)[0])

    def run(role: Any, view: MemDesc, index: Any, value: Any) -> None:
        bits, missing = view.buffer.read(role.access(view, False), role.clock)
        if role.run.module.num_ctas > 1:
            raise op.error("scatters into the shared memory of several CTAs are not simulated")
        bits = bits.copy()
        np.put_along_axis(bits, index, encode(np.broadcast_to(value, index.shape), elem), axis)
        view.buffer.write(role.access(view, True), role.clock, bits, missing)

    return run
