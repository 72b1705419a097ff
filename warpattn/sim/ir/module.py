"""TTGIR as objects: the text that Triton printed, parsed line by line.

    Module ─ functions ─▶ Function ─ body ─▶ Block ─ ops ─▶ Op ─ regions ─▶ [Block]

A region of several blocks, such as with an early return, is represented by its first block, whose final branch has the
other blocks as regions, each after those that branch to it; every branch knows its targets.

An op keeps its operands' names, its types, its own text (without string literals) and its source lines. Nothing is
interpreted here; `link` later gives every SSA name a slot and every op a function to run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from ..errors import SimulationError
from .ctas import Ctas
from .locations import Frame, Locations
from .placement import may_share, placement
from .valuetypes import Type, parse_type, places_at_top, split_top

_NAME = re.compile(r"%[\w.$-]+(?:#\d+)?")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_LOC = re.compile(r"\s+loc\(")
_OP = re.compile(r'(?:(%[^=]+?) = )?"?([A-Za-z_]\w*(?:\.\w+)+|partition\d+|default)"?')
_ARGUMENT = re.compile(r"(%[\w.$-]+): ")
_LABEL = re.compile(r"\^\w+")
_WAIT = re.compile(  # assembly equal to the operation of the same name, for each warp separately
    r"\{ \.reg \.pred (\w+); (\w+): mbarrier\.try_wait\.parity\.shared::cta\.b64 \1, \[\$0\], \$1; "
    r"@!\1 bra\.uni \2; \}$"
)


@dataclass
class Block:
    """The ops of a region, with the names and types of its arguments."""

    arguments: list[str] = field(default_factory=list)
    types: list[Type] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    label: str = ""  # partition0, default, …
    num_warps: int = 0
    slots: tuple[int, ...] = ()  # of the arguments, filled by linking
    frame: int = 0  # slots of a function or partition, filled by linking
    blocking: bool = True


@dataclass
class Meetings:
    """How often the warps of a role may have met in a barrier, which Triton puts into many operations."""

    count: int = 0
    anyway: int = 0  # without those that `needs_reason` names


@dataclass(eq=False)
class Op:
    """One operation."""

    name: str
    results: list[str]  # one entry per value: %x, or %x#0, %x#1
    operands: list[str]
    text: str  # everything after the name, before the types; string literals replaced by ""
    strings: list[str]
    inputs: list[Type]
    outputs: list[Type]
    frames: tuple[Frame, ...]
    raw: str
    regions: list[Block] = field(default_factory=list)
    targets: tuple[Block, ...] = ()  # of a branch between blocks
    # Filled by linking.
    run: Callable[..., Any] | None = None
    kind: int = 0
    ins: tuple[int, ...] = ()
    outs: tuple[int, ...] = ()
    uid: int = 0
    label: str = ""  # of an allocation: its name in reports
    ctas: Ctas | None = None  # the cluster that the kernel is compiled for, filled by linking
    exchanged: bool = False  # needs elements of other CTAs of the cluster, filled by linking
    in_role: bool = False  # of a cluster's program: inside of warp_specialize
    acts: bool = False  # changes state that a role could see, filled by linking
    owners: Any = None  # of a load or store of global memory: the warp of each element, filled by linking
    meetings: Meetings | None = None  # counts this op, in which the warps of a role may meet, filled by linking

    @property
    def type(self) -> Type:
        """The type of the only result, or of the last operand of an op without results."""
        return self.outputs[0] if self.outputs else self.inputs[-1]

    @property
    def where(self) -> str:
        """`file:line` of the innermost line of Python."""
        return str(self.frames[0]) if self.frames else "an unknown line"

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer attribute."""
        found = re.search(rf"\b{name} = (-?\d+)", self.text)
        if found:
            return int(found[1])
        if default is None:
            raise SimulationError(f"{self.name} at {self.where} has no attribute {name}")
        return default

    def integers(self, name: str) -> list[int]:
        """Return an attribute `name = array<i32: 1, 0>` or `name = [1, 0]`."""
        found = re.search(rf"\b{name} = (?:array<i\d+(?:: ([-\d, ]*))?>|\[([-\d, ]*)\])", self.text)
        return [int(n) for n in (found[1] or found[2] or "").split(",") if n.strip()] if found else []

    def flag(self, name: str) -> bool:
        """Whether a unit or true attribute is there."""
        return re.search(rf"\b{name}\b(?! = false)", self.text) is not None

    def error(self, message: str) -> SimulationError:
        return SimulationError(f"{self.name} at {self.where}: {message}")


@dataclass
class Module:
    """A parsed module; `entry` is its only public function."""

    functions: dict[str, Block]
    entry: str
    target: str
    num_warps: int
    num_ctas: int
    text: str
    parameter_names: dict[str, str]  # %arg0 -> the name in Python
    divisors: dict[str, int]  # %arg0 -> the divisor that the kernel assumes
    folded: Mapping[str, int] = field(default_factory=dict)  # integer parameters that are constants, see `Compiled`

    @cached_property
    def backend(self) -> str:
        return self.target.partition(":")[0]

    @cached_property
    def own_barriers(self) -> int:
        """The number of the compiler's named barriers, from 0 on: one for the first warps, one where roles begin and
        end, and one for each other role."""
        roles = [int(n) for n in re.findall(r"^ *partition(\d+)\(", self.text, re.MULTILINE)]
        return max(roles) + 3 if roles else 1

    @property
    def buffers(self) -> list[Op]:
        """The allocations of shared memory."""
        return [op for block in self.functions.values() for op in walk(block) if op.name == "ttg.local_alloc"]

    @cached_property
    def first_bytes(self) -> Mapping[int, int]:
        """Offsets of buffers in shared memory by the uid of their allocation; none if no two can share bytes, or if
        Triton inlines functions."""
        if not may_share(self.functions[self.entry]):
            return {}
        uids = sorted(op.uid for op in self.buffers)
        found = placement(self.text, self.target).first
        return dict(zip(uids, found, strict=True)) if len(uids) == len(found) else {}


def walk(block: Block) -> Iterator[Op]:
    """Yield the operations of a block and of their regions."""
    for op in block.ops:
        yield op
        for region in op.regions:
            yield from walk(region)


def parse_module(text: str) -> Module:
    """Parse the TTGIR text of one kernel."""
    parser = _Parser(text)
    return parser.module()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.locations = Locations(text)
        self.lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        self.at = 0
        self.count = 0

    def module(self) -> Module:
        header = next((line for line in self.lines if line.startswith("module")), None)
        if header is None:
            raise SimulationError("this is no TTGIR: it has no `module`")
        functions: dict[str, Block] = {}
        entry, names, divisors = "", {}, {}
        while self.at < len(self.lines):
            line = self.lines[self.at]
            self.at += 1
            if not line.startswith("tt.func"):
                continue
            name = re.search(r"@([\w.$-]+|\"[^\"]+\")", line)
            if name is None or not line.endswith("{"):
                continue
            if " private " not in line.partition("(")[0] or not entry:
                entry = name[1]
                names = dict(re.findall(r'(%[\w.$-]+): [^%]*?loc\("([^"]*)"', line))
                found = re.findall(r"(%[\w.$-]+): [^%]*?\btt.divisibility = (\d+)", line)
                divisors = {name: int(divisor) for name, divisor in found}
            functions[name[1]] = self.block(line, "function")
        target = re.search(r'ttg.target = "([^"]*)"', header)
        warps = re.search(r'"ttg.num-warps" = (\d+)', header)
        ctas = re.search(r'"ttg.num-ctas" = (\d+)', header)
        if not functions or target is None or warps is None:
            raise SimulationError(
                "this TTGIR has no function, target or number of warps; give asm['ttgir'] of a kernel"
            )
        num_ctas = int(ctas[1]) if ctas else 1
        return Module(functions, entry, target[1], int(warps[1]), num_ctas, self.text, names, divisors)

    def block(self, header: str, label: str) -> Block:
        """Parse the region after the current line; `header` holds its arguments, if any."""
        first = block = Block(label=label)
        others: dict[str, Block] = {}
        if label != "region":
            self.arguments(block, header)
            warps = re.search(r"num_warps\((\d+)\)", header)
            block.num_warps = int(warps[1]) if warps else 0
        while True:
            line = self.lines[self.at]
            if line.startswith("}"):
                _connect(first, others)
                return first
            self.at += 1
            if line.startswith("^"):
                if block.ops or block.arguments:
                    block = others[_LABEL.findall(line)[0]] = Block(label="region")
                self.arguments(block, line)
            else:
                block.ops.append(self.op(line))

    def arguments(self, block: Block, line: str) -> None:
        for found in _ARGUMENT.finditer(line):
            rest = line[found.end() :]
            end = re.search(r" loc\(| \{|\)$|\) |\)\s*->|, %", rest)
            block.arguments.append(found[1])
            block.types.append(parse_type(_balanced(rest, end.start() if end else len(rest))))

    def op(self, line: str) -> Op:
        found = _OP.match(line)
        if found is None:
            raise SimulationError(f"line {line[:80]!r} of the TTGIR is no operation that is known")
        name = found[2]
        opens = line.endswith("{")
        body = line[found.end() :]
        location = _LOC.search(body) if not opens else None
        frames = self.locations.frames(body[location.end() : -1]) if location else ()
        if location:
            body = body[: location.start()]
        op = _make(name, found[1], body.rstrip("{").rstrip(" ("), frames, line)
        self.count += 1
        op.uid = self.count
        if opens:
            self.regions(op)
        elif name == "ttg.warp_specialize":
            self.partitions(op)
        if not op.frames and op.regions:
            op.frames = next((inner.frames for inner in op.regions[0].ops if inner.frames), ())
        return op

    def regions(self, op: Op) -> None:
        while True:
            op.regions.append(self.block("", "region"))
            line = self.lines[self.at]
            self.at += 1
            if not line.endswith("{"):
                break
        location = _LOC.search(line)
        if location:
            op.frames = self.locations.frames(line[location.end() : -1])
            line = line[: location.start()]
        if line.startswith(("}) :", "}) {")):
            _signature(op, line.partition(" : ")[2])
            op.text += line[2:].partition(" : ")[0]

    def partitions(self, op: Op) -> None:
        while True:
            header = self.lines[self.at]
            self.at += 1
            op.regions.append(self.block(header, header.split("(")[0].split(" ")[0]))
            line = self.lines[self.at]
            if line != "}":
                self.at += 1
                location = _LOC.search(line)
                op.frames = self.locations.frames(line[location.end() : -1]) if location else ()
                return
            self.at += 1


def _connect(first: Block, others: dict[str, Block]) -> None:
    """Give every branch of a region its targets, and the first block's branch all other blocks, each after those that
    branch to it."""
    ordered: list[Block] = []
    begun: list[Block] = []

    def visit(block: Block) -> None:
        begun.append(block)
        branch = block.ops[-1]
        labels = _LABEL.findall(branch.text)
        if not set(labels) <= set(others):
            raise branch.error(f"there is no block {labels[-1]}")
        branch.targets = tuple(others[label] for label in labels)
        for target in branch.targets[::-1]:
            if any(target is each for each in ordered):
                continue
            if any(target is each for each in begun):
                raise branch.error("a loop of branches between blocks is not simulated")
            visit(target)
        ordered.insert(0, block)

    if others:
        visit(first)
        first.ops[-1].regions = ordered[1:]


def _make(name: str, results: str | None, body: str, frames: tuple[Frame, ...], raw: str) -> Op:
    strings: list[str] = []

    def keep(match: re.Match[str]) -> str:
        strings.append(match[1])
        return '""'

    plain = _STRING.sub(keep, body)
    text, types = _split_types(plain)
    if not types and not name.startswith("scf."):  # without operands only the result's type is printed
        text, arrow, after = text.rpartition(" -> ") if " -> " in text else (text, "", "")
        types = arrow + after
    if name.endswith(".inline_asm") and _WAIT.match(strings[0]):
        name = "ttng.wait_barrier"
    if name.endswith(".inline_asm") and "wgmma.mma_async" in strings[0]:
        name = "ttng.warp_group_dot_parts"
    op = Op(name, _results(results), [], text, strings, [], [], frames, raw)
    if name not in ("scf.for", "scf.while"):
        op.operands = _NAME.findall(text)
    _signature(op, types)
    return op


def _results(text: str | None) -> list[str]:
    """Parse the names of results: `%a, %b` or `%a:3`."""
    names: list[str] = []
    for part in split_top(text) if text else ():
        name, _, count = part.partition(":")
        names += [f"{name}#{i}" for i in range(int(count))] if count else [name]
    return names


def _split_types(body: str) -> tuple[str, str]:
    """Split at the last ` : ` outside of brackets."""
    *_, at = -1, *places_at_top(body, " : ")
    return (body, "") if at < 0 else (body[:at], body[at + 3 :])


def _signature(op: Op, text: str) -> None:
    """Parse operand and result types: `A, B -> C`, `(A, B) -> (C, D)`, `A * B -> C`, or `T`."""
    if op.name in ("scf.if", "scf.for", "scf.while", "tt.func"):
        return
    if " to " in text and op.name.startswith(("arith.", "tt.fp_to_fp", "ttng.reinterpret_t", "amdg.extract_")):
        text = text.replace(" to ", " -> ")
    before, arrow, after = _arrow(text)
    op.inputs = list(_types(before))
    op.outputs = list(_types(after)) if arrow else []
    if not arrow and op.results and op.inputs:
        op.outputs = [op.inputs[0 if op.name == "tt.addptr" else -1]] * len(op.results)
    if op.name in ("arith.cmpi", "arith.cmpf"):
        op.outputs = [replace(op.inputs[0], elem="i1")]


def _arrow(text: str) -> tuple[str, bool, str]:
    at = next(places_at_top(text, "->"), -1)
    return (text, False, "") if at < 0 else (text[:at], True, text[at + 2 :])


@lru_cache(1024)
def _types(text: str) -> tuple[Type, ...]:
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return tuple(parse_type(half) for part in split_top(text) for half in split_top(part, "*"))


def _balanced(text: str, end: int) -> str:
    """Return the shortest prefix of at least `end` characters with closed brackets."""
    depth = 0
    for i, char in enumerate(text):
        if depth == 0 and (char in ",)" or text.startswith((" loc(", " {"), i)):
            return text[:i]
        depth += (char in "<([{") - (char in ")]}" or (char == ">" and text[i - 1] != "-"))
    return text[:end]
