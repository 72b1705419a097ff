"""Writes a kernel's PTX with one copy of several equal loops."""

from __future__ import annotations

from .equal import ROLE_BARRIER, Copy, Different, barrier_of, dropped_labels, entry, in_both, live, matched, same_loops
from .ptx import BRANCH, DECLARED, Kernel, Loop, code

ROLE = "%shared_role"  # the number of the barrier of the role whose warps run the loop
OTHER = "%shared_other"  # predicate: a role other than the compared one runs the loop
ENTER, LEAVE = "$L__shared_enter", "$L__shared_leave"


def share_loops(ptx: str) -> str:
    """Return a kernel's PTX with one copy of the largest loop that several roles have, equal up to register names.

    The other roles' warps enter that copy with their values in its registers, and leave it for the code after their own
    loop. Without two equal loops the text is returned unchanged."""
    kernel = Kernel(ptx)
    groups = same_loops(kernel)
    if not groups:
        return ptx
    try:
        return "\n".join(_joined(kernel, *max(groups, key=lambda group: len(group[0].blocks)))) + "\n"
    except Different:
        return ptx


def _joined(kernel: Kernel, first: Loop, *others: Loop) -> list[str]:
    copies = [matched(kernel, first, loop) for loop in others]
    entries = [entry(kernel, first, copy) for copy in copies]
    again, types = in_both(entries), _types(kernel)
    own = barrier_of(kernel, first)
    if len({own, *(copy.barrier for copy in copies)}) <= len(copies):
        raise Different("two roles have one barrier")
    for label in (loop.exit for loop in (first, *others)):
        if not kernel.label(label):
            raise Different("a way out without a label")

    inserted: dict[int, list[str]] = {}  # replacements, by line number
    for copy, begun in zip(copies, entries, strict=True):
        span = kernel.span(copy.loop.blocks)
        inserted |= {i: [] for i in span}
        moves = [_move(types, p, q) for p, q in begun.moved.items()]
        role = f"\tmov.b32 \t{ROLE}, {copy.barrier};"
        labels = dropped_labels(kernel, copy.loop)
        inserted[span[0]] = [f"{copy.loop.header}:", *labels, *moves, role, f"\tbra.uni \t{ENTER};"]

    span = kernel.span(first.blocks)
    for i in span:
        inserted[i] = [_in_loop(kernel, first, kernel.lines[i])]
    inserted[span[-1]] += [*_leave(kernel, first, copies, types), f"{ENTER}:", *again.values()]
    inserted[span[-1]] += [f"\tbra.uni \t{first.header};"]
    for i in _entrances(kernel, first):
        inserted[i] = [kernel.lines[i].replace(first.header, ENTER)]
    if _falls_in(kernel, first):
        inserted[span[0]] = [f"\tbra.uni \t{ENTER};", *inserted[span[0]]]
    declared = [f"\t.reg .b32 \t{ROLE};", f"\t.reg .pred \t{OTHER};"]
    inserted[kernel.begin] = [kernel.lines[kernel.begin], *declared, f"\tmov.b32 \t{ROLE}, {own};"]
    return [text for i, line in enumerate(kernel.lines) for text in inserted.get(i, (line,))]


def _types(kernel: Kernel) -> dict[str, str]:
    """Return the types of registers by the prefix of their names."""
    found = (DECLARED.match(line) for line in kernel.lines)
    return {match[2]: match[1] for match in found if match}


def _move(types: dict[str, str], to: str, value: str) -> str:
    return f"\tmov.{types[to.rstrip('0123456789')]} \t{to}, {value};"


def _in_loop(kernel: Kernel, loop: Loop, line: str) -> str:
    """Rewrite a line of the shared loop: the barrier becomes that of the running role, the exit leads to `LEAVE`."""
    text = code(line)
    barrier, branch = ROLE_BARRIER.match(text), BRANCH.match(text)
    if barrier:
        return f"\tbar.sync \t{ROLE}, {barrier[2]};"
    if branch and branch["to"] == kernel.label(loop.exit):
        return line.replace(branch["to"], LEAVE)
    return line


def _leave(kernel: Kernel, first: Loop, copies: list[Copy], types: dict[str, str]) -> list[str]:
    """Return the code after the loop: it branches by role and moves values back to the role's own registers."""
    lines = [f"{LEAVE}:"]
    for number, copy in enumerate(copies):
        lines += [f"\tsetp.ne.b32 \t{OTHER}, {ROLE}, {copy.barrier};", f"\t@{OTHER} bra \t{LEAVE}_{number};"]
        lines += [_move(types, q, p) for p, q in live(kernel, copy).items()]
        lines += [f"\tbra.uni \t{kernel.label(copy.loop.exit)};", f"{LEAVE}_{number}:"]
    return [*lines, f"\tbra.uni \t{kernel.label(first.exit)};"]


def _entrances(kernel: Kernel, loop: Loop) -> list[int]:
    """Return the lines outside of a loop that branch into it."""
    outside = (block for number, block in enumerate(kernel.blocks) if number not in loop.blocks)
    return [block.last for block in outside if loop.header in block.targets]


def _falls_in(kernel: Kernel, loop: Loop) -> bool:
    """Whether the block before a loop may fall into it."""
    return loop.blocks[0] > 0 and kernel.blocks[loop.blocks[0] - 1].falls
