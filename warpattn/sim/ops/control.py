"""Loops, branches, calls, and the split of a program into roles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..ir.module import Op
from ..machine.interpreter import edges, evaluate, run_block
from ..machine.pending import Unusable
from ..machine.registry import end, flow, jump

end(
    "scf.yield", "scf.condition", "tt.return", "tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return",
    "ttg.warp_return", "ttg.warp_yield", "tt.yield",
)  # fmt: skip


@jump("cf.br", "cf.cond_br")
def _jump(op: Op) -> Callable[..., Any]:
    def run(task: Any, registers: list[Any]) -> Any:
        target, ins, _ = next(edge for edge in edges(op, registers) if np.all(edge[2]))
        values = [registers[i] for i in ins]
        for slot, value in zip(target.slots, values, strict=True):
            registers[slot] = value
        return target
        yield

    return run


@flow("scf.if")
def _if(op: Op) -> Callable[..., Any]:
    condition, count = op.ins[0], len(op.outs)

    def run(task: Any, registers: list[Any]) -> Any:
        chosen = 0 if bool(np.all(registers[condition])) else 1
        if chosen >= len(op.regions):
            return None
        block = op.regions[chosen]
        if block.blocking:
            values = yield from run_block(task, block, registers)
        else:
            values = evaluate_or_run(task, block, registers)
            if values is None:
                values = yield from run_block(task, block, registers)
        return values[0] if count == 1 else values

    return run


def evaluate_or_run(task: Any, block: Any, registers: list[Any]) -> list[Any] | None:
    """The results of a block that only computes; None if it reads a pending result, which run_block reports."""
    from ..machine.pending import PendingRead

    try:
        return evaluate(block, registers, [])
    except PendingRead:
        return None


@flow("scf.for")
def _for(op: Op) -> Callable[..., Any]:
    low, high, step, *carried = op.ins
    count = len(op.outs)

    def run(task: Any, registers: list[Any]) -> Any:
        body = op.regions[0]
        variable, *slots = body.slots
        values = [registers[i] for i in carried]
        for i in range(registers[low], registers[high], registers[step]):
            task.machine.tick()
            registers[variable] = i
            for slot, value in zip(slots, values, strict=False):
                registers[slot] = value
            values = yield from run_block(task, body, registers)
        return values[0] if count == 1 else values

    return run


@flow("scf.while")
def _while(op: Op) -> Callable[..., Any]:
    count, ins = len(op.outs), op.ins

    def run(task: Any, registers: list[Any]) -> Any:
        before, after = op.regions
        values = [registers[i] for i in ins]
        while True:
            task.machine.tick()
            for slot, value in zip(before.slots, values, strict=False):
                registers[slot] = value
            condition, *values = yield from run_block(task, before, registers)
            if not settled(task, op, condition):
                return values[0] if count == 1 else values
            for slot, value in zip(after.slots, values, strict=False):
                registers[slot] = value
            values = yield from run_block(task, after, registers)
            yield None  # the loop may spin until another role writes

    return run


def settled(task: Any, op: Op, condition: Any) -> Any:
    """A loop's condition as a value, also of one that must not be used: that is reported."""
    if not isinstance(condition, Unusable):
        return condition
    task.op = op
    task.machine.findings.add(condition.finding(task.place()))
    return condition.value()


@flow("scf.execute_region")
def _region(op: Op) -> Callable[..., Any]:
    """A region that runs once, such as a stage of a pipeline of warps."""
    count = len(op.outs)

    def run(task: Any, registers: list[Any]) -> Any:
        values = yield from run_block(task, op.regions[0], registers)
        return values[0] if count == 1 else values

    return run


@flow("tt.call")
def _call(op: Op) -> Callable[..., Any]:
    name = op.text.partition("@")[2].partition("(")[0].strip('"')
    ins, count = op.ins, len(op.outs)

    def run(task: Any, registers: list[Any]) -> Any:
        block = task.machine.module.functions[name]
        frame: list[Any] = [None] * block.frame
        for slot, i in zip(block.slots, ins, strict=False):
            frame[slot] = registers[i]
        values = yield from run_block(task, block, frame)
        return values[0] if count == 1 else values

    return run


@flow("ttg.warp_specialize")
def _warp_specialize(op: Op) -> Callable[..., Any]:
    ins, count = op.ins, len(op.outs)
    own = next(region for region in op.regions if region.label == "default")
    partitions = [region for region in op.regions if region.label != "default"]

    def run(task: Any, registers: list[Any]) -> Any:
        captured = [registers[i] for i in ins]
        values = yield from task.machine.specialize(task, own, partitions, captured, registers)
        return values[0] if count == 1 else values

    return run
