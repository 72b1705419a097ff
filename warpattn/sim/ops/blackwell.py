"""sm_100: tensor memory, tcgen05 matrix products, copies and commits, packed arithmetic.

load, store    of a role on tensor memory: Triton waits for them where they stand, so they are ordinary accesses
product, copy  asynchronous; those of a role run in their order on one queue, and only a commit tells of their end
commit         arrives on a barrier when everything that its role issued before has finished
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..agents import Agent
from ..formats import as_register, decode, encode, rounder
from ..ir import Op
from ..registry import blocking, plain, tasked
from ..shared import Access, MemDesc
from ..tensor_memory import TensorBuffer, TensorView, check_capacity
from .hopper import multiplier
from .memory import allocation_name


@tasked("ttng.tmem_alloc")
def _alloc(op: Op) -> Callable[..., Any]:
    kind, name, token = op.outputs[0], allocation_name(op), len(op.results) > 1

    def run(task: Any, value: Any = None) -> Any:
        check_capacity(task.machine.module)
        buffer = TensorBuffer(name, kind, task.machine.module, task.machine.findings)
        view = buffer.view(kind)
        if value is not None:
            buffer.write(task.access(view, True), task.clock, encode(value, kind.elem))
        return (view, None) if token else view

    return run


@plain("ttng.tmem_dealloc", "ttng.tmem_wait")
def _nothing(op: Op) -> Callable[..., Any]:
    return lambda *_: None


@tasked("ttng.tmem_subslice")
def _subslice(op: Op) -> Callable[..., Any]:
    start, dim = op.integer("offset"), op.integer("dim", 1)
    length = (op.outputs[0].shape or ())[dim]
    return lambda task, view: view.sliced(dim, start, length)


@tasked("ttng.tmem_load")
def _load(op: Op) -> Callable[..., Any]:
    """The tile, and with redOp the largest or smallest of each row beside it."""
    elem, reduced = op.outputs[0].elem, len(op.outputs) > 1
    token = len(op.results) > len(op.outputs)
    found = re.search(r"redOp<(\w+)>", op.text)
    largest, propagates = found is not None and found[1] == "max", "NaN = true" in op.text
    absolute = "abs = true" in op.text
    best = {(1, 1): np.maximum, (0, 1): np.minimum, (1, 0): np.fmax, (0, 0): np.fmin}[largest, propagates]

    def run(task: Any, view: TensorView, *_: Any) -> Any:
        value = decode(view.buffer.read(task.access(view, False), task.clock), elem)
        parts = [value] + [None] * token
        if reduced:
            parts.append(best.reduce(np.abs(value) if absolute else value, axis=1))
        return parts if len(parts) > 1 else value

    return run


@tasked("ttng.tmem_store")
def _store(op: Op) -> Callable[..., Any]:
    elem = op.inputs[0].elem

    def run(task: Any, value: Any, view: TensorView, *rest: Any) -> None:
        if rest[-1]:
            view.buffer.write(task.access(view, True), task.clock, encode(value, elem))

    return run


def _issue(task: Any, engine: str, body: Callable[[Agent], None]) -> None:
    """Put work on the role's queue; at the end of the program somebody must know that it is done."""
    agent = task.issue_product(body, engine=engine)
    task.program.loads[agent.lane] = agent


def _commit(task: Any, view: MemDesc) -> None:
    """Arrive on a barrier when everything issued so far is done."""
    barrier = task.barrier(view)
    task.issue_product(lambda agent: barrier.arrive(1, agent.clock, agent.place), engine="tcgen05 commit")


@blocking("ttng.tc_gen5_commit")
def _commit_op(op: Op) -> Callable[..., Any]:
    if re.search(r"\bdescs\b", op.text):
        raise op.error("multicast commits are not simulated")

    def run(task: Any, view: MemDesc, predicate: Any = True) -> Any:
        yield from task.machine.pause()
        if predicate:
            _commit(task, view)

    return run


@blocking("ttng.tmem_copy")
def _copy(op: Op) -> Callable[..., Any]:
    if op.inputs[0].shape != op.inputs[1].shape:
        raise op.error("a copy of scales to tensor memory is not simulated")

    def run(task: Any, source: MemDesc, target: TensorView) -> Any:
        yield from task.machine.pause()

        def body(agent: Agent) -> None:
            bits = source.buffer.read(_asynchronous(source, False, agent), agent.clock).copy()
            target.buffer.write(_asynchronous(target, True, agent), agent.clock, bits)

        _issue(task, "tcgen05 copy", body)

    return run


def _asynchronous(view: Any, writes: bool, agent: Agent) -> Access:
    return Access(view, agent.lane, agent.epoch, writes, True, agent.place)


@blocking("ttng.tc_gen5_mma")
def _mma(op: Op) -> Callable[..., Any]:
    """Operands: A, B, accumulator, [token], whether to add to it, whether to run, (barrier, whether to commit)…"""
    a_kind, b_kind, kind = op.inputs[:3]
    for option in ("two_ctas", "multicast", "is_unsigned"):
        if op.flag(option):
            raise op.error(f"{option} is not simulated")
    token = re.match(r"\s*%\S+ %\S+ %[^\s,\[]+\[%", op.text) is not None
    multiply, narrow = multiplier(a_kind.elem, b_kind.elem, kind.elem), rounder(kind.elem)

    def run(task: Any, a: Any, b: MemDesc, accumulator: TensorView, *rest: Any) -> Any:
        yield from task.machine.pause()
        add, predicate, *barriers = rest[token:]
        if not predicate:
            return

        def body(agent: Agent) -> None:
            left, right = (
                decode(view.buffer.read(_asynchronous(view, False, agent), agent.clock), view.elem) for view in (a, b)
            )
            product, buffer = multiply(left, right), accumulator.buffer
            if add:
                product += decode(buffer.read(_asynchronous(accumulator, False, agent), agent.clock), kind.elem)
            bits = encode(product if narrow is None else narrow(product), kind.elem)
            buffer.write(_asynchronous(accumulator, True, agent), agent.clock, bits)

        _issue(task, "tcgen05 mma", body)
        for barrier, wanted in zip(barriers[::2], barriers[1::2], strict=True):
            if wanted:
                _commit(task, barrier)

    return run


_PACKED: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.fmin, "max": np.fmax,
    "fma": lambda a, b, c: (np.float64(1) * a * b + c).astype(np.float32),
}  # fmt: skip


@plain("ttng.packed_arith")
def _packed(op: Op) -> Callable[..., Any]:
    kind = op.outputs[0]
    if any(x.shape != kind.shape or not x.is_float for x in op.inputs):
        raise op.error("packed arithmetic on 4-bit operands is not simulated")
    function, narrow = _PACKED[op.text.split()[0]], rounder(kind.elem)
    if narrow is None:
        return function
    return lambda *xs: as_register(narrow(function(*xs)), kind)
