"""Reads registers and named barriers of a warp-specialised NVIDIA kernel's roles from its LLVM IR.

      first warps   "outside" ─▶ registers of their role ─▶ "outside"
      other warps   "waiting" ─▶ registers of a role ─▶ "waiting", until there are no more

Each arrow is a `setmaxnreg`, which waits until the block has enough free registers, so a kernel whose roles need more
than a launch has never ends. Nor does one whose `bar.sync` counts other threads than those that arrive. The simulator
runs an earlier stage of the code, so tests require that no kernel has `role_faults`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_BLOCK = re.compile(r"^([\w.$-]+):", re.MULTILINE)
_TARGET = re.compile(r"label %([\w.$-]+)")
_CASE = re.compile(r"i8 (-?\d+), label %([\w.$-]+)")
_REGISTERS = re.compile(r"call void @llvm\.nvvm\.setmaxnreg\.\w+\.sync\.aligned\.u32\(i32 (\d+)\)")
_BARRIER = re.compile(
    r"@llvm\.nvvm\.barrier\.cta\.[\w.]*\.count\(i32 (\d+), i32 (\d+)|"  # the compiler's
    r"\bbar(?:rier)?(?:\.cta)?\.(?:sync|arrive|red)[\w.]* (?:\w+, )?(\d+), (\d+)"  # of inline assembly
)
_AT_LAUNCH = re.compile(r'"nvvm\.maxnreg"="(\d+)"')
_FIRST_WARPS = re.compile(r'"ttg\.num-warps" = (\d+)')
_OTHER_WARPS = re.compile(r"partition\d+\(.*num_warps\((\d+)\)")
_REQUESTED = re.compile(r"requestedRegisters = array<i32: ([\d, ]+)>")
_NEXT_ROLE = "@llvm.nvvm.barrier.cta.sync.all(i32 1)"  # after it, waiting warps read the number of their role


@dataclass(frozen=True)
class RoleCode:
    """registers: per thread, while the role runs. barriers: (id, threads) of its named barriers."""

    warps: int
    registers: int
    barriers: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class RoleRegisters:
    """Roles of a kernel, that of the first warps first; registers per thread at launch, of the first warps before and
    after their role, and of waiting warps. All are 0 if the compiler does not change registers."""

    at_launch: int
    outside: int
    waiting: int
    roles: tuple[RoleCode, ...]


def role_faults(asm: Mapping[str, str]) -> list[str]:
    """Return a sentence for each reason why roles of a compiled kernel (`kernel.asm`) could wait for ever."""
    found = read_roles(asm)
    return [] if found is None else [*_register_faults(found, asm["ttgir"]), *_barrier_faults(found.roles)]


def read_roles(asm: Mapping[str, str]) -> RoleRegisters | None:
    """Read roles, registers and barriers of a compiled kernel; None if all its warps run the same code."""
    body = _blocks(asm["llir"])
    dispatch = next((name for name, text in body.items() if _NEXT_ROLE in text and "switch i8" in text), None)
    if dispatch is None:
        return None
    starts = dict(_CASE.findall(body[dispatch]))
    warps = [int(n) for n in _OTHER_WARPS.findall(asm["ttgir"])]
    waiting = next(iter(_registers(body, [dispatch])), 0)
    before = _reached(body, next(iter(body)), dispatch)
    outside = next(iter(_registers(body, before)), 0)
    (first,) = _FIRST_WARPS.findall(asm["ttgir"])
    roles = [_role(body, before, int(first), outside)]
    roles += [_role(body, _reached(body, starts[str(i)], dispatch), n, waiting) for i, n in enumerate(warps)]
    at_launch = _AT_LAUNCH.search(asm["llir"])
    return RoleRegisters(int(at_launch[1]) if at_launch else 0, outside, waiting, tuple(roles))


def _register_faults(found: RoleRegisters, ttgir: str) -> Iterator[str]:
    """Check registers, which warpgroups get: roles of fewer than four warps share one, with the most of any role."""
    if found.outside == 0:
        if requested := _REQUESTED.search(ttgir):
            yield f"roles ask for {requested[1]} registers a thread, and the compiler gives them none of their own"
        return
    wide = [(role.warps // 4, role.registers) for role in found.roles if role.warps >= 4]
    small = [role for role in found.roles if role.warps < 4]
    if small:
        wide.append((-(-sum(role.warps for role in small) // 4), max(role.registers for role in small)))
    groups, first = sum(count for count, _ in wide), found.roles[0].warps // 4
    there = found.at_launch * groups
    running = sum(count * registers for count, registers in wide)
    idle = found.outside * first + found.waiting * (groups - first)
    for needed, when in ((running, "while roles run"), (idle, "before and after")):
        if needed > there:
            yield f"{groups} warpgroups have {there} registers a thread at launch, and need {needed} {when}"


def _barrier_faults(roles: tuple[RoleCode, ...]) -> Iterator[str]:
    users: Counter[tuple[int, int]] = Counter()
    for role in roles:
        users.update(dict.fromkeys(role.barriers, 32 * role.warps))
    counts = Counter(number for number, _ in users)
    for number in sorted(number for number in counts if counts[number] > 1):
        yield f"named barrier {number} counts other threads from place to place"
    for (number, threads), there in sorted(users.items()):
        if there != threads:
            yield f"named barrier {number} counts {threads} threads, and roles of {there} use it"


def _blocks(llir: str) -> dict[str, str]:
    """Return the blocks of the kernel by name, in order."""
    text = llir[llir.index("define ptx_kernel") :]
    first, *rest = _BLOCK.split(text[: text.index("\n}")])
    return {"": first, **dict(zip(rest[::2], rest[1::2], strict=True))}


def _reached(body: Mapping[str, str], start: str, end: str) -> list[str]:
    """List the blocks reachable from `start` without passing `end`, in order."""
    found, left = {start, end}, [start]
    while left:
        new = set(_TARGET.findall(body[left.pop()])) - found
        found |= new
        left += new
    return [name for name in body if name in found and name != end]


def _role(body: Mapping[str, str], blocks: list[str], warps: int, idle: int) -> RoleCode:
    """Read the role in some blocks, of warps that otherwise have `idle` registers."""
    registers = next((n for n in _registers(body, blocks) if n != idle), idle)
    found = [match for name in blocks for match in _BARRIER.findall(body[name])]
    return RoleCode(warps, registers, frozenset((int(a or c), int(b or d)) for a, b, c, d in found))


def _registers(body: Mapping[str, str], blocks: list[str]) -> list[int]:
    """List all register counts that are set in some blocks, in order."""
    return [int(n) for name in blocks for n in _REGISTERS.findall(body[name])]
