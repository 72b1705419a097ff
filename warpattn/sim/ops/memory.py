"""Loads, stores and atomics on global memory, and ordinary accesses of shared memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from ..ir.formats import as_register, decode, encode, memory_dtype, register_dtype
from ..ir.module import Op
from ..ir.parts import from_registers, limited, local, to_registers
from ..ir.valuetypes import Type, parse_type
from ..machine.pending import opened, poisoned
from ..machine.registry import acting
from ..memory.global_memory import GlobalMemory, Part, Toucher
from ..memory.shared import MemDesc, SharedBuffer
from ..memory.warps import Touched


def pointee(kind: Type) -> Type:
    """Return the type that loading through a pointer type gives."""
    scalar = parse_type(kind.pointee)
    if kind.kind == "scalar":
        return scalar
    return Type("tensor", scalar.elem, kind.shape, f"tensor of {scalar.elem}", scalar.pointee)


def lanes_of(pointers: Any, mask: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Return addresses as an array, and which of them count (None: all)."""
    addresses = np.asarray(pointers, np.int64)
    if mask is None:
        return addresses, None
    wanted = np.asarray(mask, np.bool_)
    if wanted.shape != addresses.shape:
        wanted = np.broadcast_to(wanted, addresses.shape)
    return addresses, None if np.count_nonzero(wanted) == wanted.size else wanted


def _among_warps(op: Op, size: int) -> Callable[[Any, Any, Any], None]:
    """Return a function that compares an access (pointers, mask) with those of the role's other warps."""
    owners, meetings, writes = op.owners, op.meetings, "store" in op.name
    if owners is None or meetings is None:
        return lambda role, pointers, mask: None

    def check(role: Any, pointers: Any, mask: Any) -> None:
        addresses, wanted = lanes_of(pointers, mask)
        chosen = slice(None) if wanted is None else wanted.reshape(-1)
        of_warps = np.broadcast_to(owners, addresses.shape).reshape(-1)[chosen]
        touched = Touched(addresses.reshape(-1)[chosen], of_warps, size, writes, role.place())
        role.warps.add(role.run.memory, touched, meetings.count)

    return check


@acting("tt.load")
def _load(op: Op) -> Callable[..., Any]:
    kind = pointee(op.inputs[0])
    check = _among_warps(op, kind.itemsize)
    limit = limited(op, op.inputs[0], once=False)
    volatile = op.flag("isVolatile")

    def run(role: Any, pointers: Any, mask: Any = None, other: Any = None) -> Any:
        if limit is not None:
            mask = limit(mask, role.program.cta)
        chance = role.run.rng if volatile else None
        role.run.readings += volatile and role.run.memory.preceded and not role.clock.preceded
        values = load_pointers(role.run.memory, role.toucher(), kind, pointers, mask, other, chance)
        check(role, pointers, mask)
        return values

    return run


def load_pointers(
    memory: GlobalMemory, who: Toucher, kind: Type, pointers: Any, mask: Any, other: Any, chance: Random | None = None
) -> Any:
    """Load the values at addresses; `other`, or 0, where the mask is off or the address belongs to no tensor.

    With `chance`, for a volatile load, elements that the preceding launch may still write are arbitrary, and no race.
    """
    addresses, wanted = lanes_of(pointers, mask)
    chosen = addresses.reshape(-1) if wanted is None else addresses[wanted]
    parts = memory.resolve(chosen, kind.itemsize, who, "reads") if chosen.size else []
    if wanted is None and len(parts) == 1 and parts[0].chosen is None:
        return as_register(_read(memory, parts[0], who, kind, chance).reshape(addresses.shape)[()], kind)
    result = np.empty(addresses.shape, register_dtype(kind.elem))
    result[...] = 0 if other is None else other
    spots = np.ones(addresses.shape, np.bool_) if wanted is None else wanted
    kept = result[spots]
    for part in parts:
        kept[slice(None) if part.chosen is None else part.chosen] = _read(memory, part, who, kind, chance)
    result[spots] = kept
    return as_register(result[()], kind)


def _read(memory: GlobalMemory, part: Part, who: Toucher, kind: Type, chance: Random | None) -> np.ndarray:
    """Read the values of a part; addresses become pointers of this run."""
    buffer, offsets, size = part.buffer, part.offsets, kind.itemsize
    bits, cells = bits_at(buffer, offsets, memory_dtype(kind.elem), size), cells_of(buffer, offsets, size)
    flux = None if chance is None else memory.in_flux(buffer, cells, who)
    if chance is not None and flux is not None:
        bits = _anything(bits, np.asarray(flux.reshape(len(bits), -1).any(1)), chance)
        cells = cells[~flux]
    memory.touch(buffer, cells, who, "read")
    values = decode(bits, kind.elem)
    return memory.pointers(values) if kind.elem == "ptr" else values


def _anything(bits: np.ndarray, where: np.ndarray, chance: Random) -> np.ndarray:
    """Randomly keep bits, or replace them by a small or any number."""
    found = bits.copy()
    for at in np.flatnonzero(where):
        size = chance.choice((0, 7, 8 * bits.itemsize))
        if size:
            found[at : at + 1].view(f"u{bits.itemsize}")[0] = chance.getrandbits(size)
    return found


def bits_at(buffer: Any, offsets: np.ndarray, dtype: Any, size: int) -> np.ndarray:
    """Return the elements at byte offsets of a buffer."""
    if size == 1 or not np.count_nonzero(offsets & (size - 1)):
        return buffer.elements(dtype)[offsets >> (size.bit_length() - 1)]
    return buffer.bytes[offsets[:, None] + np.arange(size)].view(dtype)[:, 0]


def cells_of(buffer: Any, offsets: np.ndarray, size: int) -> np.ndarray:
    """Return the shadow's cells of the elements at byte offsets of a buffer."""
    if size <= buffer.granule:
        return offsets >> (buffer.granule.bit_length() - 1)
    return (offsets[:, None] // buffer.granule + np.arange(size // buffer.granule)).reshape(-1)


@acting("tt.store")
def _store(op: Op) -> Callable[..., Any]:
    kind = pointee(op.inputs[0])
    dtype, size = memory_dtype(kind.elem), kind.itemsize
    words = np.dtype(f"u{size}")  # compared as bits: a NaN is itself
    limit, check = limited(op, op.inputs[0], once=True), _among_warps(op, size)

    def run(role: Any, pointers: Any, values: Any, mask: Any = None) -> None:
        if limit is not None:
            mask = limit(mask, role.program.cta)
        addresses, wanted = lanes_of(pointers, mask)
        bits = encode(np.asarray(values, register_dtype(kind.elem)), kind.elem)
        if bits.shape != addresses.shape:
            bits = np.broadcast_to(bits, addresses.shape)
        if wanted is not None:
            addresses, bits = addresses[wanted], bits[wanted]
        else:
            addresses, bits = addresses.reshape(-1), bits.reshape(-1)
        if not addresses.size:
            return
        who, memory = role.toucher(), role.run.memory
        if kind.elem == "ptr":
            bits = memory.addresses(bits)
        for part in memory.resolve(addresses, size, who, "writes"):
            written = bits if part.chosen is None else bits[part.chosen]
            memory.touch(part.buffer, cells_of(part.buffer, part.offsets, size), who, "write")
            written = np.ascontiguousarray(written).view(dtype)
            _put(part.buffer, part.offsets, written, size)
            lost = bits_at(part.buffer, part.offsets, words, size) != written.view(words)
            if np.count_nonzero(lost):
                memory.report_collision(part, who, lost, size)
        check(role, pointers, mask)

    return run


def _put(buffer: Any, offsets: np.ndarray, bits: np.ndarray, size: int) -> None:
    if not np.count_nonzero(offsets & (size - 1)):
        buffer.elements(bits.dtype)[offsets >> (size.bit_length() - 1)] = bits.reshape(-1)
    else:
        buffer.bytes[offsets[:, None] + np.arange(size)] = bits.reshape(-1, 1).view(np.uint8)


@acting("tt.int_to_ptr", "tt.ptr_to_int")
def _pointer(op: Op) -> Callable[..., Any]:
    """Convert an integer, an address of the caller's memory, to a pointer."""
    kind, to_pointer = op.outputs[0], op.name == "tt.int_to_ptr"

    def run(role: Any, value: Any) -> Any:
        change = role.run.memory.pointers if to_pointer else role.run.memory.addresses
        return as_register(change(np.asarray(value, np.int64))[()], kind)

    return run


@acting("ttg.local_alloc")
def _local_alloc(op: Op) -> Callable[..., Any]:
    kind, source = op.outputs[0], op.inputs[0] if op.operands else None
    name, tile = allocation_name(op), local(op, kind)
    part = None if source is None else from_registers(op, source, kind)

    def run(role: Any, value: Any = None) -> MemDesc:
        view = role.program.cluster.shared(op.uid, role.program.cta, lambda: make(role))
        if part is not None:
            write_part(role, view, value, part, kind.elem)
        return view

    def make(role: Any) -> MemDesc:
        module = role.run.module
        buffer = SharedBuffer(name, tile, module.num_ctas, role.run.findings, op.uid)
        if op.uid in module.first_bytes:
            buffer.settle(module.first_bytes[op.uid], role.program.cluster.buffers)
        return buffer.root(tile)

    return run


def allocation_name(op: Op) -> str:
    """Return the name of an allocation in reports."""
    return op.label or op.results[0].lstrip("%").partition("#")[0]


@acting("ttg.local_dealloc")
def _local_dealloc(op: Op) -> Callable[..., Any]:
    return lambda role, view: None


@acting("ttg.local_load")
def _local_load(op: Op) -> Callable[..., Any]:
    elem, spread = op.outputs[0].elem, to_registers(op, op.outputs[0], op.inputs[0])

    def run(role: Any, view: MemDesc, *_: Any) -> Any:
        bits, missing = view.buffer.read(role.access(view, False), role.clock)
        value = spread(decode(bits, elem), role.program.cta)
        return value if missing is None else poisoned(value, missing.at(spread(missing.where, role.program.cta)))

    return run


@acting("ttg.local_store")
def _local_store(op: Op) -> Callable[..., Any]:
    elem, part = op.inputs[0].elem, from_registers(op, op.inputs[0], [*op.inputs, *op.outputs][1])

    def run(role: Any, value: Any, view: MemDesc) -> None:
        write_part(role, view, value, part, elem)

    return run


def write_part(role: Any, view: Any, value: Any, part: Callable[[Any, int], Any], elem: str) -> None:
    """Store a CTA's part of a register tensor; elements that were never written stay so."""
    value, missing = opened(value)
    cta = role.program.cta
    held = None if missing is None else missing.at(part(missing.where, cta))
    view.buffer.write(role.access(view, True), role.clock, encode(part(value, cta), elem), held)


@acting("ttg.memdesc_index")
def _index(op: Op) -> Callable[..., Any]:
    def run(role: Any, view: MemDesc, i: int) -> MemDesc:
        n = view.shape[0]
        if 0 <= i < n:
            return view.derived(("index", i), lambda a: a[:, i])
        return view.outside(i)

    return run


@acting("ttg.memdesc_subslice")
def _subslice(op: Op) -> Callable[..., Any]:
    found = re.search(r"\[([-\d, ]+)\]", op.text)
    if found is None:
        raise op.error("the offsets of this slice are not understood")
    starts, shape = [int(n) for n in found[1].split(",")], local(op, op.outputs[0]).shape or ()
    before, after = op.inputs[0].shape or (), op.outputs[0].shape or ()
    if any(part != n and n != m for part, n, m in zip(shape, after, before, strict=True)):
        raise op.error("a slice of what is spread over the CTAs is not simulated")
    slices = (slice(None), *(slice(start, start + n) for start, n in zip(starts, shape, strict=False)))
    return lambda role, view: view.derived(("subslice", slices[1:].__repr__()), lambda a: a[slices])


@acting("ttg.memdesc_trans")
def _trans(op: Op) -> Callable[..., Any]:
    order = op.integers("order")
    axes = (0, *(1 + axis for axis in order))
    return lambda role, view: view.derived(("trans", axes), lambda a: a.transpose(axes))


@acting("ttg.memdesc_reshape")
def _reshape(op: Op) -> Callable[..., Any]:
    shape = local(op, op.outputs[0]).shape or ()
    return lambda role, view: view.derived(("reshape", shape), lambda a: a.reshape(a.shape[0], *shape))


@acting("ttg.memdesc_reinterpret")
def _reinterpret(op: Op) -> Callable[..., Any]:
    kind = local(op, op.outputs[0])
    shape, dtype = kind.shape or (), memory_dtype(kind.elem)

    def change(array: np.ndarray) -> np.ndarray:
        return array.reshape(array.shape[0], -1).view(dtype).reshape(array.shape[0], *shape)

    return lambda role, view: view.derived(("reinterpret", kind.text), change, kind.elem)
