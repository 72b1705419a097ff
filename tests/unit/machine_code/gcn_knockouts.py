"""Knock-outs in machine code: every wait of a kernel loosened by one, every barrier taken out, and what misses it.

A wait orders copies to LDS (`gcn.check_copies`), reads and writes of LDS (the same) or registers that are loaded
(`gcn.check_loads`). What no check misses is in `REVIEWED`, with the reason, which is looked up in the code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from tests.sim import backward
from tests.sim.cdna.calls import (
    ARCHS,
    E4M3,
    Case,
    decode_choice,
    in_eight_bits,
    outputs,
    paged,
    prefill_choice,
    ragged,
    ready_of,
)
from warpattn.kernels.amd.kv_config import KINDS
from warpattn.kernels.cdna.launch import launches_of_choice
from warpattn.machine_code.gcn import check_copies, check_loads
from warpattn.masks import Causal
from warpattn.problem import Call
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, fitted
from warpattn.runtime import compiler
from warpattn.scores import SoftCap

PREFILL = Case(40, 300, heads=4, heads_kv=2, dim=128, mask=Causal(), sinks=True)
DECODE = Case(1, 4000, heads=8, dim=128, mask=Causal(), sinks=True)
Made = tuple[Call, Choice | None]


class Change(NamedTuple):
    """A line of machine code and the text without its order."""

    line: int  # from 0
    counter: str  # of a wait that is loosened; "" for a barrier that is gone
    text: str


def changes(text: str) -> Iterator[Change]:
    """Each wait for each of its counters, and each barrier."""
    whole = text.splitlines()
    for i, line in enumerate(whole):
        if re.match(r"\s+s_barrier", line):
            yield Change(i, "", "\n".join([*whole[:i], *whole[i + 1 :]]))
        elif re.match(r"\s+s_waitcnt ", line):
            for counter, n in re.findall(r"(vmcnt|lgkmcnt)\((\d+)\)", line):
                looser = line.replace(f"{counter}({n})", f"{counter}({int(n) + 1})")
                yield Change(i, counter, "\n".join([*whole[:i], looser, *whole[i + 1 :]]))


def missed(change: Change) -> bool:
    return bool(check_loads(change.text) or check_copies(change.text).findings)


def survivors(text: str) -> list[Change]:
    """Changes that no check misses; the kernel itself must be in order."""
    assert check_copies(text).proven and not check_loads(text)
    return [change for change in changes(text) if not missed(change)]


def _first(text: str, change: Change) -> bool:
    return not re.search(r"^\s+s_waitcnt ", "\n".join(text.splitlines()[: change.line]), re.MULTILINE)


def _at_end(text: str, change: Change) -> bool:
    after = "\n".join(text.splitlines()[change.line :]).partition(".Lfunc_end")[0]
    return change.counter == "" and not re.search(r"^\s+(ds_(?!bpermute)|\w+ .* lds\b)", after, re.MULTILINE)


def _most(text: str, change: Change) -> bool:
    return change.counter == "lgkmcnt" and "lgkmcnt(14)" in text.splitlines()[change.line]


def _joined(text: str, change: Change) -> bool:
    """Whether the same instruction waits for another counter, and must."""
    others = [other for other in changes(text) if other.line == change.line and other.counter != change.counter]
    return any(missed(other) for other in others)


def _next(text: str, change: Change) -> str:
    """The name of the instruction after a line."""
    after = text.splitlines()[change.line + 1 :]
    return next(line.split()[0] for line in after if re.match(r"\s+[a-z]", line))


def _before(names: str) -> Callable[[str, Change], bool]:
    return lambda text, change: change.counter != "" and _next(text, change).startswith(names)


MEMORY = {"vmcnt": r"\s+(buffer_|global_|flat_)", "lgkmcnt": r"\s+(ds_|s_load|s_buffer_load|flat_)"}
LDS = re.compile(r"\s+(ds_(?!bpermute)\w+) .*?(offset\S*)?$")


def _again(text: str, change: Change) -> bool:
    """Whether a wait for as few operations is before it, and none of them between."""
    lines = text.splitlines()
    if change.counter == "":
        return False
    counted = re.compile(rf"\s+s_waitcnt .*{change.counter}\((\d+)\)")
    own = counted.match(lines[change.line])
    for line in reversed(lines[: change.line]):
        wait = counted.match(line)
        if wait is not None and own is not None and int(wait[1]) <= int(own[1]):
            return True
        if re.match(MEMORY[change.counter], line):
            return False
    return False


def _rewritten(text: str, change: Change) -> bool:
    """Whether LDS is read right before and written right after, at the same offset."""
    lines = text.splitlines()
    before = next(filter(None, map(LDS.match, reversed(lines[: change.line]))), None)
    after = next(filter(None, map(LDS.match, lines[change.line :])), None)
    if change.counter or before is None or after is None or before[2] != after[2]:
        return False
    return before[1].startswith("ds_read") and after[1].startswith("ds_write")


def _later(text: str, change: Change) -> bool:
    """Whether a later wait covers the copies that are let go, and one is missed if all of them are."""
    if change.counter != "vmcnt":
        return False
    new = _covers(change.text) - _covers(text)
    lines = text.splitlines()
    lines[change.line] = re.sub(r"vmcnt\(\d+\)", "vmcnt(63)", lines[change.line])
    return any(wait > change.line + 1 for _, wait in new) and missed(Change(change.line, "vmcnt", "\n".join(lines)))


def _covers(text: str) -> set[tuple[int, int]]:
    """The lines, from 1, of copies and of the waits that cover them."""
    return {(cover.copy.line, cover.wait.line) for cover in check_copies(text).covers}


REVIEWED: tuple[tuple[Callable[[str, Change], bool], str], ...] = (
    (_first, "in a start that firmware skips if it loads arguments ahead; the code behind it waits again"),
    (_at_end, "nothing touches LDS after the last barrier"),
    (_most, "lgkmcnt has 4 bits and the compiler asks for 14 at most: here more may be under way"),
    (_joined, "one instruction waits for two counters, and it is the other one that matters"),
    (_before("s_branch"), "the compiler waits once before a loop, whose own waits come before each use"),
    (_before("s_barrier"), "the compiler waits before its barriers; here the products have waited for these reads"),
    (_before("s_load"), "more scalar loads follow, and the wait for them comes before each use"),
    (_again, "a wait for as few comes before it, with no load between: the compiler waits again behind a branch"),
    (_rewritten, "the compiler's own place in LDS is written again where each wave has read its own bytes only"),
    (_later, "older copies matter; a later wait covers the youngest, before anything touches its bytes"),
)


def reason(text: str, change: Change) -> str | None:
    return next((why for holds, why in REVIEWED if holds(text, change)), None)


def launches(call: Call, arch: str, choice: Choice | None = None) -> tuple[Launch, ...]:
    """The steps of a call, none of which runs."""
    ready = ready_of(call, arch)
    given = call.sequence.operands(call.q, call.k, call.v).values()
    fitting = fitted(Operands(*given, *outputs(call, ready), call.sinks))
    return launches_of_choice(ready, fitting, call.sequence, choice)


def machine_code(step: Launch) -> str:
    kernel: Any = compiler.compiled(step)
    return kernel.asm["amdgcn"]


def _prefill(arch: str, kind: str = "", **changes: Any) -> Made:
    return PREFILL.call(), prefill_choice(PREFILL.call(), arch, kind, **changes)


def _decode(arch: str, partitions: int) -> Made:
    return DECODE.call(), decode_choice(DECODE.call(), arch, partitions)


def _ragged(arch: str) -> Made:
    return ragged(PREFILL, [30, 70, 0, 200]), None


def _pages(case: Case, size: int, arch: str) -> Made:
    return paged(case, [70, 3000], size), None


def _eight_bit(case: Case, per: str, arch: str) -> Made:
    return in_eight_bits(paged(case, [70, 3000], 16), E4M3[arch], (per, per)), None


SHAPES: dict[str, Callable[[str], Made]] = {
    **{f"prefill {kind}": partial(_prefill, kind=kind) for kind in KINDS},
    "prefill three slots": partial(_prefill, kind="ring", slots=3),
    "ragged": _ragged,
    "decode": partial(_decode, partitions=1),
    "decode in parts": partial(_decode, partitions=4),
    **{f"prefill pages of {size}": partial(_pages, PREFILL, size) for size in (1, 16, 64)},
    **{f"decode pages of {size}": partial(_pages, DECODE, size) for size in (1, 16, 64)},
    **{f"prefill of 8 bits, a scale per {per}": partial(_eight_bit, PREFILL, per) for per in ("head", "token")},
    **{f"decode of 8 bits, a scale per {per}": partial(_eight_bit, DECODE, per) for per in ("head", "token")},
}
BACKWARD = {
    "backward": backward.Case(200, 300, heads=4, heads_kv=2, dim=128, mask=Causal(), sinks=True),
    "backward ragged, 64": backward.Case(0, 0, lengths=((30, 30), (200, 300)), mask=Causal(), score=SoftCap(5.0)),
}
BUILDS = [(arch, name) for arch in ARCHS for name in (*SHAPES, *BACKWARD)]


def built(arch: str, name: str) -> list[str]:
    """Machine code of each launch: one, or two where parts are added up; two or three of a backward."""
    if name in BACKWARD:
        return [machine_code(step) for step in backward.launches_of(replace(BACKWARD[name], arch=arch))]
    call, choice = SHAPES[name](arch)
    return [machine_code(step) for step in launches(call, arch, choice)]
