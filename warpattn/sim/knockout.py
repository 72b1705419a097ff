"""knock_out(), loosen_waits(), miscount(): change synchronising operations one at a time; does the simulator notice?

An operation whose change causes no finding is redundant, and its author can say why, or the simulator or the run cannot
see it. A test that lists those with reasons proves that the others are needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .ir.locations import Frame
from .ir.module import Block, Module, Op, parse_module
from .link import built, link
from .machine.registry import PLAIN
from .memory.findings import Finding, many
from .report import Report
from .simulate import ttgir_of

_SYNCHRONISING = {
    "ttng.wait_barrier", "ttng.arrive_barrier", "ttng.barrier_expect", "ttng.fence_async_shared",
    "ttng.async_tma_store_wait", "ttng.warp_group_dot_wait", "ttg.async_wait", "ttg.async_commit_group",
    "ttng.inval_barrier", "ttng.tc_gen5_commit", "tt.grid_dependency_wait", "ttng.init_barrier",
    "ttng.async_copy_mbarrier_arrive",
}  # fmt: skip


_GROUPS = re.compile(r"\b(num|pendings) = (\d+)")  # of a wait: how many groups may still be under way
ANY = 1 << 30  # more groups than a role has under way: such a wait has no effect
_NUMBER = re.compile(r"(, )(\d+)")  # arrivals or bytes, after the barrier


@dataclass(frozen=True)
class KnockOut:
    """One changed operation and the findings with that change."""

    op: str
    region: str  # default, partition0, … or empty outside warp_specialize
    frames: tuple[Frame, ...]
    findings: tuple[Finding, ...]
    change: str = ""  # how the operation is spelled now; nothing: it was deleted
    notes: tuple[Finding, ...] = ()

    @property
    def noticed(self) -> bool:
        return bool(self.findings or self.notes)

    def __str__(self) -> str:
        where = " < ".join(str(frame) for frame in self.frames) or "an unknown line"
        kinds = ", ".join(sorted({finding.kind for finding in (*self.findings, *self.notes)})) or "nothing"
        change = f" {self.change}" if self.change else ""
        return f"{self.op}{change} {self.region} at {where}: {kinds}"


class Change(NamedTuple):
    """A change of an operation: a function that applies it to the op in its block and returns one that undoes it."""

    spelled: str
    apply: Callable[[Block, Op], Callable[[], None]]


def knock_out(
    kernel: Any, run: Callable[[Module], Report], only: Callable[[Op], bool] = lambda op: True
) -> list[KnockOut]:
    """Run the kernel without each of its waits, arrivals, expectations, fences and commits in turn.

    run: simulates a given module on fresh arguments, under any schedules, and returns the report; give it a step limit
    for runs that would not end, and `first_finding` to stop at the first finding. only: which operations to change.
    Results are in the order of the code. Raises ValueError if the unchanged kernel has findings, since every operation
    would then seem to be needed.
    """
    deleted = Change("", _delete)
    return list(_changed(kernel, run, lambda op: [deleted] if op.name != "ttng.init_barrier" and only(op) else []))


def loosen_waits(
    kernel: Any, run: Callable[[Module], Report], groups: Sequence[int] = (1, 2, ANY),
    only: Callable[[Op], bool] = lambda op: True,
) -> list[KnockOut]:  # fmt: skip
    """Run the kernel with each wait that counts groups of asynchronous work in turn leaving so many more under way, or
    any number of them.

    These are waits for cp.async and copies to LDS, TMA stores and wgmma. run, only, results and errors as for
    `knock_out`.
    """

    def changes(op: Op) -> Iterator[Change]:
        if _GROUPS.search(op.text) and only(op):
            for n in groups:
                yield Change(f"looser by {'any number' if n == ANY else n}", _respelled(_GROUPS, n))

    return list(_changed(kernel, run, changes))


def miscount(
    kernel: Any, run: Callable[[Module], Report], only: Callable[[Op], bool] = lambda op: True
) -> list[KnockOut]:
    """Run the kernel with one change in turn: a barrier counts one more arrival, an arrival counts twice, 16 bytes more
    or fewer are expected, a wait has the other parity. run, only, results and errors as for `knock_out`."""
    changes = {
        "ttng.init_barrier": [Change("for one arrival more", _respelled(_NUMBER, 1))],
        "ttng.arrive_barrier": [Change("once more", _respelled(_NUMBER, 1))],
        "ttng.barrier_expect": [
            Change("16 bytes more", _respelled(_NUMBER, 16)),
            Change("16 bytes fewer", _respelled(_NUMBER, -16)),
        ],
        "ttng.wait_barrier": [Change("with the other parity", _other_parity)],
    }
    return list(_changed(kernel, run, lambda op: changes.get(op.name, []) if only(op) else []))


def _changed(
    kernel: Any, run: Callable[[Module], Report], changes: Callable[[Op], Iterable[Change]]
) -> Iterator[KnockOut]:
    """Yield the findings with each change of each synchronising operation."""
    module = link(parse_module(ttgir_of(kernel)))
    module.folded = getattr(kernel, "folded", {})
    before = run(module)
    if before.findings:
        found = many(len(before.findings), "finding")
        raise ValueError(f"the kernel has {found} unchanged, such as: {before.findings[0]}")
    for block in module.functions.values():
        for region, inner, op in list(_walk(block, "")):
            for change in changes(op):
                restore = change.apply(inner, op)
                try:
                    report = run(module)
                finally:
                    restore()
                found = tuple(report.findings), change.spelled, tuple(report.notes)
                yield KnockOut(_spelled(op), region, op.frames, *found)


def _walk(block: Block, region: str) -> Iterator[tuple[str, Block, Op]]:
    """Yield (partition, block, op) of every synchronising operation."""
    for op in block.ops:
        if op.name in _SYNCHRONISING or (op.name == "ttg.inline_asm" and not op.outs):
            yield region, block, op
        for inner in op.regions:
            yield from _walk(inner, region if inner.label == "region" else inner.label)


def _delete(block: Block, op: Op) -> Callable[[], None]:
    """Remove an op; return a function that restores it. A wait that passes values on still does."""
    if op.outs:
        kept = op.kind, op.run
        op.kind, op.run = PLAIN, _handing_on(len(op.outs))

        def restore() -> None:
            op.kind, op.run = kept

        return restore
    at = block.ops.index(op)
    block.ops.pop(at)
    return lambda: block.ops.insert(at, op)


def _respelled(number: re.Pattern[str], more: int) -> Callable[[Block, Op], Callable[[], None]]:
    """Add to a number of an op."""

    def apply(block: Block, op: Op) -> Callable[[], None]:
        text, run = op.text, op.run
        op.text = number.sub(lambda found: found[0][: -len(found[2])] + str(int(found[2]) + more), text, count=1)
        op.run = built(op)

        def restore() -> None:
            op.text, op.run = text, run

        return restore

    return apply


def _other_parity(block: Block, op: Op) -> Callable[[], None]:
    """Let a wait use the other parity."""
    run = op.run
    assert run is not None
    op.run = lambda role, view, parity, *rest: run(role, view, parity ^ 1, *rest)

    def restore() -> None:
        op.run = run

    return restore


def _handing_on(results: int) -> Callable[..., Any]:
    return lambda *values: values if results > 1 else values[0] if values else None


def _spelled(op: Op) -> str:
    """Return the name of an op; for inline assembly its last instruction."""
    if op.name != "ttg.inline_asm":
        return op.name
    words = op.strings[0].replace("@e", "").split(";")
    return next((word.split()[0] for word in reversed(words) if "." in word), op.name)
