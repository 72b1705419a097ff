"""Records what the roles of a run do, so that `replay` can compute when they would do it.

Runs without timing are not affected: a separate module is linked, whose operations report to the queue of asynchronous
work. Waits need no record: what a role's vector clock has learned during an operation is what the operation waited
for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import Any, NamedTuple

from ..ir.module import Block, Module, Op, parse_module
from ..link import link
from ..machine.agents import Agent, Queue
from ..machine.registry import ACTING, BLOCKING, FLOW, PLAIN
from .cost import FREE, Chip, Price, asynchronous, chip_of, prices

_ARITHMETIC = {
    "tt.reduce", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.split", "tt.join", "tt.bitcast",
    "tt.elementwise_inline_asm", "ttg.convert_layout",
}  # fmt: skip
_REGIONS = ("scf.if", "scf.for", "scf.while", "tt.call")


class Recording(NamedTuple):
    """A module whose operations report to a Recorder, the chip, and the prices of the operations by their uid."""

    module: Module
    chip: Chip
    prices: dict[int, Price]


class Started(NamedTuple):
    """Asynchronous work: the lane and epoch that mark its end, the work before it, and its price."""

    engine: str
    lane: int
    epoch: int
    after: tuple[int, int] | None
    price: Price


class Event(NamedTuple):
    """An operation of a role: what it waits for (lanes and epochs), costs and starts, and the epoch it ends in."""

    op: Op | None
    needs: tuple[tuple[int, int], ...]
    price: Price
    started: tuple[Started, ...]
    epoch: int


class Log:
    """What one role did."""

    def __init__(self, role: Any) -> None:
        self.lane, self.warps, self.program = role.lane, role.num_warps, role.program.index
        self.names = [role.name.removesuffix(role.program.name)]
        self.events: list[Event] = []
        self.started: list[Started] = []
        self.epoch = 0
        self.known = role.clock.empty()

    @property
    def role(self) -> str:
        """The name of the role; of the program itself only if it never becomes a role."""
        return self.names[min(1, len(self.names) - 1)]


class Recorder(Queue):
    """A queue of asynchronous work that also keeps the logs."""

    def __init__(self, schedule: str, rng: Random, recording: Recording) -> None:
        super().__init__(schedule, rng)
        self.chip, self.prices = recording.chip, recording.prices
        self.logs: dict[int, Log] = {}
        self.acting: tuple[Log, Op] | None = None

    def add(self, agent: Agent) -> None:
        """Note which role has started an agent, and add it as without a record."""
        if self.acting is not None:
            log, op = self.acting
            after = None if agent.after is None else (agent.after.lane, agent.after.epoch)
            price = asynchronous(op, agent.engine, agent.after is not None, self.chip)
            log.started.append(Started(agent.engine, agent.lane, agent.epoch, after, price))
        super().add(agent)

    def begin(self, role: Any, op: Op) -> Log:
        """Note that a role is about to execute an operation."""
        log = self.logs.get(role.lane)
        if log is None:
            log = self.logs[role.lane] = Log(role)
            self._note(log, role, None, FREE)
        elif role.clock.epoch(role.lane) != log.epoch:
            self._note(log, role, None, FREE)
        name = role.name.removesuffix(role.program.name)
        if name != log.names[-1]:
            log.names.append(name)
        self.acting = (log, op)
        return log

    def end(self, log: Log, role: Any, op: Op) -> None:
        """Note that the role has executed it."""
        self._note(log, role, op, self.prices.get(op.uid, FREE))
        self.acting = None

    def _note(self, log: Log, role: Any, op: Op | None, price: Price) -> None:
        needs = ()
        if op is None or op.kind != PLAIN:
            new = role.clock.since(log.known)
            needs = tuple(each for each in new if each[0] != log.lane)
            if new:
                log.known = role.clock.copy()
        epoch = role.clock.epoch(log.lane)
        if needs or log.started or price is not FREE or epoch != log.epoch:
            log.events.append(Event(op, needs, price, tuple(log.started), epoch))
            log.started, log.epoch = [], epoch


@lru_cache(16)
def recorded(text: str) -> Recording:
    """Link a separate module for a TTGIR text, whose operations report to a Recorder."""
    module = parse_module(text)
    chip = chip_of(module.target)
    for block in module.functions.values():
        _hoist(block)
    link(module)
    table: dict[int, Price] = {}
    for block in module.functions.values():
        table |= prices(block, chip)
        _instrument(block, table)
    return Recording(module, chip, table)


def _hoist(block: Block) -> None:
    """Move waits for matrix products where ptxas puts them: above the arithmetic before them.

    In the machine code of the sm_90 attention kernel (Triton 3.9), WARPGROUP.DEPBAR 0 is above the exponentials of its
    basic block, although the wait follows them in TTGIR. Arithmetic that reads the awaited results stays after it.
    """
    for op in list(block.ops):
        for region in op.regions:
            _hoist(region)
        if op.name != "ttng.warp_group_dot_wait":
            continue
        at = block.ops.index(op)
        while at and _passed(block.ops[at - 1], op):
            at -= 1
        block.ops.remove(op)
        block.ops.insert(at, op)


def _passed(other: Op, wait: Op) -> bool:
    arithmetic = other.name.startswith(("arith.", "math.", "ttg.memdesc_")) or other.name in _ARITHMETIC
    return arithmetic and not set(wait.operands) & {*other.operands, *other.results}


def _instrument(block: Block, table: dict[int, Price]) -> None:
    for op in block.ops:
        if not op.name.startswith(("tt.reduce", "tt.scan", "tt.map")):
            for region in op.regions:
                _instrument(region, table)
        if op.run is None or op.name in _REGIONS:
            continue
        if op.kind == PLAIN and op.uid in table:
            op.kind, op.run = ACTING, _plain(op, op.run)
            block.blocking = True
        elif op.kind == ACTING:
            op.run = _acting(op, op.run)
        elif op.kind in (BLOCKING, FLOW):
            op.run = _waiting(op, op.run)


def _plain(op: Op, inner: Callable[..., Any]) -> Callable[..., Any]:
    def run(role: Any, *values: Any) -> Any:
        result = inner(*values)
        queue = role.run.queue
        queue.end(queue.begin(role, op), role, op)
        return result

    return run


def _acting(op: Op, inner: Callable[..., Any]) -> Callable[..., Any]:
    def run(role: Any, *values: Any) -> Any:
        queue = role.run.queue
        log = queue.begin(role, op)
        result = inner(role, *values)
        queue.end(log, role, op)
        return result

    return run


def _waiting(op: Op, inner: Callable[..., Any]) -> Callable[..., Any]:
    def run(role: Any, *values: Any) -> Any:
        queue = role.run.queue
        log = queue.begin(role, op)
        steps = inner(role, *values)
        while True:
            queue.acting = (log, op)
            try:
                wait = next(steps)
            except StopIteration as stop:
                queue.end(log, role, op)
                return stop.value
            yield wait

    return run
