"""Computes when things would happen by replaying the logs of a run on the engines of a chip.

    logs of roles ─▶ replay, always the role that is first in time ─▶ Timing: spans of roles and engines, in cycles

Engines serve requests in order, but shared memory serves all at once: later requests get the bandwidth that earlier
ones leave. A program has an SM for itself; programs wait for a free one.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..ir.locations import Frame
from ..ir.module import Op
from .bandwidth import Bandwidth
from .cost import BANKS, PRODUCTS, Chip, Price
from .record import Event, Log, Started

_PIECE = 32.0  # cycles that a role keeps an engine before another may use it


class Span(NamedTuple):
    """An interval. kind: work, wait, or busy (of an engine); `who`: the role that requested an engine's work."""

    lane: str
    start: float
    end: float
    kind: str
    name: str
    frames: tuple[Frame, ...] = ()
    who: str = ""


@dataclass
class Timing:
    """The predicted times of a run, in cycles of an SM. `spans` are sorted by start within each lane."""

    chip: str
    cycles: float
    roles: tuple[str, ...]
    engines: tuple[str, ...]
    spans: list[Span] = field(default_factory=list, repr=False)

    def of(self, lane: str) -> list[Span]:
        """Return the spans of a role or an engine."""
        return [span for span in self.spans if span.lane == lane]

    def busy(self, lane: str) -> float:
        """Return the cycles in which a role works or an engine is busy."""
        return sum(span.end - span.start for span in self.spans if span.lane == lane and span.kind != "wait")

    def busiest(self, count: int = 3) -> list[tuple[str, float]]:
        """Return the busiest engines, with the mean share of time of all programs."""
        lanes: dict[str, list[float]] = defaultdict(list)
        for lane in self.engines:
            lanes[lane.partition(" of program ")[0]].append(self.busy(lane) / self.cycles)
        shares = ((engine, sum(found) / len(found)) for engine, found in lanes.items())
        return sorted(shares, key=lambda share: -share[1])[:count]


class _Role:
    """A log and how far it has been replayed."""

    def __init__(self, log: Log, label: str, sm: str) -> None:
        self.log, self.label, self.sm = log, label, sm
        self.at = 0
        self.time = 0.0
        self.asked = 0.0  # when the current event began
        self.left: list[tuple[str, float]] | None = None  # remaining work of the current event
        self.epoch = 0


class _Replay:
    def __init__(self, chip: Chip, logs: Iterable[Log]) -> None:
        self.chip = chip
        self.logs = list(logs)
        self.free: dict[tuple[str, str], float] = {}  # (SM, engine) -> when
        self.banks: defaultdict[str, Bandwidth] = defaultdict(Bandwidth)  # of an SM's shared memory
        self.ends: dict[int, tuple[int, float]] = {}  # lane -> its last epoch that has ended
        self.history: dict[tuple[int, int], float] = {}
        self.parked: dict[int, list[_Role]] = {}
        self.heap: list[tuple[float, int, _Role]] = []
        self.count = 0
        self.spans: list[Span] = []
        self.last = 0.0

    def run(self) -> Timing:
        programs: dict[tuple[int, int, int], list[Log]] = {}
        for log in self.logs:
            programs.setdefault(log.program, []).append(log)
        several = len(programs) > 1
        waiting = list(programs.items())[::-1]
        free = [0.0] * min(self.chip.sms, len(programs))
        left: dict[str, int] = {}
        ended: dict[str, float] = {}
        while waiting or self.heap or any(self.parked.values()):
            while waiting and free:
                index, logs = waiting.pop()
                sm = f" of program {index}" if several else ""
                left[sm], ended[sm] = len(logs), heapq.heappop(free)
                for log in logs:
                    role = _Role(log, log.role + sm, sm)
                    role.time = role.asked = ended[sm]
                    self.push(role)
            if not self.heap:
                self.release()
                continue
            role = heapq.heappop(self.heap)[2]
            if self.step(role):
                left[role.sm] -= 1
                ended[role.sm] = max(ended[role.sm], role.time)
                if not left[role.sm]:
                    heapq.heappush(free, ended[role.sm])
        roles = tuple(dict.fromkeys(span.lane for span in self.spans if span.kind != "busy"))
        engines = tuple(sorted({span.lane for span in self.spans if span.kind == "busy"}))
        return Timing(self.chip.name, self.last, roles, engines, _merged(self.spans))

    def push(self, role: _Role) -> None:
        self.count += 1
        heapq.heappush(self.heap, (role.time, self.count, role))

    def release(self) -> None:
        """Stop waiting when no role can continue, as after a deadlock."""
        for roles in self.parked.values():
            for role in roles:
                role.time = max(role.time, self.last)
                role.left = []
                self.push(role)
        self.parked = {}

    def step(self, role: _Role) -> bool:
        """Advance a role until its second request to an engine; return whether it has ended."""
        if role.at >= len(role.log.events):
            self.finish(role.log.lane, 1 << 60, role.time)
            return True
        event = role.log.events[role.at]
        if role.left is None and not self.ready(role, event):
            return False
        assert role.left is not None
        if role.left:
            self.work(role, event, *role.left[0])
            self.push(role)
            return False
        self.complete(role, event)
        return False

    def work(self, role: _Role, event: Event, engine: str, cycles: float) -> None:
        """Keep an engine busy for a piece of a role's work."""
        assert role.left is not None
        slow = max(1.0, self.chip.quarters / role.log.warps)
        why = (event.op, role.label)
        if engine == BANKS:
            role.time = self.draw(role.sm, role.time, cycles, 1 / slow, why)
            role.left.pop()
            return
        piece = min(cycles, _PIECE)
        role.time = self.reserve(role.sm, engine, role.time, piece, why) + piece * slow
        role.left[0] = (engine, cycles - piece)
        if cycles <= piece:
            role.left.pop(0)

    def ready(self, role: _Role, event: Event) -> bool:
        """Whether all that an event waits for has happened; parks the role if not."""
        role.asked = max(role.asked, role.time)
        begun = role.time
        for lane, epoch in event.needs:
            when = self.when(lane, epoch)
            if when is None:
                self.parked.setdefault(lane, []).append(role)
                return False
            begun = max(begun, when)
        if begun > role.time:
            self.span(Span(role.label, role.time, begun, "wait", _name(event.op), _frames(event.op)))
            role.time = begun
        role.asked = begun
        role.left = _slowest(event.price)
        if role.left:
            self.push_side(role, event)
        return True

    def push_side(self, role: _Role, event: Event) -> None:
        """Keep engines other than the slowest busy for their part."""
        chosen = role.left[0][0] if role.left else ""
        for engine, cycles in event.price.engines:
            if engine == chosen or cycles < 1:
                continue
            if engine == BANKS:
                self.draw(role.sm, role.time, cycles, 1.0, (event.op, role.label))
            else:
                self.reserve(role.sm, engine, role.time, cycles, (event.op, role.label))

    def complete(self, role: _Role, event: Event) -> None:
        """Finish an event: start its asynchronous work, and publish its epoch."""
        role.time += event.price.latency
        if role.time > role.asked:
            self.span(Span(role.label, role.asked, role.time, "work", _name(event.op), _frames(event.op)))
        for started in event.started:
            self.start(role, event, started)
        if event.epoch > role.epoch:
            self.finish(role.log.lane, event.epoch - 1, role.time)
            role.epoch = event.epoch
        role.at += 1
        role.left, role.asked = None, role.time
        self.push(role)

    def start(self, role: _Role, event: Event, started: Started) -> None:
        """Start asynchronous work on its engines, after its predecessors. Products only queue for their engine; one
        with an operand in registers holds the role until its last instruction has read it."""
        begin = role.time
        if started.engine not in PRODUCTS:
            before = started.after or (started.lane, started.epoch - 1)
            begin = max(begin, self.when(*before) or 0.0)
        end = self.serve(role.sm, begin, started, (event.op, role.label))
        self.finish(started.lane, started.epoch, end + started.price.latency)
        held = started.engine in PRODUCTS and event.op is not None and event.op.inputs[0].kind == "tensor"
        if held and end > role.time:
            self.span(Span(role.label, role.time, end, "wait", "operand in registers", _frames(event.op)))
            role.time = end

    def serve(self, sm: str, begin: float, started: Started, why: tuple[Op | None, str]) -> float:
        """Reserve the engine of asynchronous work and its bandwidth of shared memory; return the end. The engine is
        held until all bytes have been moved."""
        first = end = begin
        busy = [part for part in started.price.engines if part[0] != BANKS]
        for engine, cycles in busy:
            first = self.reserve(sm, engine, begin, cycles, why, started.engine)
            end = max(end, first + cycles)
        for engine, cycles in started.price.engines:
            if engine == BANKS and cycles:
                rate = min(1.0, cycles / (end - first)) if end > first else 1.0
                end = max(end, self.draw(sm, first, cycles, rate, why, started.engine))
        return end

    def draw(
        self, sm: str, when: float, cycles: float, rate: float, why: tuple[Op | None, str], what: str = ""
    ) -> float:
        """Move bytes in shared memory; return when all have been moved."""
        op, who = why
        drawn = self.banks[sm].draw(when, cycles, rate)
        for start, end in drawn.pieces:
            self.span(Span(BANKS + sm, start, end, "busy", what or _name(op), _frames(op), who))
        return drawn.end

    def reserve(
        self, sm: str, engine: str, when: float, cycles: float, why: tuple[Op | None, str], what: str = ""
    ) -> float:
        """Reserve an engine for some cycles, as soon as it is free; return the start."""
        key = (sm, engine)
        start = max(when, self.free.get(key, 0.0))
        self.free[key] = start + cycles
        op, who = why
        self.span(Span(engine + sm, start, start + cycles, "busy", what or _name(op), _frames(op), who))
        return start

    def finish(self, lane: int, epoch: int, when: float) -> None:
        """Note that every epoch of a lane up to `epoch` has ended by `when`."""
        before = self.ends.get(lane, (0, 0.0))[0]
        if epoch - before < 1 << 20:
            for e in range(before + 1, epoch + 1):
                self.history[lane, e] = when
        self.ends[lane] = (max(epoch, before), when)
        self.last = max(self.last, when)
        for role in self.parked.pop(lane, ()):
            self.push(role)

    def when(self, lane: int, epoch: int) -> float | None:
        """Return when an epoch of a lane ended; None if it has not."""
        last, time = self.ends.get(lane, (0, 0.0))
        return self.history.get((lane, epoch), time) if last >= epoch else None

    def span(self, span: Span) -> None:
        self.spans.append(span)
        self.last = max(self.last, span.end)


def _slowest(price: Price) -> list[tuple[str, float]]:
    return [max(price.engines, key=lambda part: part[1])] if price.engines else []


def _name(op: Op | None) -> str:
    if op is None:
        return "start"
    if "asm" in op.name and op.strings:
        return op.strings[0].replace("\\0A", " ").split(";")[0].strip(" {")[:40]
    return op.name.partition(".")[2]


def _frames(op: Op | None) -> tuple[Frame, ...]:
    return op.frames if op is not None else ()


def _merged(spans: list[Span]) -> list[Span]:
    """Sort spans by lane and start; join neighbours with the same name and line."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.lane, s.start)):
        last = merged[-1] if merged else None
        if last and last[0] == span[0] and last[3:] == span[3:] and span.start - last.end < 0.5:
            merged[-1] = last._replace(end=max(last.end, span.end))
        else:
            merged.append(span)
    return merged


def replay(chip: Chip, logs: Iterable[Log]) -> Timing:
    """Predict the times of a run's logs on a chip."""
    return _Replay(chip, logs).run()


