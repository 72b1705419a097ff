"""Runs operations that need elements of other CTAs of a cluster: CTAs contribute their parts, all get the whole.

Triton moves elements through the cluster's shared memory, between its own barriers. These do not pass on what a role
knows: a kernel must order its own accesses.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..ir.ctas import Ctas
from ..ir.module import Op
from ..ir.parts import limited
from ..ir.valuetypes import Type
from ..memory.shared import Missing
from .pending import opened, poisoned, used
from .poison import MOVING
from .registry import BLOCKING, FLOW

Steps = Generator[Any, None, Any]


class Whole(NamedTuple):
    """A tensor of all CTAs, and its elements that were never written."""

    value: Any
    missing: Missing | None


def exchange(op: Op) -> None:
    """Let a linked operation run on whole operands."""
    run, ins = op.run, op.ins
    assert run is not None

    def scan(role: Any, registers: list[Any]) -> Steps:
        own = [registers[i] for i in ins]
        whole = yield from _whole(role, op, own, op.inputs)
        for i, each in zip(ins, whole, strict=True):
            registers[i] = each.value
        result = yield from run(role, registers)
        for i, value in zip(ins, own, strict=True):
            registers[i] = value
        return _carried(role, op, whole, result, None)

    def move(role: Any, *values: Any) -> Steps:
        whole = yield from _whole(role, op, values, op.inputs)
        return _carried(role, op, whole, run(*(each.value for each in whole)), run)

    if op.kind == FLOW:
        op.run = scan
    else:
        op.kind, op.run = BLOCKING, move


def update_once(op: Op, text: str) -> None:
    """Let a linked atomic operation update each element once; all CTAs with copies get its result."""
    run, limit = op.run, limited(op, op.inputs[0], once=True)
    assert run is not None and limit is not None and op.ctas is not None
    ctas, kind = op.ctas, op.outputs[0]
    copies = ctas.count - 1 if kind.shape is None else ctas.split(kind).copies
    wanted = len(re.findall(re.escape(op.results[0]) + r"(?![\w#])", text)) > 1

    def update(role: Any, pointers: Any, values: Any, mask: Any = None) -> Steps:
        old = yield from run(role, pointers, values, limit(mask, role.program.cta))
        if not (wanted and copies):
            return old
        (whole,) = yield from _whole(role, op, [old], [kind], copies)
        return whole.value

    op.run = update


def _whole(role: Any, op: Op, values: Sequence[Any], kinds: Sequence[Type], copies: int = 0) -> Steps:
    """Assemble operands from the CTAs' parts; `copies`: CTAs with one of these bits contribute none."""
    assert op.ctas is not None
    program, ctas = role.program, op.ctas
    board: dict[int, list[Any]] = program.cluster.shared(("exchange", op.uid), program.cta, dict)
    board[program.cta] = [opened(value) for value in values]
    yield from program.cluster.meet(role, relaxed=True, where=op.uid)
    owners = [cta for cta in range(ctas.count) if not cta & copies]
    return [_joined(ctas, kind, {cta: board[cta][i] for cta in owners}) for i, kind in enumerate(kinds)]


def _joined(ctas: Ctas, kind: Type, parts: dict[int, Any]) -> Whole:
    """Join the CTAs' parts to a tensor."""
    if kind.shape is None:
        return Whole(*parts[0])
    value, where, fault = np.array(np.broadcast_to(parts[0][0], kind.shape)), np.zeros(kind.shape, np.bool_), None
    for cta, (part, missing) in parts.items():
        own = ctas.split(kind).own(kind.shape, cta)
        value[own] = np.broadcast_to(part, kind.shape)[own]
        if missing is not None:
            fault = missing
            where[own] = np.broadcast_to(missing.where, kind.shape)[own]
    return Whole(value, None if fault is None else fault.at(where))


def _carried(role: Any, op: Op, whole: Sequence[Whole], result: Any, run: Any) -> Any:
    """Mark undefined elements of the result: moves and reductions carry them on; other operations use them."""
    faults = [each.missing for each in whole if each.missing is not None]
    if not faults:
        return result
    masks = [np.zeros(np.shape(each.value), np.bool_) if each.missing is None else each.missing.where for each in whole]
    parts = list(result) if len(op.outs) > 1 else [result]
    if op.name == "tt.reduce":
        found = np.any([mask.any(op.integer("axis")) for mask in masks], 0)
        marks = [found for _ in parts]
    elif op.name in MOVING:
        moved = run(*masks)
        marks = list(moved) if isinstance(moved, tuple) else [moved]
    else:
        role.run.findings.add(used(faults[0], role.place()))
        return result
    parts = [poisoned(part, faults[0].at(mark)) for part, mark in zip(parts, marks, strict=True)]
    return parts if len(op.outs) > 1 else parts[0]


