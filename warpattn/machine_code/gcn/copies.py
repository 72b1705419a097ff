"""Checks in the final machine code that waves wait for copies to LDS.

A copy to LDS (`buffer_load … lds`) does not signal its end; a wave counts: after `s_waitcnt vmcnt(n)` at most the n
youngest of its memory operations are under way. Copies of other waves have landed after a barrier that follows their
waits.

    copy ──▶ under way ──▶ landed ──▶ seen by all        a ds_read or ds_write of its bytes is right now, not before
               s_waitcnt vmcnt(n)  s_barrier

    ds_read ─▶ under way ──▶ done ──▶ done by all        a copy that overwrites its bytes may be issued now, not before
               s_waitcnt lgkmcnt(n)  s_barrier

The same holds for `ds_write` and `ds_read` of two waves that touch the same bytes.

The check explores every path of the program, loops until nothing new is found: it computes register values that decide
addresses for all lanes of all waves and ignores all others (`demand.py`). A branch goes both ways, unless its condition
is made of constants, and known. docs/kernels/cdna.md says what is proven and what is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from .arithmetic import ALL, Value
from .demand import Demands, address_of, demands
from .footprint import Footprints
from .loads import IN_ORDER
from .summary import wait_of
from .text import LANES, Code, Instruction, literal, read, registers

CHOICES = 3  # most demanded bits of an unknown number that are enumerated; with more it stays unknown
STATES = 20_000
_COUNTED = 64  # vmcnt goes to 63, lgkmcnt to 15


@dataclass(frozen=True)
class Finding:
    """One error. kind: "not awaited", "no barrier", "overwritten", "unordered", "at the end" or "unresolved".

    access: the instruction that touches the bytes of `copy`; the later of two unordered ones; or the kernel's end.
    """

    kind: str
    copy: Instruction
    access: Instruction

    def __str__(self) -> str:
        said = {
            "not awaited": "may be touched before it has landed: no s_waitcnt vmcnt covers it",
            "no barrier": "has landed for its own wave, but other waves touch it with no s_barrier between",
            "overwritten": "may overwrite what a wave has not read yet: no wait and s_barrier between",
            "at the end": "may land when LDS belongs to another workgroup: no s_waitcnt vmcnt covers it",
            "unordered": "and another wave touch the same bytes, with no wait and s_barrier between",
            "unresolved": "may meet an address that could not be computed",
        }[self.kind]
        return f"{_at(self.copy)} {said}; {_at(self.access)}"


class Cover(NamedTuple):
    """The first wait after which a copy is known to have landed.

    most: the largest n of vmcnt(n) with which this would still hold; the wait's own n may be smaller, because of
    another copy or of registers.
    """

    copy: Instruction
    wait: Instruction
    most: int

    def __str__(self) -> str:
        return f"{_at(self.copy)} is covered by the wait in line {self.wait.line}, which may be vmcnt({self.most})"


@dataclass(frozen=True)
class Check:
    """Findings in a kernel with `copies` copies to LDS; `complete` is False if there was too much to explore.

    covers: the waits that copies depend on, by line of the wait; other waits do not matter to copies.
    """

    findings: tuple[Finding, ...]
    copies: int
    states: int
    complete: bool
    covers: tuple[Cover, ...] = ()

    @property
    def proven(self) -> bool:
        """Whether every path was explored and nothing was found."""
        return self.complete and not self.findings


class _Entry(NamedTuple):
    """A copy or access that not all waves know to be finished."""

    touched: int
    index: int  # of the instruction
    younger: int  # operations of its kind after it
    done: bool  # known to its own wave


class _State(NamedTuple):
    registers: dict[str, Value]
    copies: tuple[_Entry, ...] = ()
    accesses: tuple[_Entry, ...] = ()


def check_copies(text: str) -> Check:
    """Check `kernel.asm["amdgcn"]`; in a kernel that writes nothing to LDS there is nothing to find."""
    code = read(text)
    count = sum(instruction.to_lds for instruction in code.instructions)
    if count or any(map(_writes, code.instructions)):
        return _Explorer(code, demands(code)).check(count)
    return Check((), 0, 0, True)


def _writes(instruction: Instruction) -> bool:
    return bool(address_of(instruction)) and not instruction.to_lds and not instruction.name.startswith("ds_read")


class _Explorer:
    def __init__(self, code: Code, wanted: Demands) -> None:
        self.code, self.wanted = code, wanted
        self.waves = max(1, code.stated("max_flat_workgroup_size", LANES) // LANES)
        self.footprints = Footprints(self.waves)
        self.findings: dict[tuple[str, int, int], Finding] = {}
        self.covers: dict[tuple[int, int], int] = {}

    def check(self, copies: int) -> Check:
        pending = [(0, state) for state in self._first()]
        seen = set()
        while pending and len(seen) < STATES:
            index, state = pending.pop()
            state = self._kept(index, state)
            key = (index, self._key(state), state.copies, state.accesses)
            if key not in seen:
                seen.add(key)
                pending.extend(self._block(index, state))
        findings = sorted(self.findings.values(), key=lambda found: (found.copy.line, found.access.line, found.kind))
        return Check(tuple(findings), copies, len(seen), not pending, self._covers())

    def _covers(self) -> tuple[Cover, ...]:
        listed = self.code.instructions
        covers = [Cover(listed[copy], listed[wait], most) for (wait, copy), most in self.covers.items()]
        return tuple(sorted(covers, key=lambda cover: (cover.wait.line, cover.copy.line)))

    def _first(self) -> list[_State]:
        """Return the states at the start: v0 counts the lanes, EXEC is full, scalars are arguments."""
        lanes = np.arange(self.waves * LANES, dtype=np.uint32).reshape(self.waves, LANES)
        full = np.full((self.waves, 1), ALL, np.uint32)
        known = {"v0": lanes, "exec_lo": full, "exec_hi": full}
        entry = self.wanted.entries[0]
        scalars = {name: bits for name, bits in entry.items() if name not in known and name[0] in "sm"}
        return [_State({**known, **chosen}) for chosen in self._choices(scalars)]

    def _choices(self, wanted: dict[str, int]) -> list[dict[str, Value]]:
        """Enumerate the demanded bits of unknown scalars; those with too many stay unknown."""
        options = []
        for name, bits in wanted.items():
            places = [1 << i for i in range(32) if bits >> i & 1]
            if 0 < len(places) <= CHOICES:
                sums = [sum(chosen) for chosen in product(*((0, place) for place in places))]
                options.append([(name, np.full((self.waves, 1), value, np.uint32)) for value in sums])
        return [dict(chosen) for chosen in product(*options)]

    def _kept(self, index: int, state: _State) -> _State:
        """Drop registers on which no later address depends."""
        entry = self.wanted.entries[index]
        return state._replace(registers={name: x for name, x in state.registers.items() if name in entry})

    def _key(self, state: _State) -> frozenset:
        return frozenset((name, x.shape, x.tobytes()) for name, x in state.registers.items())

    def _block(self, index: int, state: _State) -> list[tuple[int, _State]]:
        """Return the states at the end of a block, with the blocks that follow."""
        block = self.code.blocks[index]
        states = [state._replace(registers=dict(state.registers))]
        for i in range(block.first, block.last):
            states = [self._synchronised(i, state) for state in states]
            if self.wanted.results[i]:
                states = [after for state in states for after in self._written(i, state)]
        entries = [self.wanted.entries[following] for following in block.following]
        reached = []
        for state in states:
            reached += [(following, state) for following in self._following(index, state)]
            for name, x in list(state.registers.items()):
                bits = 0
                for entry in entries:
                    bits |= entry.get(name, 0)
                state.registers[name] = x & np.uint32(bits)
        return reached

    def _following(self, index: int, state: _State) -> tuple[int, ...]:
        """Return the blocks that may follow: one of two where all waves know the branch's condition."""
        block = self.code.blocks[index]
        words = [state.registers.get(name) for name in self.wanted.conditions[index]]
        known = [x for x in words if x is not None]
        if not known or len(known) < len(words) or len(block.following) < 2:
            return block.following
        holds = np.any([x != 0 for x in known], axis=0)
        if holds.any() != holds.all():
            return block.following
        branches = self.code.instructions[block.last - 1].name.endswith(("scc1", "vccnz")) == bool(holds.all())
        return block.following[:1] if branches else block.following[1:]

    def _written(self, i: int, state: _State) -> list[_State]:
        """Return the states after an instruction writes registers; several if an unknown value is enumerated."""
        made, wanted = self.wanted.effects[i], self.wanted.results[i]
        values = [self._value(operand, state) for operand in made.reads]
        results = [None] * len(made.writes) if made.run is None else made.run(values)
        partial = self._partial(state)
        unknown: dict[str, int] = {}
        for name, bits, value in zip(made.writes, wanted, results, strict=True):
            old = state.registers.pop(name, None)
            if value is None and made.uniform and bits:
                unknown[name] = bits
            elif value is not None and bits:
                value = self._shaped(name, value) & np.uint32(bits)
                if not (partial and _vector(name) and old is not None and not np.array_equal(old & bits, value)):
                    state.registers[name] = value
        choices = self._choices(unknown)
        return [state._replace(registers={**state.registers, **chosen}) for chosen in choices]

    def _partial(self, state: _State) -> bool:
        return not all(name in state.registers for name in ("exec_lo", "exec_hi"))

    def _value(self, operand: str, state: _State) -> Value | None:
        number = literal(operand)
        if number is not None:
            return np.full((1, 1), number, np.uint32)
        names = registers(operand)
        return state.registers.get(names[0]) if len(names) == 1 else None

    def _shaped(self, name: str, value: Value) -> Value:
        return np.broadcast_to(value, (self.waves, LANES if _vector(name) else 1)).astype(np.uint32)

    def _synchronised(self, i: int, state: _State) -> _State:
        """Apply an instruction to copies and accesses under way; note findings."""
        instruction = self.code.instructions[i]
        name = instruction.name
        if name == "s_barrier":
            left = [tuple(entry for entry in entries if not entry.done) for entries in state[1:]]
            return state._replace(copies=left[0], accesses=left[1])
        if name == "s_endpgm":
            for entry in state.copies:
                if not entry.done:
                    self._note("at the end", entry.index, i)
        if name == "s_waitcnt":
            most = wait_of(instruction, "vmcnt")
            self._cover(i, state.copies, most)
            copies = _waited(state.copies, most)
            return state._replace(copies=copies, accesses=_waited(state.accesses, wait_of(instruction, "lgkmcnt")))
        if name.startswith(IN_ORDER):
            state = state._replace(copies=_aged(state.copies))
            return self._copy(i, instruction, state) if instruction.to_lds else state
        return self._access(i, instruction, state) if name.startswith("ds_") else state

    def _cover(self, i: int, copies: tuple[_Entry, ...], most: int | None) -> None:
        """Note which copies are known to have landed after wait number `i`."""
        for entry in copies:
            if most is not None and not entry.done and entry.younger >= most:
                self.covers[i, entry.index] = min(entry.younger, self.covers.get((i, entry.index), _COUNTED))

    def _copy(self, i: int, instruction: Instruction, state: _State) -> _State:
        touched = self.footprints.of(instruction, state.registers.get("m0"))
        for entry in state.accesses:
            same, other = self.footprints.overlap(touched, entry.touched)
            if (same and not entry.done) or other:
                self._note("overwritten", i, entry.index, touched, entry.touched)
        return state._replace(copies=_with(state.copies, _Entry(touched, i, 0, False)))

    def _access(self, i: int, instruction: Instruction, state: _State) -> _State:
        state = state._replace(accesses=_aged(state.accesses))
        address = address_of(instruction)
        if not address:
            return state
        touched = self.footprints.of(instruction, state.registers.get(address))
        for entry in state.copies:
            same, other = self.footprints.overlap(entry.touched, touched)
            if same and not entry.done:
                self._note("not awaited", entry.index, i, entry.touched, touched)
            elif other:
                self._note("no barrier", entry.index, i, entry.touched, touched)
        for entry in state.accesses:
            if _writes(instruction) or _writes(self.code.instructions[entry.index]):
                _, other = self.footprints.overlap(entry.touched, touched)
                if other:
                    self._note("unordered", entry.index, i, entry.touched, touched)
        return state._replace(accesses=_with(state.accesses, _Entry(touched, i, 0, False)))

    def _note(self, kind: str, copy: int, access: int, *touched: int) -> None:
        kind = "unresolved" if self.footprints.everything in touched else kind
        instructions = self.code.instructions
        self.findings[kind, copy, access] = Finding(kind, instructions[copy], instructions[access])


def _vector(name: str) -> bool:
    """Whether a register holds a number for each lane (vcc holds a bit)."""
    return name[0] in "va" and name[1].isdigit()


def _aged(entries: tuple[_Entry, ...]) -> tuple[_Entry, ...]:
    return tuple(entry if entry.done else entry._replace(younger=min(entry.younger + 1, _COUNTED)) for entry in entries)


def _waited(entries: tuple[_Entry, ...], most: int | None) -> tuple[_Entry, ...]:
    """Mark entries done that have at least `most` younger ones."""
    if most is None:
        return entries
    return _merged([entry._replace(done=True, younger=0) if entry.younger >= most else entry for entry in entries])


def _with(entries: tuple[_Entry, ...], entry: _Entry) -> tuple[_Entry, ...]:
    return _merged([*entries, entry])


def _merged(entries: list[_Entry]) -> tuple[_Entry, ...]:
    """Keep one of equal entries."""
    return tuple(dict.fromkeys(entries))


def _at(instruction: Instruction) -> str:
    place = f" at {instruction.place}" if instruction.place else ""
    return f"{instruction.name} in line {instruction.line}{place}"
