"""Runs blocks of linked ops for a role, as generators that stop where the role has to wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..errors import SimulationError, StopRun
from ..ir.module import Block, Op
from .pending import PendingRead, Poisoned, Unusable, poisoned
from .poison import carried, dropped, reduced
from .registry import ACTING, BLOCKING, END, FLOW, JUMP, PLAIN
from .roles import Role, Steps


def run_block(role: Role, block: Block, registers: list[Any]) -> Steps:
    """Run a block; returns the operands of its terminator."""
    while True:
        for op in block.ops:
            kind = op.kind
            try:
                if kind == PLAIN:
                    value = op.run(*[registers[i] for i in op.ins])  # pyright: ignore[reportOptionalCall]
                elif kind == END:
                    return [registers[i] for i in op.ins]
                else:
                    role.op = op
                    if kind == ACTING:
                        role.events.append((role.run.steps, op))
                        value = op.run(role, *[registers[i] for i in op.ins])  # pyright: ignore[reportOptionalCall]
                    else:
                        value = yield from _waiting(role, op, registers)
                    role.run.changes += op.acts
            except PendingRead:
                value = yield from _finish_first(role, op, registers)
                role.run.changes += op.acts
            except (SimulationError, StopRun):
                raise
            except Exception as error:
                raise op.error(f"{type(error).__name__}: {error}") from error
            outs = op.outs
            if len(outs) == 1:
                registers[outs[0]] = value
            elif outs:
                for slot, part in zip(outs, value, strict=True):
                    registers[slot] = part
            elif kind == JUMP:
                block = value
                break
        else:
            return []


def _waiting(role: Role, op: Op, registers: list[Any]) -> Steps:
    assert op.run is not None
    if op.kind in (FLOW, JUMP):
        return (yield from op.run(role, registers))
    assert op.kind == BLOCKING
    role.events.append((role.run.steps, op))
    return (yield from op.run(role, *[registers[i] for i in op.ins]))


def _finish_first(role: Role, op: Op, registers: list[Any]) -> Steps:
    """Handle an op with values that must not be used: carry undefined elements on, or report the use and continue."""
    role.op = op
    place = role.place()
    used = op.ins[:1] if op.kind == JUMP else op.ins  # a branch only uses its condition and passes the rest on
    values = [registers[i] for i in used]
    kept = {i: value for i, value in zip(used, values, strict=True) if isinstance(value, Unusable)}
    if op.kind == PLAIN:
        result = carried(op, values)
        if result is not None:
            return result
    missing = (
        reduced(op, values) if op.name == "tt.reduce" and all(isinstance(v, Poisoned) for v in kept.values()) else None
    )
    quiet = missing is not None or dropped(op, values)
    for i, value in kept.items():
        if not quiet:
            role.run.findings.add(value.finding(place))
        registers[i] = value.value()
    assert op.run is not None
    if op.kind == PLAIN:
        result = op.run(*[registers[i] for i in op.ins])
    elif op.kind == ACTING:
        result = op.run(role, *[registers[i] for i in op.ins])
    else:
        result = yield from _waiting(role, op, registers)
    if quiet:
        for i, value in kept.items():
            registers[i] = value
    if missing is None:
        return result
    return [poisoned(r, missing) for r in result] if len(op.outs) > 1 else poisoned(result, missing)


def hoisted(block: Block, registers: list[Any]) -> Block:
    """Return a block without ops that only compute from its arguments; put their results into the registers."""
    known = set(block.slots)
    ops = []
    for op in block.ops:
        if op.kind == PLAIN and op.meetings is None and known.issuperset(op.ins) and _filled(op, registers):
            known.update(op.outs)
        else:
            ops.append(op)
    return replace(block, ops=ops)


def _filled(op: Op, registers: list[Any]) -> bool:
    """Compute an op early; False if it must run in its place, because it fails or its operands must not be used."""
    assert op.run is not None
    try:
        value = op.run(*[registers[i] for i in op.ins])
    except Exception:
        return False
    parts = [value] if len(op.outs) == 1 else value if op.outs else []
    if any(isinstance(part, Unusable) for part in parts):
        return False
    for slot, part in zip(op.outs, parts, strict=True):
        registers[slot] = part
    return True


def evaluate(block: Block, registers: list[Any], arguments: list[Any]) -> list[Any]:
    """Run a block that only computes, such as the body of a reduction."""
    for slot, value in zip(block.slots, arguments, strict=False):
        registers[slot] = value
    for op in block.ops:
        if op.kind == END:
            return [registers[i] for i in op.ins]
        if op.kind != PLAIN:
            if op.name == "scf.if":
                _branch_free(op, registers)
                continue
            if op.kind == JUMP:
                return _all_blocks(op, registers)
            raise op.error("not allowed in the body of a reduction")
        assert op.run is not None
        value = op.run(*[registers[i] for i in op.ins])
        if len(op.outs) == 1:
            registers[op.outs[0]] = value
        elif op.outs:
            for slot, part in zip(op.outs, value, strict=True):
                registers[slot] = part
    return []


def _all_blocks(op: Op, registers: list[Any]) -> list[Any]:
    """Run branches on whole arrays, from a region's first one on: every block is computed, and each element of the
    results comes from the block that it takes."""
    taken: dict[int, Any] = {}  # block -> for which elements

    def merge(slot: int, value: Any, where: Any, known: bool) -> None:
        registers[slot] = np.where(where, value, registers[slot]) if known else value

    def follow(branch: Op, where: Any) -> None:
        for edge in edges(branch, registers):
            to, block, known = where & edge.taken, id(edge.target), id(edge.target) in taken
            for slot, i in zip(edge.target.slots, edge.ins, strict=True):
                merge(slot, registers[i], to, known)
            taken[block] = taken[block] | to if known else to

    follow(op, np.True_)
    results: list[Any] = []
    for block in op.regions:
        evaluate(replace(block, ops=block.ops[:-1]), registers, [])
        last, where = block.ops[-1], taken[id(block)]
        if last.kind == JUMP:
            follow(last, where)
            continue
        values = [registers[i] for i in last.ins]
        results = [np.where(where, *pair) for pair in zip(values, results, strict=True)] if results else values
    return results


class Edge(NamedTuple):
    """A way out of a block: the next block, the registers that become its arguments, and whether it is taken."""

    target: Block
    ins: Sequence[int]
    taken: Any  # a bool, or one for each element


def edges(branch: Op, registers: list[Any]) -> list[Edge]:
    """List where a branch between blocks may go."""
    first = branch.targets[0]
    if len(branch.targets) == 1:
        return [Edge(first, branch.ins, np.True_)]
    condition, middle = registers[branch.ins[0]], 1 + len(first.slots)
    taken = condition if isinstance(condition, np.ndarray) else np.bool_(condition)
    return [Edge(first, branch.ins[1:middle], taken), Edge(branch.targets[1], branch.ins[middle:], ~taken)]


def _branch_free(op: Op, registers: list[Any]) -> None:
    """Run a branch on a whole array: compute both sides and select per element."""
    condition = registers[op.ins[0]]
    sides = [evaluate(region, registers, []) for region in op.regions]
    if len(sides) < 2:
        raise op.error("a branch without results is not simulated in the body of a map")
    for slot, yes, no in zip(op.outs, sides[0], sides[1], strict=False):
        registers[slot] = np.where(condition, yes, no)
