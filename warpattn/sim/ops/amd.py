"""gfx942 and gfx950: buffer operations, copies straight into shared memory (LDS), and hints for the compiler.

    buffer_load, buffer_store, buffer_atomic   a base address and 32-bit offsets: the same as pointer operations
    buffer_load_to_local                       a copy that lands later; `copies` has its groups and waits
    mfma                                       is tt.dot, whose layouts say which lane holds what and change no value

The unit is the role, so the order among the waves of a workgroup is not modelled. That misses nothing: where waves may
conflict in shared memory (after a wait for copies, between a read and the copy that overwrites it) Triton 3.9 inserts
an s_barrier, for relaxed loads too; tests/sim/amd/test_machine.py looks for them in the machine code.

A buffer operation's only bound is 2 GiB, so an unmasked offset outside of its tensor is reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..ir.formats import encode, register_dtype
from ..ir.module import Op
from ..ir.valuetypes import Type, element_bits, parse_type
from ..machine.registry import TABLE, acting, blocking, plain
from ..memory.global_memory import Toucher
from ..memory.shared import Access, MemDesc
from .memory import load_pointers


def _pointers(kind: Type, shape: tuple[int, ...] | None) -> Type:
    """Return the type of as many pointers as a buffer operation has offsets; `kind` is its base's."""
    return Type("tensor", "ptr", shape, f"pointers of {kind.pointee}", kind.pointee)


def _base(op: Op) -> Type:
    """Return the type of the base pointer, the first or only one that is printed."""
    return parse_type(op.inputs[0].text.partition("[")[0])


def _operands(op: Op) -> tuple[int, bool]:
    """Return the number of operands before `stride = %n`, and whether there is a mask."""
    count = len(op.operands) - (re.search(r"\bstride = %", op.text) is not None)
    return count, re.search(r"\bmask = %", op.text) is not None


def _addresses(base: int, offsets: Any, elem: str) -> np.ndarray:
    return np.asarray(offsets, np.int64) * max(1, element_bits(elem) // 8) + base


def _by_pointer(op: Op, name: str) -> Callable[..., Any]:
    """Return the function of the pointer operation `name`, for this op with a base and offsets."""
    pointers = _pointers(_base(op), op.outputs[0].shape)
    return TABLE[name][1](replace(op, inputs=[pointers]))


@acting("amdg.buffer_load")
def _buffer_load(op: Op) -> Callable[..., Any]:
    elem, load = op.outputs[0].elem, _by_pointer(op, "tt.load")
    count, _ = _operands(op)

    def run(role: Any, base: int, offsets: Any, *rest: Any) -> Any:
        return load(role, _addresses(base, offsets, elem), *rest[: count - 2])

    return run


@acting("amdg.buffer_store")
def _buffer_store(op: Op) -> Callable[..., Any]:
    elem, store = op.outputs[0].elem, _by_pointer(op, "tt.store")
    count, _ = _operands(op)

    def run(role: Any, values: Any, base: int, offsets: Any, *rest: Any) -> None:
        store(role, _addresses(base, offsets, elem), values, *rest[: count - 3])

    return run


@blocking("amdg.buffer_atomic_rmw")
def _buffer_atomic(op: Op) -> Callable[..., Any]:
    elem, update = op.outputs[0].elem, _by_pointer(op, "tt.atomic_rmw")
    count, _ = _operands(op)

    def run(role: Any, values: Any, base: int, offsets: Any, *rest: Any) -> Any:
        return (yield from update(role, _addresses(base, offsets, elem), values, *rest[: count - 3]))

    return run


@blocking("amdg.buffer_atomic_cas")
def _buffer_swap(op: Op) -> Callable[..., Any]:
    elem, swap = op.outputs[0].elem, _by_pointer(op, "tt.atomic_cas")

    def run(role: Any, expected: Any, values: Any, base: int, offsets: Any, *_: Any) -> Any:
        return (yield from swap(role, _addresses(base, offsets, elem), expected, values))

    return run


@blocking("amdg.buffer_load_to_local")
def _copy(op: Op) -> Callable[..., Any]:
    """A copy by buffer loads; where the mask is off it writes `other`, or zero."""
    count, masked = _operands(op)
    base = _base(op)
    elem = parse_type(base.pointee).elem
    kind = Type("tensor", elem, None, f"tensor of {elem}")
    dtype = register_dtype(elem)

    def run(role: Any, pointer: int, offsets: Any, *rest: Any) -> Any:
        yield from role.run.pause()
        view: MemDesc = rest[-1]
        mask = rest[0] if masked else None
        other = rest[1] if masked and count > 4 else None
        addresses = _addresses(pointer, offsets, elem)

        def body(agent: Any) -> None:
            who = Toucher(agent.lane, agent.epoch, agent.clock, agent.place)
            values = load_pointers(role.run.memory, who, kind, addresses, mask, other)
            access = Access(view, agent.lane, agent.epoch, True, False, agent.place)
            view.buffer.write(access, agent.clock, encode(np.asarray(values, dtype), elem))

        role.copies.append(role.issue("copy to LDS", role.program.ordinary, body))

    return run


@plain("amdg.in_thread_transpose")
def _in_thread(op: Op) -> Callable[..., Any]:
    return lambda x: x  # moves elements among the registers of a lane


@plain("amdg.extract_slice")
def _slice(op: Op) -> Callable[..., Any]:
    starts = [int(n) for n in op.text.rpartition("[")[2].partition("]")[0].split(",")]
    shape = op.outputs[0].shape or ()
    chosen = tuple(slice(start, start + n) for start, n in zip(starts, shape, strict=True))
    return lambda x: x[chosen]


@plain("rocdl.sched.barrier", "rocdl.s.setprio", "rocdl.s.barrier")
def _hint(op: Op) -> Callable[..., Any]:
    return lambda *_: None  # orders instructions, or waves of one role: no value depends on it
