"""knock_out(), loosen_waits(): change each synchronising operation of a kernel, one at a time; does a run report it?

An operation whose removal causes no finding is redundant, and its author can say why, or invisible to the simulator or
the run. A list of them with reasons, kept in a test, proves that the others are needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .ir.locations import Frame
from .ir.module import Block, Module, Op, parse_module
from .link import link
from .machine.registry import PLAIN, TABLE
from .memory.findings import Finding
from .report import Report
from .simulate import ttgir_of

_SYNCHRONISING = {
    "ttng.wait_barrier", "ttng.arrive_barrier", "ttng.barrier_expect", "ttng.fence_async_shared",
    "ttng.async_tma_store_wait", "ttng.warp_group_dot_wait", "ttg.async_wait", "ttg.async_commit_group",
    "ttng.inval_barrier", "ttng.tc_gen5_commit", "tt.grid_dependency_wait",
}  # fmt: skip


_GROUPS = re.compile(r"\b(num|pendings) = (\d+)")  # of a wait: how many groups may still be under way


@dataclass(frozen=True)
class KnockOut:
    """One deleted or loosened operation and what was found with that change."""

    op: str
    region: str  # default, partition0, … or empty outside warp_specialize
    frames: tuple[Frame, ...]
    findings: tuple[Finding, ...]
    looser: int = 0  # by so many groups; 0: the operation was deleted
    notes: tuple[Finding, ...] = ()

    @property
    def noticed(self) -> bool:
        return bool(self.findings or self.notes)

    def __str__(self) -> str:
        where = " < ".join(str(frame) for frame in self.frames) or "an unknown line"
        kinds = ", ".join(sorted({finding.kind for finding in (*self.findings, *self.notes)})) or "nothing"
        change = f" looser by {self.looser}" if self.looser else ""
        return f"{self.op}{change} {self.region} at {where}: {kinds}"


def knock_out(kernel: Any, run: Callable[[Module], Report]) -> list[KnockOut]:
    """Run the kernel once without each of its waits, arrivals, expectations, fences and commits.

    run: simulates the module it is given, on fresh arguments, with as many schedules as it likes, and returns the
    report; a step limit ends what would not end. The results are in the order of the code. Raises ValueError if there
    are findings with nothing taken out, since every operation would then seem to be needed.
    """
    return list(_changed(kernel, run, lambda op: (0,)))


def loosen_waits(kernel: Any, run: Callable[[Module], Report], groups: Sequence[int] = (1, 2)) -> list[KnockOut]:
    """Run the kernel once with each wait that counts groups of asynchronous work leaving so many more under way.

    These are waits for cp.async and copies to LDS, TMA stores and wgmma. run, results and errors as for `knock_out`.
    """
    return list(_changed(kernel, run, lambda op: groups if _GROUPS.search(op.text) else ()))


def _changed(
    kernel: Any, run: Callable[[Module], Report], changes: Callable[[Op], Iterable[int]]
) -> Iterator[KnockOut]:
    """What a run finds with each synchronising operation changed: deleted (0), or looser by so many groups."""
    module = link(parse_module(ttgir_of(kernel)))
    before = run(module)
    if before.findings:
        raise ValueError(f"the kernel has {len(before.findings)} findings unchanged, such as: {before.findings[0]}")
    for block in module.functions.values():
        for region, inner, op in list(_walk(block, "")):
            for groups in changes(op):
                restore = _loosen(op, groups) if groups else _delete(inner, op)
                try:
                    report = run(module)
                finally:
                    restore()
                found = tuple(report.findings), groups, tuple(report.notes)
                yield KnockOut(_spelled(op), region, op.frames, *found)


def _walk(block: Block, region: str) -> Iterator[tuple[str, Block, Op]]:
    """(partition, block, op) of every synchronising operation."""
    for op in block.ops:
        if op.name in _SYNCHRONISING or (op.name == "ttg.inline_asm" and not op.outs):
            yield region, block, op
        for inner in op.regions:
            yield from _walk(inner, region if inner.label == "region" else inner.label)


def _delete(block: Block, op: Op) -> Callable[[], None]:
    """Take an op out; returns what puts it back. A wait that hands values on still does that."""
    if op.outs:
        kept = op.kind, op.run
        op.kind, op.run = PLAIN, _handing_on(len(op.outs))

        def restore() -> None:
            op.kind, op.run = kept

        return restore
    at = block.ops.index(op)
    block.ops.pop(at)
    return lambda: block.ops.insert(at, op)


def _loosen(op: Op, groups: int) -> Callable[[], None]:
    """Let a wait leave more groups under way; returns what undoes that."""
    text, run = op.text, op.run
    op.text = _GROUPS.sub(lambda found: f"{found[1]} = {int(found[2]) + groups}", text)
    op.run = TABLE[op.name][1](op)

    def restore() -> None:
        op.text, op.run = text, run

    return restore


def _handing_on(results: int) -> Callable[..., Any]:
    return lambda *values: values if results > 1 else values[0] if values else None


def _spelled(op: Op) -> str:
    """The name of an op; of inline assembly its last instruction."""
    if op.name != "ttg.inline_asm":
        return op.name
    words = op.strings[0].replace("@e", "").split(";")
    return next((word.split()[0] for word in reversed(words) if "." in word), op.name)
