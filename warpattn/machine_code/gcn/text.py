"""Parses assembly text into instructions, blocks and metadata.

    .loc 1 48 16      ; attention.py:48:16        source line of the following instructions
    .LBB0_2:                                      a label begins a block
        ds_read_b128 v[34:37], v19 offset:2048    name, operands, modifiers
        s_cbranch_scc1 .LBB0_2                    a branch ends one
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LANES = 64  # of a wave

_LABEL = re.compile(r"^([\w.$]+):")
_LOCATION = re.compile(r"^\.loc\s+\d+\s+(\d+)\s.*?;\s*(.*)$")
_PLACE = re.compile(r"([\w.\-]+\.py):(\d+):\d+")
_ENCODING = re.compile(r"_(e32|e64|dpp|sdwa|e64_dpp)$")
_REGISTERS = re.compile(r"^([vsa])(?:(\d+)|\[(\d+):(\d+)\])$")
_PAIRS = {"vcc": ("vcc_lo", "vcc_hi"), "exec": ("exec_lo", "exec_hi"), "flat_scratch": ("flat_lo", "flat_hi")}
_SINGLE = {"m0", "scc", "vcc_lo", "vcc_hi", "exec_lo", "exec_hi"}


@dataclass(frozen=True)
class Instruction:
    """One instruction: `v_and_b32_e32 v2, 0x3ff, v0` has name v_and_b32, encoding e32 and three operands."""

    name: str
    encoding: str
    operands: tuple[str, ...]
    modifiers: str  # what follows the operands: "offen offset:64 lds"
    place: str  # file and line of the source, innermost first; "" if unknown
    line: int  # of the text, from 1

    @property
    def to_lds(self) -> bool:
        """Whether it copies from memory to LDS, bypassing registers."""
        return "_lds_" in self.name or (self.name.startswith("buffer_load") and "lds" in self.modifiers.split())

    def number(self, modifier: str, default: int = 0) -> int:
        """Return the number of a modifier such as offset:64."""
        found = re.search(rf"\b{modifier}:(0x[0-9a-f]+|-?\d+)", self.modifiers)
        return int(found.group(1), 0) if found else default


@dataclass(frozen=True)
class Block:
    """Instructions `first` to `last` (excluded) that run one after the other, and the blocks that may follow."""

    first: int
    last: int
    following: tuple[int, ...]


@dataclass(frozen=True)
class Code:
    """One kernel: its instructions, their blocks, and its metadata."""

    name: str
    instructions: tuple[Instruction, ...]
    blocks: tuple[Block, ...]
    text: str

    def stated(self, field: str, default: int = 0) -> int:
        """Return a number of the metadata: `.vgpr_count: 64`, `; Occupancy: 8`."""
        found = re.search(rf"^[\s;-]*\.?{re.escape(field)}:\s+(\d+)", self.text, re.MULTILINE)
        return int(found.group(1)) if found else default


def read(text: str) -> Code:
    """Parse the kernel of an assembly text; raises ValueError if there is none."""
    kernel = re.search(r"^\s*\.amdhsa_kernel\s+(\S+)", text, re.MULTILINE)
    if kernel is None:
        raise ValueError(f"text of {len(text)} characters holds no AMD kernel; give kernel.asm['amdgcn']")
    instructions, labels = _instructions(text, kernel.group(1))
    return Code(kernel.group(1), instructions, _blocks(instructions, labels), text)


def _instructions(text: str, kernel: str) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    inside, place = False, ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        label = _LABEL.match(line)
        if label:
            inside = inside or label.group(1) == kernel
            if inside and label.group(1).startswith(".Lfunc_end"):
                break
            labels[label.group(1)] = len(found)
        elif inside and line.startswith(".loc"):
            place = _source(line) or place
        elif inside and line[:1].isalpha():
            found.append(_instruction(line.partition(";")[0].strip(), place, number))
    return tuple(found), labels


def _source(line: str) -> str:
    """Return file:line of a .loc, with its callers; "" for lines that the compiler made."""
    told = _LOCATION.match(line)
    if told is None or told.group(1) == "0":
        return ""
    return " from ".join(f"{file}:{number}" for file, number in _PLACE.findall(told.group(2)))


def _instruction(line: str, place: str, number: int) -> Instruction:
    full, _, rest = line.partition(" ")
    encoding = _ENCODING.search(full)
    operands, modifiers = _operands(rest.strip())
    name = full if encoding is None else full[: encoding.start()]
    return Instruction(name, encoding.group(1) if encoding else "", operands, modifiers, place, number)


def _operands(rest: str) -> tuple[tuple[str, ...], str]:
    """Split operands at commas; words after the last operand are modifiers."""
    parts = [part.strip() for part in re.split(r",(?![^\[]*\])", rest)] if rest else []
    if not parts:
        return (), ""
    last, _, modifiers = parts[-1].partition(" ")
    return (*parts[:-1], last), modifiers.strip()


def registers(operand: str) -> tuple[str, ...]:
    """Return the 32-bit registers of an operand; () for numbers."""
    found = _REGISTERS.match(operand)
    if found is None:
        return _PAIRS.get(operand, (operand,) if operand in _SINGLE else ())
    kind, single, low, high = found.groups()
    numbers = range(int(low), int(high) + 1) if single is None else (int(single),)
    return tuple(f"{kind}{n}" for n in numbers)


def literal(operand: str) -> int | None:
    """Return an integer operand as 32 bits; None for anything else."""
    try:
        return int(operand, 0) & 0xFFFF_FFFF
    except ValueError:
        return None


def _blocks(instructions: tuple[Instruction, ...], labels: dict[str, int]) -> tuple[Block, ...]:
    starts = {0}
    for i, instruction in enumerate(instructions):
        if instruction.name.startswith(("s_branch", "s_cbranch", "s_endpgm", "s_setpc")):
            starts |= {i + 1, *(labels[target] for target in instruction.operands if target in labels)}
    first = sorted(start for start in starts if start < len(instructions))
    index = {start: i for i, start in enumerate(first)}
    blocks = []
    for i, start in enumerate(first):
        last = first[i + 1] if i + 1 < len(first) else len(instructions)
        blocks.append(Block(start, last, _following(instructions[last - 1], i, index, labels)))
    return tuple(blocks)


def _following(last: Instruction, block: int, index: dict[int, int], labels: dict[str, int]) -> tuple[int, ...]:
    after = (block + 1,) if block + 1 < len(index) else ()
    if last.name.startswith(("s_endpgm", "s_setpc")):
        return ()
    if not last.name.startswith(("s_branch", "s_cbranch")):
        return after
    target = index.get(labels.get(last.operands[0], -1))
    if target is None:
        raise ValueError(f"line {last.line} branches to {last.operands[0]}, which is no label of the kernel")
    return (target,) if last.name == "s_branch" else tuple(dict.fromkeys((target, *after)))
