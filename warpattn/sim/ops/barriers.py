"""mbarriers, the barrier of a cluster, a block's hardware barriers, and the end of the preceding launch.

In a cluster each CTA has its own mbarriers, or each pair of CTAs shares the first one's: then both arrive there and
only the first CTA waits. An arrival `fromCTA` also counts on other CTAs' barriers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..ir.ctas import group
from ..ir.module import Op
from ..ir.parts import barrier_copies
from ..machine.registry import acting, blocking
from ..machine.sync import BarrierWait, NamedWait
from ..memory.clocks import PRECEDING
from ..memory.findings import Finding, Kind
from ..memory.shared import MemDesc

_HARDWARE_BARRIERS = 16  # of a block
_WARP = 32


@acting("ttng.init_barrier")
def _init(op: Op) -> Callable[..., Any]:
    copies = barrier_copies(op, op.inputs[0])
    count = int(op.text.split(",")[1].split()[0]) << copies.bit_count()

    def run(role: Any, view: MemDesc) -> None:
        if not role.program.cta & copies:
            role.barrier(view).init(count, role, alone=role.program.cluster.count == 1)

    return run


@acting("ttng.inval_barrier")
def _inval(op: Op) -> Callable[..., Any]:
    copies = barrier_copies(op, op.inputs[0])

    def run(role: Any, view: MemDesc) -> None:
        if not role.program.cta & copies:
            role.barrier(view).invalidate(role)

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

    def run(role: Any, view: MemDesc, predicate: Any = True) -> Any:
        yield from role.run.pause()
        if predicate:
            for cta in targets(role.program.cta):
                role.barrier(view, cta).expect(nbytes)
                arrive(role, view, 1, cta)

    return run


@blocking("ttng.arrive_barrier")
def _arrive(op: Op) -> Callable[..., Any]:
    count, targets = int(op.text.split(",")[1].split()[0]), _targets(op)

    def run(role: Any, view: MemDesc, predicate: Any = True) -> Any:
        yield from role.run.pause()
        if predicate:
            for cta in targets(role.program.cta):
                arrive(role, view, count, cta)

    return run


def arrive(role: Any, view: MemDesc, count: int, cta: int | None = None) -> None:
    """Do `count` arrivals of a role on the barrier in `view`, of its own CTA or another."""
    role.barrier(view, cta).arrive(count, role.clock, role.place())
    role.advance()


@blocking("ttng.cluster_barrier")
def _cluster_barrier(op: Op) -> Callable[..., Any]:
    relaxed = op.flag("relaxed")

    def run(role: Any) -> Any:
        yield from role.run.pause()
        if op.ctas is not None:
            yield from role.program.cluster.meet(role, relaxed, op.uid if op.in_role else 0)

    return run


@blocking("ttng.wait_barrier")
def _wait(op: Op) -> Callable[..., Any]:
    copies = barrier_copies(op, op.inputs[0])

    def run(role: Any, view: MemDesc, parity: int, predicate: Any = True, *_: Any) -> Any:
        if not predicate or role.program.cta & copies:
            return
        yield from role.run.pause()
        barrier = role.barrier(view)
        if not barrier.usable(role.place(), "waits on", role.clock):
            return
        if barrier.awaited(parity, role) == barrier.phase:
            wait = BarrierWait(barrier)
            yield wait
            if barrier.phase > wait.target:
                place = role.place()
                text = f"{place} waits for phase {wait.target - 1} of barrier {barrier.name}, and phase {wait.target} "
                text += "completes, too, before it has seen that: on the card it may miss both"
                role.run.findings.add(
                    Finding("PhaseError", text, (place,), barrier=barrier.name, phase=wait.target - 1)
                )
        role.learn(barrier.released)

    return run


def meet(role: Any, number: int, needed: int, waits: bool = True, alone: bool = False) -> Any:
    """Let all threads of a role arrive at a hardware barrier that `needed` threads complete; with `waits` they also
    wait for that. `alone`: the role's own threads are all that may take part."""
    own = _WARP * role.num_warps
    for fault in _misuses(number, needed, role.run.module.own_barriers, own if alone else 0):
        _report_named(role, "PhaseError", number, f"uses named barrier {number}{fault}")
    yield from role.run.pause()
    barrier = role.program.named_barrier(number)
    if barrier.arrived and barrier.needed != needed:
        text = f"uses named barrier {number} for {needed} threads, and others for {barrier.needed}"
        _report_named(role, "PhaseError", number, text)
    if not barrier.follows(role.clock):
        text = f"arrives at named barrier {number}, and nothing orders that after all threads have arrived there that "
        _report_named(role, "PhaseRace", number, text + "completed it last: on the card it may be counted among them")
    wait = NamedWait(barrier, needed)
    fits = barrier.arrive(own, needed, role.clock)
    role.advance()
    if not fits:
        text = f"arrives at named barrier {number}, which then has more than {needed} threads"
        _report_named(role, "PhaseError", number, text)
    if waits:
        if not wait.ready():
            yield wait
        role.learn(barrier.released)


def _misuses(number: int, needed: int, compilers: int, voters: int) -> list[str]:
    """Say what is wrong with the number and the count of a hardware barrier."""
    faults = []
    if number < compilers:
        faults.append(f"; in this kernel the compiler has 0 to {compilers - 1}")
    if number >= _HARDWARE_BARRIERS:
        faults.append(f"; a block has 0 to {_HARDWARE_BARRIERS - 1}")
    if needed % _WARP or not needed:
        faults.append(f" for {needed} threads, which are no whole warps")
    elif voters not in (0, needed):
        faults.append(f" for a vote of {needed} threads; the role has {voters}")
    return faults


def _report_named(role: Any, kind: Kind, number: int, text: str) -> None:
    place = role.place()
    role.run.findings.add(Finding(kind, f"{place} {text}", (place,), barrier=str(number)))


@acting("tt.grid_dependency_wait")
def _preceding_launch(op: Op) -> Callable[..., Any]:
    """Learn that the preceding launch has ended, with all its writes."""

    def run(role: Any) -> None:
        role.clock.mark(PRECEDING, 1)

    return run


