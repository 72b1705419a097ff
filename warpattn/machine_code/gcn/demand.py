"""Computes, backwards through the blocks, which bits of which registers LDS addresses depend on: the demand.

A loop counter differs in every round, yet only its lowest bit selects the slot of a ring of two. Machine states that
agree on all demanded bits count as one, so the exploration of a loop ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from .arithmetic import ALL
from .effects import Effect, effect
from .text import Code, Instruction, registers

ADDRESS = 0x3_FFFF  # LDS has at most 160 KiB
EXEC: tuple[str, ...] = ("exec_lo", "exec_hi")

Demand = dict[str, int]


@dataclass(frozen=True)
class Demands:
    """effects[i] of instruction i; results[i]: demanded bits of its results, () if none; entries[b]: at block b."""

    effects: tuple[Effect, ...]
    results: tuple[tuple[int, ...], ...]
    entries: tuple[Demand, ...]


def address_of(instruction: Instruction) -> str:
    """Return the register with an instruction's LDS address; "" if it does not access LDS."""
    name = instruction.name
    if instruction.to_lds:
        return "m0"
    if name.startswith("ds_read"):
        return instruction.operands[1]
    if name.startswith(("ds_write", "ds_add", "ds_max", "ds_min", "ds_or", "ds_and", "ds_xor")):
        return instruction.operands["_rtn_" in name]
    return ""


def demands(code: Code) -> Demands:
    """Compute the demand at every block's entry and on every instruction's results, to a fixed point."""
    effects = tuple(effect(instruction) for instruction in code.instructions)
    entries: list[Demand] = [{} for _ in code.blocks]
    results: list[tuple[int, ...]] = [()] * len(effects)
    changed = True
    while changed:
        changed = False
        for index in range(len(code.blocks) - 1, -1, -1):
            block = code.blocks[index]
            wanted: Demand = dict.fromkeys(EXEC, ALL)
            for following in block.following:
                for register, bits in entries[following].items():
                    wanted[register] = wanted.get(register, 0) | bits
            for i in range(block.last - 1, block.first - 1, -1):
                results[i] = _through(effects[i], wanted)
                address = address_of(code.instructions[i])
                if address:
                    wanted[address] = wanted.get(address, 0) | ADDRESS
            if wanted != entries[index]:
                entries[index] = wanted
                changed = True
    return Demands(effects, tuple(results), tuple(entries))


def _through(made: Effect, wanted: Demand) -> tuple[int, ...]:
    """Replace the demand on an instruction's results in `wanted` by that on its reads; return the former."""
    bits = [wanted.pop(register, 0) for register in made.writes]
    if not any(bits):
        return ()
    if made.demand is not None:
        for operand, needed in zip(made.reads, made.demand(bits), strict=True):
            for register in registers(operand):
                if needed:
                    wanted[register] = wanted.get(register, 0) | needed
    return tuple(bits)
