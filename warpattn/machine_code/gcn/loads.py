"""Checks that code waits for loaded registers: a load writes them later, and the hardware does not wait for it.

    s_load_dword s4 ──▶ under way ──▶ s_waitcnt lgkmcnt(0) ──▶ s4 may be read        in any order: only 0 suffices
    ds_read v[8:9]  ──▶ under way ──▶ s_waitcnt lgkmcnt(n) ──▶ n or more of its kind came after it
    buffer_load v5  ──▶ under way ──▶ s_waitcnt vmcnt(n)   ──▶ n or more of its kind came after it

For each register the check tracks the least number of operations of its kind after its load, on any path. The compiler
makes these waits and is trusted; the check shows which of them a kernel depends on: if any wait of a shipped kernel is
loosened by one, this check or `check_copies` reports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .summary import wait_of
from .text import Code, Instruction, read, registers

IN_ORDER = ("buffer_load", "buffer_store", "buffer_atomic", "global_", "scratch_")  # of vmcnt
_SCALAR = ("s_load", "s_buffer_load")
_WITHOUT_RESULT = ("buffer_store", "global_store", "scratch_store", "ds_write", "ds_nop")
_VCC = ("s_cbranch_vcc",)  # reads VCC without naming it


class _Pending(NamedTuple):
    """A register's load that may be under way."""

    counter: str  # "vmcnt" | "lgkmcnt"
    load: int  # number of the instruction
    younger: int  # operations after it that finish after it


_State = dict[str, _Pending]


@dataclass(frozen=True)
class EarlyUse:
    """A register that is read or overwritten while its load may be under way."""

    register: str
    load: Instruction
    use: Instruction

    def __str__(self) -> str:
        return f"{self.register} is used in line {self.use.line}; {self.load.name} in line {self.load.line} loads it"


def check_loads(text: str) -> tuple[EarlyUse, ...]:
    """Return the registers of `kernel.asm["amdgcn"]` that are used too early, in order of use."""
    code = read(text)
    entries: list[_State | None] = [None] * len(code.blocks)
    entries[0] = {}
    found: dict[tuple[int, str], EarlyUse] = {}
    pending = [0]
    while pending:
        index = pending.pop()
        after = _block(code, index, dict(entries[index] or {}), found)
        for following in code.blocks[index].following:
            merged = _merged(entries[following], after)
            if merged != entries[following]:
                entries[following] = merged
                pending.append(following)
    return tuple(found[key] for key in sorted(found))


def _merged(old: _State | None, new: _State) -> _State:
    """Merge two paths: return what may be under way after either."""
    if old is None:
        return dict(new)
    least = {name: min(old[name], new[name], key=lambda x: x.younger) for name in old.keys() & new.keys()}
    return {**old, **new, **least}


def _block(code: Code, index: int, state: _State, found: dict[tuple[int, str], EarlyUse]) -> _State:
    block = code.blocks[index]
    for i in range(block.first, block.last):
        instruction = code.instructions[i]
        if instruction.name == "s_waitcnt":
            state = _waited(state, instruction)
            continue
        counter = counter_of(instruction)
        loaded = _loaded(instruction) if counter else ()
        for name in _named(instruction):
            pending = state.get(name)
            # Loads of one counter finish in order, so one may follow the other into a register.
            if pending is not None and not (name in loaded and pending.counter == counter):
                found[i, name] = EarlyUse(name, code.instructions[pending.load], instruction)
        if counter:
            scalar = instruction.name.startswith(_SCALAR)
            state = state if scalar else _aged(state, counter, code)
            state |= {name: _Pending(counter, i, 0) for name in loaded}
    return state


def counter_of(instruction: Instruction) -> str:
    """Return the counter of s_waitcnt that an operation increments; "" if none."""
    name = instruction.name
    if name.startswith(IN_ORDER):
        return "vmcnt"
    return "lgkmcnt" if name.startswith(("ds_", *_SCALAR)) else ""


def _loaded(instruction: Instruction) -> tuple[str, ...]:
    name = instruction.name
    silent = instruction.to_lds or name.startswith(_WITHOUT_RESULT)
    if silent or ("atomic" in name and "sc0" not in instruction.modifiers.split()):
        return ()
    return registers(instruction.operands[0]) if instruction.operands else ()


def _named(instruction: Instruction) -> tuple[str, ...]:
    """List every register that an instruction reads or writes."""
    names = sum((registers(operand.strip("-|")) for operand in instruction.operands), ())
    return names + registers("vcc") if instruction.name.startswith(_VCC) else names


def _aged(state: _State, counter: str, code: Code) -> _State:
    """Count one more operation under way; scalar loads may finish out of order, so nothing counts as younger."""
    aged = dict(state)
    for name, x in state.items():
        if x.counter == counter and not code.instructions[x.load].name.startswith(_SCALAR):
            aged[name] = x._replace(younger=x.younger + 1)
    return aged


def _waited(state: _State, instruction: Instruction) -> _State:
    for counter in ("vmcnt", "lgkmcnt"):
        most = wait_of(instruction, counter)
        if most is not None:
            state = {name: x for name, x in state.items() if x.counter != counter or x.younger < most}
    return state
