"""sm_100: tensor memory, tcgen05 matrix products, copies and commits, packed arithmetic.

load, store    of a role on tensor memory: Triton waits for each at once, so they are ordinary accesses
product, copy  asynchronous; a role's run in order on one queue, and only a commit reports their end
commit         arrives on a barrier when all earlier work of its role has finished
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..ir.ctas import group
from ..ir.formats import as_register, decode, encode, rounder
from ..ir.module import Op
from ..ir.parts import barrier_copies, from_registers, local, to_registers
from ..ir.valuetypes import Type
from ..machine.agents import Agent
from ..machine.capacity import check_tensor_memory
from ..machine.pending import poisoned
from ..machine.registry import acting, blocking, plain
from ..machine.sync import Barrier
from ..memory.findings import Finding, Place
from ..memory.shared import Access, MemDesc, Missing, either, of_product
from ..memory.tensor_memory import TensorBuffer, TensorView
from .hopper import multiplier
from .memory import allocation_name, write_part


@acting("ttng.tmem_alloc")
def _alloc(op: Op) -> Callable[..., Any]:
    kind, name, token = op.outputs[0], allocation_name(op), len(op.results) > 1
    tile, part = local(op, kind), from_registers(op, op.inputs[0], kind) if op.operands else None

    def run(role: Any, value: Any = None) -> Any:
        check_tensor_memory(role.run.module)
        view = role.program.cluster.shared(op.uid, role.program.cta, lambda: make(role))
        if part is not None:
            write_part(role, view, value, part, kind.elem)
        return (view, None) if token else view

    def make(role: Any) -> TensorView:
        return TensorBuffer(name, tile, role.run.module, role.run.findings).view(tile)

    return run


@plain("ttng.tmem_dealloc", "ttng.tmem_wait")
def _nothing(op: Op) -> Callable[..., Any]:
    return lambda *_: None


@acting("ttng.tmem_subslice")
def _subslice(op: Op) -> Callable[..., Any]:
    start, dim = op.integer("offset"), op.integer("dim", 1)
    length = (op.outputs[0].shape or ())[dim]
    if (local(op, op.outputs[0]).shape or ())[dim] != length:
        raise op.error("a slice of a tile that is spread over the CTAs is not simulated")
    return lambda role, view: view.sliced(dim, start, length)


@acting("ttng.tmem_load")
def _load(op: Op) -> Callable[..., Any]:
    """Load the tile, and with redOp also the largest or smallest element of each row."""
    elem, reduced = op.outputs[0].elem, len(op.outputs) > 1
    token = len(op.results) > len(op.outputs)
    found = re.search(r"redOp<(\w+)>", op.text)
    largest, propagates = found is not None and found[1] == "max", "NaN = true" in op.text
    absolute = "abs = true" in op.text
    best = {(1, 1): np.maximum, (0, 1): np.minimum, (1, 0): np.fmax, (0, 0): np.fmin}[largest, propagates]

    spread = to_registers(op, op.outputs[0], op.inputs[0])
    if reduced and local(op, op.outputs[0]).shape[1:] != op.outputs[0].shape[1:]:  # pyright: ignore[reportOptionalSubscript]
        raise op.error("a reduction over elements of several CTAs is not simulated")

    def run(role: Any, view: TensorView, *_: Any) -> Any:
        bits, missing = view.buffer.read(role.access(view, False), role.clock)
        value = spread(decode(bits, elem), role.program.cta)
        if missing is not None:
            missing = missing.at(spread(missing.where, role.program.cta))
        parts = [poisoned(value, missing)] + [None] * token
        if reduced:
            row = best.reduce(np.abs(value) if absolute else value, axis=1)
            parts.append(poisoned(row, None if missing is None else missing.at(missing.where.any(1))))
        return parts if len(parts) > 1 else parts[0]

    return run


@acting("ttng.tmem_store")
def _store(op: Op) -> Callable[..., Any]:
    elem, part = op.inputs[0].elem, from_registers(op, op.inputs[0], [*op.inputs, *op.outputs][1])

    def run(role: Any, value: Any, view: TensorView, *rest: Any) -> None:
        if rest[-1]:
            write_part(role, view, value, part, elem)

    return run


def issue(role: Any, engine: str, body: Callable[[Agent], None]) -> None:
    """Put work on the role's queue; the program must wait for its end before it ends."""
    agent = role.issue_product(body, engine=engine)
    role.program.loads[agent.lane] = agent


def commit(role: Any, view: MemDesc, bits: int) -> None:
    """Arrive on the barriers of the CTAs in `bits` when everything issued so far is done."""
    for cta in range(len(view.array)):
        if bits >> cta & 1:
            barrier = role.barrier(view, cta)
            role.issue_product(_arriving(barrier), engine="tcgen05 commit")


def _arriving(barrier: Barrier) -> Callable[[Agent], None]:
    return lambda agent: barrier.arrive(1, agent.clock, agent.place)


def audience_of(op: Op, tiles: list[Type], barriers: list[Type]) -> Callable[[int], int]:
    """Return the CTAs (a bit each) at which a CTA's commit arrives: those that share one of the tiles."""
    if op.ctas is None:
        return lambda cta: 1
    if any(barrier_copies(op, kind) for kind in barriers):
        raise op.error("a commit on a barrier that CTAs share is not simulated")
    pair = int(op.ctas.pairs)
    masks = [op.ctas.split(kind).copies | pair for kind in tiles] or [pair]
    if pair:
        return lambda cta: 0 if cta & 1 else sum({1 << other for mask in masks for other in group(cta, mask)})
    return lambda cta: sum({1 << other for mask in masks for other in group(cta, mask)})


@blocking("ttng.tc_gen5_commit")
def _commit_op(op: Op) -> Callable[..., Any]:
    described = re.search(r"\bdescs\b", op.text) is not None
    audience = audience_of(op, op.inputs[1:] if described else [], op.inputs[:1])

    def run(role: Any, view: MemDesc, predicate: Any = True, *_: Any) -> Any:
        yield from role.run.pause()
        if predicate:
            commit(role, view, audience(role.program.cta))

    return run


@blocking("ttng.tmem_copy")
def _copy(op: Op) -> Callable[..., Any]:
    """Copy each CTA's tile separately; in a pair the first CTA copies both."""
    pair = op.ctas is not None and op.ctas.pairs
    if op.ctas is not None and op.ctas.split(op.inputs[0]) != op.ctas.split(op.inputs[1]):
        raise op.error("a tile that tensor memory spreads over the CTAs otherwise than shared memory is not simulated")

    def run(role: Any, source: MemDesc, target: TensorView) -> Any:
        yield from role.run.pause()
        if pair and role.program.cta & 1:
            return

        def body(agent: Agent) -> None:
            for cta in (agent.cta, agent.cta + 1)[: 1 + pair]:
                bits, missing = source.buffer.read(asynchronous(source, False, agent, cta), agent.clock)
                target.buffer.write(asynchronous(target, True, agent, cta), agent.clock, bits.copy(), missing)

        issue(role, "tcgen05 copy", body)

    return run


def asynchronous(view: Any, writes: bool, agent: Agent, cta: int | None = None) -> Access:
    """Make the access of an asynchronous operation to a tile, of its CTA or another."""
    return Access(view, agent.lane, agent.epoch, writes, True, agent.place, agent.cta if cta is None else cta)


@blocking("ttng.tc_gen5_mma")
def _mma(op: Op) -> Callable[..., Any]:
    """Operands: A, B, accumulator, [token], whether to add to it, whether to run, (barrier, whether to commit)…"""
    a_kind, b_kind, kind = op.inputs[:3]
    if op.flag("is_unsigned"):
        raise op.error("is_unsigned is not simulated")
    pair, audience = _check_pair(op), audience_of(op, [a_kind, b_kind] if op.flag("multicast") else [], op.inputs[3:])
    token = re.match(r"\s*%\S+ %\S+ %[^\s,\[]+\[%", op.text) is not None
    multiply, narrow = multiplier(a_kind.elem, b_kind.elem, kind.elem), rounder(kind.elem)

    def run(role: Any, a: Any, b: MemDesc, accumulator: TensorView, *rest: Any) -> Any:
        yield from role.run.pause()
        add, predicate, *barriers = rest[token:]
        if not predicate or (pair and role.program.cta & 1):
            return

        def read(view: Any, agent: Agent, cta: int) -> tuple[np.ndarray, Missing | None]:
            bits, missing = view.buffer.read(asynchronous(view, False, agent, cta), agent.clock)
            return decode(bits, view.elem), missing

        def body(agent: Agent) -> None:
            ctas = [agent.cta, agent.cta + 1] if pair else [agent.cta]
            right, right_missing = _beside([read(b, agent, cta) for cta in ctas])
            for cta in ctas:
                left, missing = read(a, agent, cta)
                product = multiply(left, right)
                missing = of_product(missing, right_missing, product.shape)
                if add:
                    total, total_missing = read(accumulator, agent, cta)
                    product, missing = product + total, either(missing, total_missing)
                bits = encode(product if narrow is None else narrow(product), kind.elem)
                accumulator.buffer.write(asynchronous(accumulator, True, agent, cta), agent.clock, bits, missing)

        issue(role, "tcgen05 mma", body)
        for barrier, wanted in zip(barriers[::2], barriers[1::2], strict=True):
            if wanted:
                commit(role, barrier, audience(role.program.cta))

    return run


def _beside(parts: list[tuple[np.ndarray, Missing | None]]) -> tuple[np.ndarray, Missing | None]:
    """Concatenate operands, and their missing elements."""
    whole = np.concatenate([values for values, _ in parts], axis=-1)
    faults = [missing for _, missing in parts if missing is not None]
    if not faults:
        return whole, None
    where = [np.zeros(values.shape, np.bool_) if missing is None else missing.where for values, missing in parts]
    return whole, faults[0].at(np.concatenate(where, axis=-1))


def _check_pair(op: Op) -> bool:
    """Whether two CTAs compute the product together: each has half the rows of A and half the columns of B."""
    if op.ctas is None:
        return False
    pair = op.flag("two_ctas")
    a, b, result = (op.ctas.split(kind) for kind in op.inputs[:3])
    halves = (a.bases[0] == (1, 0), b.bases[0] == (0, 1), result.bases[0] == (1, 0))
    fits = result.parts == (a.parts[0], b.parts[1] // (2 if pair else 1)) and a.parts[1] == b.parts[0] == 1
    if pair != op.ctas.pairs or (pair and not all(halves)) or not fits:
        raise op.error("operands that are spread over the CTAs in this way are not simulated")
    return pair


@blocking("ttng.clc_try_cancel")
def _try_cancel(op: Op) -> Callable[..., Any]:
    """Cancel a program that has not started; the answer has its place in the grid. The first CTA of a cluster does it
    for all, and each gets the answer."""

    def run(role: Any, view: MemDesc, bar: MemDesc) -> Any:
        yield from role.run.pause()
        if role.program.cta:
            return
        answer = _Answer(role.run)
        for cta in range(role.program.cluster.count):
            role.issue("TMA load", role.program.pool, _answering(answer, view, cta, role.barrier(bar, cta)))

    return run


class _Answer:
    """The answer to a cancellation, made when the first CTA gets it."""

    def __init__(self, machine: Any) -> None:
        self._machine = machine
        self._bits: np.ndarray | None = None

    def bits(self) -> np.ndarray:
        """Return whether a program was cancelled, and its place in the grid."""
        if self._bits is None:
            index = self._machine.cancel_one()
            x, y, z = index or (0, 0, 0)
            self._bits = np.array([(index is not None) | x << 32, y | z << 32], np.int64)
        return self._bits


def _answering(answer: _Answer, view: MemDesc, cta: int, barrier: Barrier) -> Callable[[Agent], None]:
    def body(agent: Agent) -> None:
        view.buffer.write(asynchronous(view, True, agent, cta), agent.clock, answer.bits().reshape(view.shape))
        barrier.land(view.array[0].nbytes, agent)

    return body


@acting("ttng.clc_load_result")
def _answer(op: Op) -> Callable[..., Any]:
    """Load the answer as one value: both halves as Python ints."""

    def run(role: Any, view: MemDesc) -> Any:
        bits, missing = view.buffer.read(role.access(view, False), role.clock)
        low, high = (int(half) for half in bits.reshape(-1))
        return poisoned((low, high), None if missing is None else missing.at(missing.where.any()))

    return run


@plain("ttng.clc_is_canceled")
def _is_cancelled(op: Op) -> Callable[..., Any]:
    return lambda answer: bool(answer[0] & 1)


@plain("ttng.clc_get_program_id")
def _cancelled_id(op: Op) -> Callable[..., Any]:
    """Return the place of the cancelled program; undefined if none was."""
    half, shift = {"x": (0, 32), "y": (1, 0), "z": (1, 32)}[op.text.rpartition(",")[2].strip()]
    text = f"{op.where} takes a program's place from an answer that has cancelled none"

    def run(answer: tuple[int, int]) -> Any:
        value = answer[half] >> shift & 0x7FFFFFFF
        fault = Finding("UninitialisedRead", text, (Place("", op.frames),))
        return poisoned(value, None if answer[0] & 1 else Missing(np.ones((), np.bool_), fault))

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
