"""Leads every role's warps through one copy of the code that they share."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from .ptx import LABEL, NOTE, REGISTER, Kernel, results

# The three marks that `kernels/nvidia/shared_role.py` leaves in the text.
BEGIN = re.compile(r"^mov\.u32\s+%r\d+, %shared_role;")
LEAVE = re.compile(r"^shared_role\.leave;")
ENTER = re.compile(r"^shared_role\.enter (\d+);")
BARRIER = re.compile(r"\bbar\.sync\s+(\d+), 128;")  # of a warpgroup; a number in the text is the role's
OTHER_BARRIER = re.compile(r"\bbar(?:rier)?\.(?:cta\.)?(?:(?:sync|arrive)[\w.]*\s+|red\S+\s+%\w+,\s*)\d")
# What writes to shared memory, and where to.
STORE = re.compile(r"\b(?:(?:st|stmatrix|atom|red)\.[\w.:]*shared|cp\.[\w.:]*shared[\w:]*\.global)[^\[;]*\[([^\]]*)\]")
UNFOLLOWED = re.compile(r"\b(?:call|brx)\b")  # goes on in lines that are not read here
OWN_THREAD = re.compile(r"%tid\.x\b")
THREAD = ["\tmov.u32 \t%shared_thread, %tid.x;", "\tand.b32 \t%shared_thread, %shared_thread, 127;"]
# Instructions with the same result in every warpgroup if operands are the same: of memory they read parameters only.
ARITHMETIC = re.compile(
    r"^(?:mov|add|sub|mul|mad|fma|shl|shr|and|or|xor|not|neg|abs|min|max|setp|selp|bfe|bfi|prmt|lop3|cvt|cvta|ld\.param"
    r"|shfl\.sync)\b"
)
DECLARE = [f"\t.reg .b32 \t%shared_{name};" for name in ("role", "barrier", "thread")] + ["\t.reg .pred \t%shared_out;"]
ROLE = "$L__shared_role"


class NotShared(Exception):
    """Raised if a role's code cannot be run by others: it needs more than can be computed again where they meet."""


def share_role(ptx: str) -> str:
    """Return a kernel's PTX whose stand-ins for a role run that role's code, and text without them as it is. Raises
    NotShared where it cannot be told that they would do the same."""
    if "%shared_role" not in ptx:
        return ptx
    kernel = Kernel(ptx)
    role = Role(kernel, _only(kernel, BEGIN), _only(kernel, LEAVE))
    entered = {i: found[1] for i in kernel.body if (found := ENTER.match(kernel.texts[i]))}
    role.check(entered)
    computed = role.computed()
    changed: dict[int, list[str]] = {i: [_in_role(kernel.lines[i])] for i in role.inside}
    meet = [*_numbers("0", role.barrier()), f"{ROLE}:", *THREAD, *map(_in_role, computed.values())]
    changed[role.begin] = [*meet, kernel.lines[role.begin]]
    changed[role.leave] = [text for number in entered.values() for text in _way_out(number)]
    for i, number in entered.items():
        barrier = _barrier_before(kernel, i)
        changed[barrier] = []
        its = BARRIER.match(kernel.texts[barrier])
        assert its
        enter = [*_numbers(number, its[1]), f"\tbra.uni \t{ROLE};", f"{ROLE}_{number}:"]
        changed[i] = [*enter, *_of_threads(computed)]
    lines = [*kernel.lines[: kernel.begin], *DECLARE]
    lines += (text for i in range(kernel.begin, len(kernel.lines)) for text in changed.get(i, (kernel.lines[i],)))
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Role:
    """The shared code: the lines from `begin` to `leave`, in any order of their blocks."""

    kernel: Kernel
    begin: int
    leave: int

    @cached_property
    def inside(self) -> set[int]:
        return self.kernel.after(self.begin, (self.leave,))

    @cached_property
    def earlier(self) -> dict[str, list[int]]:
        """By register, the lines that may write it on the first warps' way to the role."""
        lines, following = self.kernel.before(self.begin), self.kernel.following
        if any(to <= i and to in lines for i in lines for to in following(i)):
            raise NotShared("a loop before the role")
        return self.kernel.definitions(lines)

    def check(self, entered: Collection[int]) -> None:
        """Raise NotShared unless stand-ins that enter at these lines end as they would without the shared code."""
        if self.leave not in self.inside or not self.inside.isdisjoint(entered):
            raise NotShared("the marks of a role are not in order")
        if unfollowed := [text for i in self.inside if UNFOLLOWED.search(text := self.kernel.texts[i])]:
            raise NotShared(f"what the role runs is not all known: {unfollowed}")
        later = {x for i in set[int]().union(*map(self.kernel.after, entered)) for x in self.kernel.reads(i)}
        writes = set[str]().union(*map(self.kernel.may_write, self.inside))
        if changed := later & writes:
            raise NotShared(f"other roles read {sorted(changed)}, which this one writes")
        if unknown := {x for i in self.inside for x in self.kernel.reads(i)} - writes - self.earlier.keys():
            raise NotShared(f"it is not known what writes {sorted(unknown)}")
        if others := [text for i in self.inside if OTHER_BARRIER.search(BARRIER.sub("", text := self.kernel.texts[i]))]:
            raise NotShared(f"warpgroups would meet at {others}")
        if common := self._stored_in_common():
            raise NotShared(f"warpgroups would write in one place: {common}")

    def _stored_in_common(self) -> list[str]:
        """Return the instructions that write to shared memory, each to a place that does not follow from the number of
        the role: to memory that the compiler keeps for the exchange of values among a role's warps."""
        texts, own, known = self.kernel.texts, set(REGISTER.findall(self.kernel.texts[self.begin])), 0
        while known < len(own):  # registers that may depend on the number
            known = len(own)
            for i in self.inside:
                if not own.isdisjoint(self.kernel.reads(i)):
                    own |= self.kernel.may_write(i)
        stores = ((i, found[1]) for i in self.inside for found in STORE.finditer(texts[i]))
        return [texts[i] for i, place in stores if own.isdisjoint(REGISTER.findall(place))]

    def barrier(self) -> str:
        """Return the number of the barrier of the role's warps."""
        own = {number for i in self.inside for number in BARRIER.findall(self.kernel.texts[i])}
        if len(own) != 1:
            raise NotShared("one barrier of the role's warps is expected")
        return own.pop()

    def computed(self) -> dict[str, str]:
        """Return the instructions of all values from before that the shared code reads, by register, operands first.

        Every role computes them where roles meet, the first one again, so that the assembler still sees that they are
        constants, or the same in all lanes; values of another path would be neither."""
        again: dict[str, str] = {}
        others = set(self.kernel.body) - self.inside - self.kernel.before(self.begin)
        elsewhere = set[str]().union(*map(self.kernel.may_write, others))

        def compute(register: str) -> None:
            texts = [self.kernel.texts[i] for i in self.earlier.get(register, ())]
            if register in elsewhere:
                raise NotShared(f"other roles give {register} another value")
            if len(texts) != 1 or not ARITHMETIC.match(texts[0]) or texts[0].count(";") > 1:
                raise NotShared(f"{register} is not computed by one instruction: {texts}")
            for operand in REGISTER.findall(texts[0][len(results(texts[0])) :]):
                if operand not in again:
                    compute(operand)
            again[register] = f"\t{texts[0]}"

        for register in sorted(self._read_first()):
            if register not in again:
                compute(register)
        return again

    def _read_first(self) -> set[str]:
        """Return the registers that the shared code may read before it writes them, of those written earlier."""
        read, written = set[str](), dict[str, set[int]]()
        for i in self.inside:
            read.update(register for register in self.kernel.reads(i) if register in self.earlier)
            for register in self.kernel.written(i):
                written.setdefault(register, set()).add(i)
        return {x for x in read if x not in written or self._reached(x, written[x])}

    def _reached(self, register: str, written: set[int]) -> bool:
        """Whether a read of a register may come before all of the lines that write it."""
        return any(register in self.kernel.reads(i) for i in self.kernel.after(self.begin, written | {self.leave}))


def _only(kernel: Kernel, mark: re.Pattern[str]) -> int:
    """Return the one line with a mark."""
    lines = [i for i in kernel.body if mark.match(kernel.texts[i])]
    if len(lines) != 1:
        raise NotShared(f"{len(lines)} lines are {mark.pattern}")
    return lines[0]


def _in_role(line: str) -> str:
    """Rewrite a line of the shared code: its barrier and its threads are those of the role that runs it."""
    return OWN_THREAD.sub("%shared_thread", BARRIER.sub("bar.sync \t%shared_barrier, 128;", line))


def _numbers(role: str, barrier: str) -> list[str]:
    return [f"\tmov.b32 \t%shared_role, {role};", f"\tmov.b32 \t%shared_barrier, {barrier};"]


def _way_out(number: str) -> list[str]:
    """Return the end of the shared code for a stand-in: it goes on where it came from."""
    return [f"\tsetp.eq.u32 \t%shared_out, %shared_role, {number};", f"\t@%shared_out bra \t{ROLE}_{number};"]


def _of_threads(computed: dict[str, str]) -> list[str]:
    """Return the instructions whose results depend on the thread: a stand-in's warps get their own values back."""
    found: dict[str, str] = {}
    for register, text in computed.items():
        if OWN_THREAD.search(text) or not found.keys().isdisjoint(REGISTER.findall(text)):
            found[register] = text
    return list(found.values())


def _barrier_before(kernel: Kernel, enter: int) -> int:
    """Return the line of a stand-in's barrier, whose number Triton gave it."""
    for i in range(enter - 1, kernel.begin, -1):
        if BARRIER.match(kernel.texts[i]):
            return i
        if LABEL.match(kernel.texts[i]) and not NOTE.match(kernel.texts[i]):
            break
    raise NotShared("a stand-in without a barrier")
