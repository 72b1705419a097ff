"""Reads a kernel's PTX line by line: which lines may follow one, what each reads and writes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import cached_property

REGISTER = re.compile(r"%[a-z]+\d+\b")
LABEL = re.compile(r"^(\$L__\w+):")
BRANCH = re.compile(r"^(?P<guard>@!?%p\d+\s+)?bra(?:\.uni)?\s+(?P<to>\$L__\w+);")
ENDS = re.compile(r"^(?:ret|trap|exit|brx\.idx)\b")  # the last is the dispatch of the roles: what a worker runs next
NOTE = re.compile(r"^(?:\.loc\b|\$L__tmp\d+:|\.pragma\b)")
DECLARED = re.compile(r"^\s*\.reg \.(\w+)\s+(%[a-z]+)<\d+>;")
WRITES_NOTHING = re.compile(
    r"^(?:@!?%p\d+\s+)?(?:st|stmatrix|red|bar|barrier|bra|brx|mbarrier|cp|fence|membar|setmaxnreg|prefetch|griddepcontrol|wgmma\.(?:fence|commit|wait))\b"
)
GUARD = re.compile(r"^[{\s]*(?:@!?%?\w+\s+)?")
END = "$L__func_end0:"  # present with debug information; else the kernel ends with the text


def code(line: str) -> str:
    """Return a line without its comment."""
    return line.split("//", 1)[0].strip()


class Kernel:
    """The lines of a kernel's body, from the one behind its registers' declarations on."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.begin = 1 + max((i for i, line in enumerate(self.lines) if DECLARED.match(line)), default=0)
        end = self.lines.index(END) if END in self.lines else len(self.lines) - 1 - self.lines[::-1].index("}")
        self.body = range(self.begin, end)
        self.texts = [code(line) for line in self.lines[:end]]

    @cached_property
    def labels(self) -> dict[str, int]:
        """The lines of labels."""
        return {found[1]: i for i in self.body if (found := LABEL.match(self.texts[i]))}

    def following(self, i: int) -> list[int]:
        """Return the lines that may run after line `i`."""
        text = self.texts[i]
        branch = BRANCH.match(text)
        if branch:
            return [self.labels[branch["to"]], *([i + 1] if branch["guard"] else [])]
        return [] if ENDS.match(text) or i + 1 not in self.body else [i + 1]

    @cached_property
    def preceding(self) -> dict[int, list[int]]:
        """The lines that may run before each line."""
        found: dict[int, list[int]] = {}
        for i in self.body:
            for to in self.following(i):
                found.setdefault(to, []).append(i)
        return found

    def after(self, first: int, barred: Collection[int] = ()) -> set[int]:
        """Return the lines that may run from line `first` on, without those behind a line of `barred`."""
        found, waiting = set[int](), [first]
        while waiting:
            i = waiting.pop()
            if i not in found:
                found.add(i)
                waiting += () if i in barred else self.following(i)
        return found

    def before(self, last: int) -> set[int]:
        """Return the lines from which line `last` may be reached, without itself."""
        found, waiting = set[int](), [*self.preceding.get(last, ())]
        while waiting:
            i = waiting.pop()
            if i not in found and i != last:
                found.add(i)
                waiting += self.preceding.get(i, ())
        return found

    def written(self, i: int) -> set[str]:
        """Return the registers that line `i` writes for certain."""
        text = self.texts[i]
        return set() if unclear(text) or WRITES_NOTHING.match(text) else set(REGISTER.findall(results(text)))

    def may_write(self, i: int) -> set[str]:
        """Return the registers that an instruction of line `i` has as its first operand and may write."""
        parts = (GUARD.sub("", part) for part in self.texts[i].split(";"))
        return {x for part in parts if not WRITES_NOTHING.match(part) for x in REGISTER.findall(results(part))}

    def definitions(self, lines: Iterable[int]) -> dict[str, list[int]]:
        """Return the lines that may write a register. If that cannot be told, a line that reads it counts, too."""
        found: dict[str, list[int]] = {}
        for i in sorted(lines):
            text = self.texts[i]
            for register in set(REGISTER.findall(text)) if unclear(text) else self.written(i):
                found.setdefault(register, []).append(i)
        return found

    def reads(self, i: int) -> list[str]:
        """Return the registers that line `i` may read."""
        text = self.texts[i]
        whole = unclear(text) or WRITES_NOTHING.match(text) or text.startswith("wgmma")
        return REGISTER.findall(text if whole else text[len(results(text)) :])


def unclear(text: str) -> bool:
    """Whether it cannot be told what a line writes: a guarded instruction, or assembly of several."""
    return text.startswith("{") or text.count(";") > 1 or (text.startswith("@") and not WRITES_NOTHING.match(text))


def results(text: str) -> str:
    """Return a single instruction up to the end of its first operand, which it writes."""
    first = text.split(",", 1)[0]
    return text.split("}", 1)[0] if "{" in first else first
