"""Computes, backwards through the blocks, which bits of which registers LDS addresses depend on: the demand.

A loop counter differs in every round, yet only its lowest bit selects the slot of a ring of two. Machine states that
agree on all demanded bits count as one, so the exploration of a loop ends.

Branches demand their condition only where it is made of constants: "is there a key tile?" is a 0 or a -1 that the
compiler writes in two blocks and tests behind both. Such numbers do not count on, so the exploration still ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from .arithmetic import ALL
from .effects import Effect, effect
from .text import Code, Instruction, literal, registers

ADDRESS = 0x3_FFFF  # LDS has at most 160 KiB
EXEC: tuple[str, ...] = ("exec_lo", "exec_hi")
_TESTED = {"s_cbranch_scc0": ("scc",), "s_cbranch_scc1": ("scc",),
           "s_cbranch_vccz": ("vcc_lo", "vcc_hi"), "s_cbranch_vccnz": ("vcc_lo", "vcc_hi")}  # fmt: skip
# Scalar instructions that make few numbers of a few constants, however often a loop repeats them.
_OF_CONSTANTS = ("s_mov_b", "s_not_b", "s_and_b", "s_or_b", "s_xor_b", "s_andn2_b", "s_orn2_b", "s_cselect_b",
                 "s_cmp_eq_", "s_cmp_lg_")  # fmt: skip

Demand = dict[str, int]


@dataclass(frozen=True)
class Demands:
    """effects[i] of instruction i; results[i]: demanded bits of its results, () if none; entries[b]: at block b.

    conditions[b]: registers that the branch at the end of block b tests, if they are made of constants; else ().
    """

    effects: tuple[Effect, ...]
    results: tuple[tuple[int, ...], ...]
    entries: tuple[Demand, ...]
    conditions: tuple[tuple[str, ...], ...]


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
    conditions = _conditions(code, effects)
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
            wanted |= dict.fromkeys(conditions[index], ALL)
            for i in range(block.last - 1, block.first - 1, -1):
                results[i] = _through(effects[i], wanted)
                address = address_of(code.instructions[i])
                if address:
                    wanted[address] = wanted.get(address, 0) | ADDRESS
            if wanted != entries[index]:
                entries[index] = wanted
                changed = True
    return Demands(effects, tuple(results), tuple(entries), conditions)


def _conditions(code: Code, effects: tuple[Effect, ...]) -> tuple[tuple[str, ...], ...]:
    """Return for each block the registers that its branch tests; () unless they are made of constants on every path."""
    entries: list[set[str] | None] = [None] * len(code.blocks)
    found: list[tuple[str, ...]] = [()] * len(code.blocks)
    entries[0] = set()
    pending = [0]
    while pending:
        index = pending.pop()
        block, constants = code.blocks[index], set(entries[index] or ())
        for i in range(block.first, block.last):
            if _of_constants(code.instructions[i], effects[i], constants):
                constants.update(effects[i].writes)
            else:
                constants.difference_update(effects[i].writes)
        tested = _TESTED.get(code.instructions[block.last - 1].name, ())
        found[index] = tested if constants.issuperset(tested) else ()
        for following in block.following:
            before = entries[following]
            after = constants if before is None else before & constants
            if after != before:
                entries[following] = set(after)
                pending.append(following)
    return tuple(found)


def _of_constants(instruction: Instruction, made: Effect, constants: set[str]) -> bool:
    reads = (operand for operand in made.reads if literal(operand) is None)
    return instruction.name.startswith(_OF_CONSTANTS) and constants.union(EXEC).issuperset(reads)


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
