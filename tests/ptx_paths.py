"""What a role of a kernel does, told from its PTX: the same for two texts of one kernel, whatever they call things.

A run keeps a number for each register, made of the instruction that wrote it and of the numbers that it read. Branches
go by the number of their predicate, so two runs with the same numbers take the same ways; what an instruction does to
memory, barriers or the tensor core is an event, with the numbers of its operands.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator

from warpattn.runtime.shared_code.ptx import DECLARED, END, NOTE, code

REGISTER = re.compile(r"%[a-z_]+\d*\b")
BRANCH = re.compile(r"^(?:@(?P<not>!?)(?P<guard>%\w+)\s+)?bra(?:\.uni)?\s+(?P<to>\$L__\w+);")
INSTRUCTION = re.compile(r"^(?:@!?(?P<guard>%\w+)\s+)?(?P<name>[\w.:]+)\s*(?P<operands>[^;]*);")
FIRST = re.compile(r"^(\{[^}]*\}|[^,]*),?(.*)$", re.S)
NOTHING_WRITTEN = re.compile(
    r"^(?:st|red|bar|barrier|mbarrier|cp|fence|membar|setmaxnreg|prefetch|griddepcontrol|wgmma\.(?:fence|commit|wait))\b"
)
ACTS = re.compile(NOTHING_WRITTEN.pattern + r"|^(?:ld\.(?!param)|atom|wgmma)")
SUMS = re.compile(r"^wgmma\.mma\S+ \{[^}]*\}, (?:\{[^}]*\}|%\w+), %\w+, (?!0,)")  # reads what it writes
LOCAL = re.compile(r"\.reg \.\w+ ([a-z]\w*(?:, [a-z]\w*)*);")
PLAIN = {"%tid", "%ctaid", "%nctaid"}  # read-only
SHARED = "$L__shared_role:"  # where roles enter the code that they share
STEPS = 40_000  # instructions of a run at most


class Run:
    """A run of one role: number `role` of those that the workers' dispatch names, or -1 for the first warps. With
    `alone` its events are those of the code that roles share."""

    def __init__(self, ptx: str, role: int, seed: int, alone: bool = False) -> None:
        lines = ptx[: ptx.index(END)].splitlines()
        lines = lines[1 + max(i for i, line in enumerate(lines) if DECLARED.match(line)) :]
        self.texts = [text for line in _with_local_registers(lines) for text in _split(line)]
        self.labels = {x[1]: i for i, text in enumerate(self.texts) if (x := re.match(r"^(\$L__\w+):", text))}
        table = re.search(r"\.branchtargets\s+([^;]*);", ptx)
        assert table
        self.targets = re.findall(r"\$L__\w+", table[1])
        self.role, self.seed, self.alone = role, seed, alone
        self.numbers: dict[str, int] = {}
        self.branches = self.dispatched = 0
        self.events: list[str] = []
        self._run()

    def _run(self) -> None:
        at = 0
        for _ in range(STEPS):
            text = self.texts[at] if at < len(self.texts) else "ret;"
            at += 1
            branch = BRANCH.match(text)
            if self.alone and text == SHARED:
                self.events.clear()
            elif self.alone and text.startswith("setp") and "%shared_out" in text:
                return
            elif branch:
                at = self.labels[branch["to"]] if self._taken(branch) else at
            elif text.startswith("brx.idx"):
                if self.dispatched:
                    return
                self.dispatched, at = 1, self.labels[self.targets[self.role]]
            elif re.match(r"^(?:ret|trap|exit);", text):
                return
            elif INSTRUCTION.match(text) and not NOTE.match(text) and not text.startswith("."):
                self._instruction(text)

    def number(self, name: str) -> int:
        """Of a register or a constant."""
        if name in self.numbers:
            return self.numbers[name]
        plain = not name.startswith("%") or name.split(".")[0] in PLAIN
        return zlib.crc32(name.encode()) if plain else self._unset(name)

    def _unset(self, name: str) -> int:
        return zlib.crc32(f"{name} {'' if name.startswith('%local_') else self.role} unset".encode())

    def _taken(self, branch: re.Match[str]) -> bool:
        if not branch["guard"]:
            return True
        self.branches += 1
        number = self.number(branch["guard"])
        if self.branches == 1:  # whether these are the first warps
            number = int(self.role < 0)
        elif "shared_out" not in branch["guard"]:
            number = zlib.crc32(f"{number} {self.seed}".encode()) >> 3 & 1
        return bool(number) != bool(branch["not"])

    def _instruction(self, text: str) -> None:
        found = INSTRUCTION.match(text)
        assert found
        name, operands = found["name"], found["operands"]
        written = "" if NOTHING_WRITTEN.match(name) else FIRST.sub(r"\1", operands)
        read = operands if SUMS.match(text) else operands[len(written) :]
        if name == "bar.sync":  # a role's barrier is in the text or in a register
            which, _, threads = read.partition(",")
            read = f"{self.number(which.strip())},{threads}"
        if name.startswith("mov.") and not {"{", "["} & set(operands):
            number = self.number(read.strip(", "))
        elif name.startswith("setp") and "%shared_out" in written:
            role, _, other = read.strip(", ").partition(", ")
            number = int(self.number(role) == self.number(other))
        else:
            told = REGISTER.sub(lambda x: str(self.number(x[0])), f"{name} {read}")
            if ACTS.match(name):
                self.events.append(told)
                told += f" {len(self.events)}"
            number = zlib.crc32(told.encode())
        for i, register in enumerate(REGISTER.findall(written)):
            before = (found["guard"], self.number(found["guard"]), self.number(register)) if found["guard"] else ()
            self.numbers[register] = zlib.crc32(f"{number} {i} {before}".encode()) if i or before else number


def _split(text: str) -> list[str]:
    """The instructions of a line; assembly has several."""
    if not text.startswith("{ "):
        return [text]
    return [f"{part.strip()};" for part in text.strip("{} ").split(";") if part.strip()]


def _with_local_registers(lines: list[str]) -> Iterator[str]:
    """Lines without comments, in which registers that assembly declares have names like others."""
    local: list[str] = []
    for line in lines:
        text = code(line)
        if text.startswith("{"):
            local = []
        if "{" in text or (text.startswith(".reg") and "<" not in text):
            local += [name for names in LOCAL.findall(text) for name in names.split(", ")]
        for name in local:
            text = re.sub(rf"(?<![\w.%$]){name}(?![\w.:])", f"%local_{name}", text)
        if text.startswith("}"):
            local = []
        yield text


def roles(ptx: str) -> range:
    """Numbers of roles: -1, and those of the workers' dispatch, whose last entry is none's."""
    table = re.search(r"\.branchtargets\s+([^;]*);", ptx)
    assert table
    return range(-1, len(re.findall(r"\$L__\w+", table[1])) - 1)
