"""mbarriers, the barrier of a cluster, and the end of the preceding launch.

In a cluster each CTA has its own mbarriers, or each pair of CTAs shares the first one's: then both arrive there and
only the first CTA waits. An arrival `fromCTA` also counts on other CTAs' barriers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..ir.ctas import group
from ..ir.module import Op
from ..ir.parts import barrier_copies
from ..machine.registry import blocking, tasked
from ..machine.sync import BarrierWait
from ..memory.clocks import PRECEDING
from ..memory.findings import Finding
from ..memory.shared import MemDesc


@tasked("ttng.init_barrier")
def _init(op: Op) -> Callable[..., Any]:
    copies = barrier_copies(op, op.inputs[0])
    count = int(op.text.split(",")[1].split()[0]) << copies.bit_count()

    def run(task: Any, view: MemDesc) -> None:
        if not task.program.cta & copies:
            task.barrier(view).init(count, task, alone=task.program.cluster.count == 1)

    return run


@tasked("ttng.inval_barrier")
def _inval(op: Op) -> Callable[..., Any]:
    copies = barrier_copies(op, op.inputs[0])

    def run(task: Any, view: MemDesc) -> None:
        if not task.program.cta & copies:
            task.barrier(view).invalidate(task)

    return run


def _targets(op: Op) -> Callable[[int], list[int]]:
    """Return the CTAs on whose barriers an arrival of a CTA counts."""
    copies = barrier_copies(op, op.inputs[0])
    if op.ctas is None:
        return lambda cta: [cta]
    others = op.ctas.count - 1
    others &= ~op.integer("fromCTA", others)
    if others and copies:
        raise op.error("an arrival from_cta on a barrier that CTAs share is not simulated")
    return lambda cta: [] if cta & others else group(cta & ~copies, others)


@blocking("ttng.barrier_expect")
def _expect(op: Op) -> Callable[..., Any]:
    nbytes, targets = int(op.text.split(",")[1].split()[0]), _targets(op)

    def run(task: Any, view: MemDesc, predicate: Any = True) -> Any:
        yield from task.machine.pause()
        if predicate:
            for cta in targets(task.program.cta):
                task.barrier(view, cta).expect(nbytes)
                arrive(task, view, 1, cta)

    return run


@blocking("ttng.arrive_barrier")
def _arrive(op: Op) -> Callable[..., Any]:
    count, targets = int(op.text.split(",")[1].split()[0]), _targets(op)

    def run(task: Any, view: MemDesc, predicate: Any = True) -> Any:
        yield from task.machine.pause()
        if predicate:
            for cta in targets(task.program.cta):
                arrive(task, view, count, cta)

    return run


def arrive(task: Any, view: MemDesc, count: int, cta: int | None = None) -> None:
    """Do `count` arrivals of a role on the barrier in `view`, of its own CTA or another."""
    task.barrier(view, cta).arrive(count, task.clock, task.place())
    task.advance()


@blocking("ttng.cluster_barrier")
def _cluster_barrier(op: Op) -> Callable[..., Any]:
    relaxed = op.flag("relaxed")

    def run(task: Any) -> Any:
        yield from task.machine.pause()
        if op.ctas is not None:
            yield from task.program.cluster.meet(task, relaxed, op.uid if op.in_role else 0)

    return run


@blocking("ttng.wait_barrier")
def _wait(op: Op) -> Callable[..., Any]:
    copies = barrier_copies(op, op.inputs[0])

    def run(task: Any, view: MemDesc, parity: int, predicate: Any = True, *_: Any) -> Any:
        if not predicate or task.program.cta & copies:
            return
        yield from task.machine.pause()
        barrier = task.barrier(view)
        if not barrier.usable(task.place(), "waits on", task.clock):
            return
        if barrier.awaited(parity, task) == barrier.phase:
            wait = BarrierWait(barrier)
            yield wait
            if barrier.phase > wait.target:
                place = task.place()
                text = f"{place} waits for phase {wait.target - 1} of barrier {barrier.name}, and phase {wait.target} "
                text += "completes, too, before it has seen that: on the card it may miss both"
                task.machine.findings.add(
                    Finding("PhaseError", text, (place,), barrier=barrier.name, phase=wait.target - 1)
                )
        task.learn(barrier.released)

    return run


@tasked("tt.grid_dependency_wait")
def _preceding_launch(op: Op) -> Callable[..., Any]:
    """Learn that the preceding launch has ended, with all its writes."""

    def run(task: Any) -> None:
        task.clock.mark(PRECEDING, 1)

    return run


__all__ = ["arrive"]
