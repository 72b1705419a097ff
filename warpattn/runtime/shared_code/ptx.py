"""Parses a kernel's PTX into basic blocks, as far as that is needed to find its loops."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

REGISTER = re.compile(r"%[a-z]+\d+\b")
LABEL = re.compile(r"^(\$L__BB\w+):")
BRANCH = re.compile(r"^(?P<guard>@!?%p\d+\s+)?bra(?:\.uni)?\s+(?P<to>\$L__BB\w+);")
ENDS = re.compile(r"^(?:ret|trap|exit);")
DISPATCH = re.compile(r"^brx\.idx\b")  # of the roles: what a worker's warps run next
NOTE = re.compile(r"^(?:\.loc\b|\$L__tmp\d+:|\.pragma\b)")
DECLARED = re.compile(r"^\s*\.reg \.(\w+)\s+(%[a-z]+)<\d+>;")
END = "$L__func_end0:"  # present with debug information; else the kernel ends with the text


def code(line: str) -> str:
    """Return a line without its comment."""
    return line.split("//", 1)[0].strip()


@dataclass
class Block:
    """A basic block: lines that run one after the other."""

    first: int
    last: int = -1
    targets: list[str] = field(default_factory=list)  # labels that its last line branches to
    falls: bool = True  # whether the next block may follow


@dataclass(frozen=True)
class Loop:
    """Blocks of a cycle that are contiguous in the text, with one entry and one exit."""

    blocks: range
    header: str
    exit: int  # the block after it


class Kernel:
    """A kernel's lines and blocks."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.begin = max((i for i, line in enumerate(self.lines) if DECLARED.match(line)), default=0)  # of the body
        self.blocks = [block for block in self._blocks() if self.instructions(range(block.first, block.last + 1))]
        named = ((self.label(i), i) for i in range(len(self.blocks)))
        self.labels = {label: i for label, i in named if label}
        self.successors = [self._successors(i) for i in range(len(self.blocks))]

    def _blocks(self) -> Iterator[Block]:
        end = self.lines.index(END) if END in self.lines else len(self.lines) - 1 - self.lines[::-1].index("}")
        block = Block(self.begin + 1)
        for i in range(self.begin + 1, end):
            text = code(self.lines[i])
            if LABEL.match(text):
                block.last = i - 1
                yield block
                block = Block(i)
            branch = BRANCH.match(text)
            if branch or DISPATCH.match(text) or ENDS.match(text):
                block.last = i
                block.targets = [branch["to"]] if branch else []
                block.falls = bool(branch and branch["guard"])
                yield block
                block = Block(i + 1)
        block.last = end - 1
        yield block

    def _successors(self, number: int) -> list[int]:
        block = self.blocks[number]
        following = [self.labels[label] for label in block.targets]
        return following + [number + 1] * (block.falls and number + 1 < len(self.blocks))

    def label(self, number: int) -> str:
        """A block's label; empty if it has none."""
        found = LABEL.match(code(self.lines[self.blocks[number].first]))
        return found[1] if found else ""

    def span(self, blocks: range) -> range:
        """The lines of blocks."""
        return range(self.blocks[blocks[0]].first, self.blocks[blocks[-1]].last + 1)

    def instructions(self, lines: Iterable[int]) -> list[str]:
        """Return the instructions among some lines, without debug information."""
        read = (code(self.lines[i]) for i in lines)
        return [text for text in read if text and not NOTE.match(text)]

    @cached_property
    def definitions(self) -> dict[str, list[int]]:
        """The lines that may write a register. If that cannot be told, a line that reads it counts, too."""
        found: dict[str, list[int]] = {}
        for i, line in enumerate(self.lines):
            text = code(line)
            several = text.startswith(("@", "{"))  # a guard, or assembly with more than one instruction
            for register in REGISTER.findall(text) if several else _results(text):
                found.setdefault(register, []).append(i)
        return found

    @cached_property
    def cycles(self) -> list[list[int]]:
        """The cycles of blocks, without the workers' loop over their roles."""
        import networkx

        edges = ((a, b) for a, following in enumerate(self.successors) for b in following)
        parts = (sorted(part) for part in networkx.strongly_connected_components(networkx.DiGraph(edges)))
        return sorted(part for part in parts if part[0] in self.successors[part[-1]] or len(part) > 1)

    def loops(self) -> list[Loop]:
        """Return the cycles that are contiguous in the text and have one entry and one exit."""
        return [loop for part in self.cycles if (loop := self._loop(part))]

    def _loop(self, part: list[int]) -> Loop | None:
        inside, blocks = set(part), range(part[0], part[-1] + 1)
        entries = {b for a, to in enumerate(self.successors) if a not in inside for b in to if b in inside}
        exits = {b for a in part for b in self.successors[a] if b not in inside}
        if len(part) != len(blocks) or len(entries) != 1 or len(exits) != 1:
            return None
        header = self.label(entries.pop())
        return Loop(blocks, header, exits.pop()) if header else None


def _results(text: str) -> set[str]:
    """The registers in an instruction's first operand."""
    first = text.split("}")[0] if "{" in text.split(",")[0] else text.split(",")[0]
    return set(REGISTER.findall(first))
