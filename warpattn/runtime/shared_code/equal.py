"""Finds loops that are equal up to register names, and the moves by which the path of one enters the other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .ptx import LABEL, REGISTER, Kernel, Loop, code

SMALLEST = 300  # instructions of a loop that is worth sharing; the loop of a loading warp has about as many
ROLE_BARRIER = re.compile(r"^bar\.sync\s+(\d+), (\d+);")  # of a role's warps; the first number is the role's
# Instructions with the same result on both paths if operands are the same: of memory they read parameters only.
ARITHMETIC = re.compile(
    r"^(?:mov|add|sub|mul|mad|fma|shl|shr|and|or|xor|not|neg|abs|min|max|setp|selp|bfe|bfi|prmt|lop3|cvt|cvta|ld\.param)\b"
)
COPY = re.compile(r"^mov\.\w+\s+%[a-z]+\d+, (%[a-z]+\d+);$")


class Different(Exception):
    """Raised if two loops that look equal do not use their registers or barriers in the same way."""


@dataclass
class Entry:
    """The instructions with which a copy's path enters the first loop."""

    moved: dict[str, str] = field(default_factory=dict)  # by the first loop's register: the copy's with its value
    again: dict[str, str] = field(default_factory=dict)  # by register: arithmetic that both paths do, after the moves


@dataclass
class Copy:
    """A loop that is equal to another one, the first."""

    loop: Loop
    barrier: str  # number of its role's barrier
    registers: dict[str, str]  # by register of the first loop


def same_loops(kernel: Kernel) -> list[list[Loop]]:
    """Return the loops that are worth sharing, in groups of equal shape."""
    groups: dict[tuple[str, ...], list[Loop]] = {}
    for loop in kernel.loops():
        shape = tuple(_shape(kernel, loop))
        if len(shape) >= SMALLEST:
            groups.setdefault(shape, []).append(loop)
    return [group for group in groups.values() if len(group) > 1]


def _shape(kernel: Kernel, loop: Loop) -> Iterator[str]:
    """Yield a loop's instructions without the names of registers, of labels and of its role's barrier."""
    inside = [kernel.label(number) for number in loop.blocks]
    for text in kernel.instructions(kernel.span(loop.blocks)):
        text = ROLE_BARRIER.sub(r"bar.sync role, \2;", text)
        text = REGISTER.sub(lambda found: found[0].rstrip("0123456789"), text)
        yield re.sub(r"\$L__BB\w+", lambda found: str(inside.index(found[0]) if found[0] in inside else "out"), text)


def barrier_of(kernel: Kernel, loop: Loop) -> str:
    """Return the number of the barrier of a loop's role."""
    texts = kernel.instructions(kernel.span(loop.blocks))
    numbers = {found[1] for text in texts if (found := ROLE_BARRIER.match(text))}
    if len(numbers) != 1:
        raise Different("one barrier of the role's warps is expected")
    return numbers.pop()


def matched(kernel: Kernel, first: Loop, loop: Loop) -> Copy:
    """Return `loop` as a copy of `first`; raises Different unless their registers correspond one to one."""
    there, back = {}, {}
    texts = (kernel.instructions(kernel.span(x.blocks)) for x in (first, loop))
    for x, y in zip(*texts, strict=True):
        for p, q in zip(REGISTER.findall(x), REGISTER.findall(y), strict=True):
            if there.setdefault(p, q) != q or back.setdefault(q, p) != p:
                raise Different(f"{p} and {q}")
    return Copy(loop, barrier_of(kernel, loop), there)


def live(kernel: Kernel, copy: Copy) -> dict[str, str]:
    """Return the registers of a copy that are also used outside of it, by those of the first loop: at least the loop's
    inputs and outputs."""
    span = kernel.span(copy.loop.blocks)
    outside = {x for i, line in enumerate(kernel.lines) if i not in span for x in REGISTER.findall(code(line))}
    return {p: q for p, q in copy.registers.items() if p != q and q in outside}


def entry(kernel: Kernel, first: Loop, copy: Copy) -> Entry:
    """Return how the copy's path enters the first loop.

    A value that both paths compute in the same way is computed again where they meet, from moved operands, so that the
    assembler still sees that it is a constant, or the same in all lanes.
    """
    spans, found = (kernel.span(first.blocks), kernel.span(copy.loop.blocks)), Entry()
    cycles = {i for part in kernel.cycles for block in part for i in kernel.span(range(block, block + 1))}
    planned: dict[str, str] = {}

    def made(register: str) -> str:
        """Return the one instruction outside of the loops that writes a register, else an empty text."""
        lines = [i for i in kernel.definitions.get(register, ()) if not any(i in span for span in spans)]
        text = code(kernel.lines[lines[0]]) if len(lines) == 1 else ""
        copied = COPY.match(text)
        return made(copied[1]) or text if copied else text

    def stays(register: str) -> bool:
        """Whether no other loop writes a register, so that it has one value on the way to the loop."""
        lines = (i for i in kernel.definitions.get(register, ()) if not any(i in span for span in spans))
        return not any(i in cycles for i in lines)

    def prepare(p: str, q: str) -> bool:
        """Plan that p gets q's value; False if p already gets another one."""
        if p == q or p in planned:
            return planned.get(p, q) == q
        mine, its = made(p), made(q)
        operands = list(zip(REGISTER.findall(mine)[1:], REGISTER.findall(its)[1:], strict=False))
        alike = ARITHMETIC.match(mine) and REGISTER.sub("%", mine) == REGISTER.sub("%", its)
        if alike and all(stays(a) and stays(b) and prepare(a, b) for a, b in operands):
            found.again[p] = "\t" + REGISTER.sub(p, mine, count=1)
        else:
            found.moved[p] = q
        planned[p] = q
        return True

    for p, q in live(kernel, copy).items():
        if not prepare(p, q):
            raise Different(f"{p} and {q} begin a path")
    return found


def in_both(entries: list[Entry]) -> dict[str, str]:
    """Return what every copy's path computes again; raises Different unless all paths compute the same registers."""
    first, *others = entries
    if any(list(other.again) != list(first.again) for other in others):
        raise Different("paths begin in different ways")
    return first.again


def dropped_labels(kernel: Kernel, loop: Loop) -> list[str]:
    """Return the labels in a loop to which the debug information refers."""
    lines = (code(kernel.lines[i]) for i in kernel.span(loop.blocks))
    return [text for text in lines if text.endswith(":") and text.startswith("$L__tmp") and not LABEL.match(text)]
