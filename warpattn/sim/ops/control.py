"""Loops, branches, calls, and the split of a program into roles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..ir.formats import decode, memory_dtype
from ..ir.module import Op, walk
from ..machine.interpreter import edges, evaluate, run_block
from ..machine.pending import Unusable
from ..machine.registry import end, flow, jump
from ..memory.shared import MemDesc
from .memory import pointee

_READING = {
    "tt.load", "tt.atomic_load", "tt.atomic_rmw", "tt.atomic_cas", "amdg.buffer_load", "ttg.local_load",
    "ttng.wait_barrier",
}  # fmt: skip
_NUMBERS = (np.ndarray, np.generic, int, float)

end(
    "scf.yield", "scf.condition", "tt.return", "tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return",
    "ttg.warp_return", "ttg.warp_yield", "tt.yield",
)  # fmt: skip


@jump("cf.br", "cf.cond_br")
def _jump(op: Op) -> Callable[..., Any]:
    def run(role: Any, registers: list[Any]) -> Any:
        edge = next(edge for edge in edges(op, registers) if np.all(edge.taken))
        values = [registers[i] for i in edge.ins]
        for slot, value in zip(edge.target.slots, values, strict=True):
            registers[slot] = value
        return edge.target
        yield

    return run


@flow("scf.if")
def _if(op: Op) -> Callable[..., Any]:
    condition, count = op.ins[0], len(op.outs)

    def run(role: Any, registers: list[Any]) -> Any:
        chosen = 0 if bool(np.all(registers[condition])) else 1
        if chosen >= len(op.regions):
            return None
        block = op.regions[chosen]
        if block.blocking:
            values = yield from run_block(role, block, registers)
        else:
            values = evaluate_or_run(role, block, registers)
            if values is None:
                values = yield from run_block(role, block, registers)
        return values[0] if count == 1 else values

    return run


def evaluate_or_run(role: Any, block: Any, registers: list[Any]) -> list[Any] | None:
    """Compute a block that only computes; None if it reads a pending result, which run_block reports."""
    from ..machine.pending import PendingRead

    try:
        return evaluate(block, registers, [])
    except PendingRead:
        return None


@flow("scf.for")
def _for(op: Op) -> Callable[..., Any]:
    low, high, step, *carried = op.ins
    count = len(op.outs)

    def run(role: Any, registers: list[Any]) -> Any:
        body = op.regions[0]
        variable, *slots = body.slots
        values = [registers[i] for i in carried]
        rounds = range(registers[low], registers[high], registers[step])
        role.run.foresee(role, (rounds.stop - rounds.start) // rounds.step)
        for i in rounds:
            role.run.tick()
            registers[variable] = i
            for slot, value in zip(slots, values, strict=False):
                registers[slot] = value
            values = yield from run_block(role, body, registers)
        return values[0] if count == 1 else values

    return run


@flow("scf.while")
def _while(op: Op) -> Callable[..., Any]:
    count, ins = len(op.outs), op.ins

    def run(role: Any, registers: list[Any]) -> Any:
        before, after = op.regions
        begun = values = [registers[i] for i in ins]
        state = role.run.state()
        role.loop = loop = Loop(op, registers, role.loop)
        while True:
            role.run.tick()
            for slot, value in zip(before.slots, values, strict=False):
                registers[slot] = value
            condition, *values = yield from run_block(role, before, registers)
            if not settled(role, op, condition):
                role.loop = loop.around
                return values[0] if count == 1 else values
            for slot, value in zip(after.slots, values, strict=False):
                registers[slot] = value
            last, seen = begun, state
            begun = values = yield from run_block(role, after, registers)
            state = role.run.state()
            loop.still = state if state == seen and all(map(_same, last, values)) else None
            yield None  # the loop may spin until another role writes

    return run


class Loop:
    """The state of a `while` loop that a role repeats."""

    def __init__(self, op: Op, registers: list[Any], around: Loop | None) -> None:
        self.op, self.around, self._registers = op, around, registers
        self.still: tuple[int, int] | None = None  # the state in which a round changed nothing

    def reason(self, role: Any) -> str:
        """Say why it repeats: what it reads, and the value there."""
        reads = [self._read(role, op) for region in self.op.regions for op in walk(region)]
        found = list(dict.fromkeys(read for read in reads if read))
        if not found:
            return "that reads no memory"
        return f"that reads {', '.join(found[:4])}" + (f" and {len(found) - 4} more" if len(found) > 4 else "")

    def _read(self, role: Any, op: Op) -> str:
        """Say what an operation of the loop has read last; empty if it reads no memory or has not run."""
        place = self._registers[op.ins[0]] if op.name in _READING else None
        line = f"line {op.frames[0].line}" if op.frames else "an unknown line"
        if isinstance(place, MemDesc):
            if op.name != "ttng.wait_barrier":
                return f"{place.buffer.name} ({line})"
            barrier = role.barrier(place)
            return f"barrier {barrier.name} ({line}), of which {barrier.phase} phases are complete"
        if place is None or isinstance(place, Unusable):
            return ""
        address, kind = np.asarray(place, np.int64).reshape(-1).item(0), pointee(op.inputs[0])
        buffer = role.run.memory.find(address)
        if buffer is None or not 0 <= address - buffer.base <= buffer.nbytes - kind.itemsize:
            return ""
        if op.name == "amdg.buffer_load":
            return f"{buffer.name} ({line})"
        at = address - buffer.base
        holds = decode(buffer.bytes[at : at + kind.itemsize].view(memory_dtype(kind.elem)), kind.elem)[0]
        return f"byte {at} of {buffer.name} ({line}), which holds {holds}"


def _same(value: Any, other: Any) -> bool:
    """Whether two values of a loop have equal bits; False if unknown."""
    if value is other:
        return True
    if not (isinstance(value, _NUMBERS) and isinstance(other, _NUMBERS)):
        return False
    x, y = np.asarray(value), np.asarray(other)
    return x.dtype == y.dtype and x.shape == y.shape and x.dtype != object and x.tobytes() == y.tobytes()


def settled(role: Any, op: Op, condition: Any) -> Any:
    """Return a loop's condition as a value; reports one that must not be used."""
    if not isinstance(condition, Unusable):
        return condition
    role.op = op
    role.run.findings.add(condition.finding(role.place()))
    return condition.value()


@flow("scf.execute_region")
def _region(op: Op) -> Callable[..., Any]:
    """Run a region once, such as a stage of a pipeline of warps."""
    count = len(op.outs)

    def run(role: Any, registers: list[Any]) -> Any:
        values = yield from run_block(role, op.regions[0], registers)
        return values[0] if count == 1 else values

    return run


@flow("tt.call")
def _call(op: Op) -> Callable[..., Any]:
    name = op.text.partition("@")[2].partition("(")[0].strip('"')
    ins, count = op.ins, len(op.outs)

    def run(role: Any, registers: list[Any]) -> Any:
        block = role.run.module.functions[name]
        frame: list[Any] = [None] * block.frame
        for slot, i in zip(block.slots, ins, strict=False):
            frame[slot] = registers[i]
        values = yield from run_block(role, block, frame)
        return values[0] if count == 1 else values

    return run


@flow("ttg.warp_specialize")
def _warp_specialize(op: Op) -> Callable[..., Any]:
    ins, count = op.ins, len(op.outs)
    own = next(region for region in op.regions if region.label == "default")
    partitions = [region for region in op.regions if region.label != "default"]

    def run(role: Any, registers: list[Any]) -> Any:
        captured = [registers[i] for i in ins]
        values = yield from role.run.specialize(role, own, partitions, captured, registers)
        return values[0] if count == 1 else values

    return run
