"""Asynchronous work: copies and matrix products that run beside the role that issued them, and when they run.

    eager         at once
    lazy          only when every role is blocked, the oldest first: data is absent for as long as it may be
    random        at any time, chosen by the seed
    adversarial   only when every role is blocked, the newest first; roles that ran last run last

Each agent carries a copy of its issuer's clock and its own lane, so its accesses count as ordered only if the kernel
orders them, not because the simulation ran them in some order.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from ..memory.clocks import Clock
from ..memory.findings import Place

SCHEDULES = ("eager", "lazy", "random", "adversarial")


class Agent:
    """One asynchronous operation."""

    __slots__ = (
        "after",
        "body",
        "clock",
        "cta",
        "done",
        "engine",
        "epoch",
        "lane",
        "missing",
        "number",
        "place",
        "result",
    )

    def __init__(
        self, engine: str, place: Place, clock: Clock, lane: tuple[int, int], body: Callable[[Agent], None]
    ) -> None:
        self.engine, self.place, self.clock, self.body = engine, place, clock, body
        self.lane, self.epoch = lane
        self.after: Agent | None = None  # runs only after that agent
        self.done = False
        self.result: Any = None
        self.missing: Any = None  # `Missing` elements of the result, or of its parts: they depend on unwritten operands
        self.number = 0
        self.cta = 0  # of the role that issued it

    def run(self) -> None:
        """Do the work, after the work that it depends on."""
        if self.done:
            return
        if self.after is not None:
            self.after.run()
        self.done = True
        self.body(self)


class Queue:
    """The agents that have not run."""

    def __init__(self, schedule: str, rng: Random) -> None:
        self.schedule, self.rng = schedule, rng
        self.pending: list[Agent] = []
        self.issued = 0

    def add(self, agent: Agent) -> None:
        self.issued += 1
        agent.number = self.issued
        if self.schedule == "eager":
            agent.run()
        else:
            self.pending.append(agent)

    def run_one(self) -> bool:
        """Run one agent that may run; false if none is left."""
        self.pending = [agent for agent in self.pending if not agent.done]
        ready = [agent for agent in self.pending if agent.after is None or agent.after.done]
        if not ready:
            return False
        if self.schedule == "random":
            chosen = self.rng.choice(ready)
        else:
            chosen = ready[-1] if self.schedule == "adversarial" else ready[0]
        self.pending.remove(chosen)
        chosen.run()
        return True
