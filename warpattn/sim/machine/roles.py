"""The state that operations act on: a run of a kernel, the CTAs of its programs, and their roles.

Run ── Program (one CTA of a program of the grid) ── Role (a generator over the IR)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from random import Random
from typing import Any, NoReturn, Protocol

from ..errors import StopRun
from ..ir.module import Module, Op
from ..memory.clocks import Clock, Lanes, Pool
from ..memory.findings import Finding, Findings, Place
from ..memory.global_memory import GlobalMemory, Toucher
from ..memory.shared import Access, MemDesc
from ..memory.warps import AssemblyStores, WarpAccesses
from ..options import Order, RunOptions
from .agents import Agent, Queue
from .clusters import Cluster
from .progress import Progress
from .states import LAST, Ended, keep
from .sync import Barrier, NamedBarrier, Wait

Steps = Generator[Wait | None, None, Any]
_TOLD = 256  # steps between two looks at the clock
_NAMED = 8  # most roles named in the report of a run that does not end


class Rounds(Protocol):
    """A loop without a fixed number of rounds."""

    op: Op
    still: tuple[int, int] | None  # the state in which a round changed nothing, the loop's own values neither

    def reason(self, role: Role) -> str:
        """Say why it repeats: what it reads, and the value there."""
        ...


class Run:
    """The state of a run that all roles share."""

    def __init__(self, module: Module, grid: tuple[int, int, int], order: Order, options: RunOptions) -> None:
        self.module, self.grid, self.schedule, self.options = module, grid, order.schedule, options
        self.rng = Random(order.seed)
        self.findings = Findings()
        self.memory = GlobalMemory(self.findings, options.fixed_order)
        self.lanes = Lanes()
        self.queue = Queue(order.schedule, self.rng)
        self.roles: list[Role] = []
        self.role_names: dict[str, str] = {}  # by partition
        self.kept: list[Program] = []  # those whose end the report shows
        self.waiting: list[tuple[int, int, int]] = []  # programs that have not started, the next one last
        self.progress = Progress(module.entry, math.prod(grid))
        self.steps = 0
        self.changes = 0  # of state that a role could see
        self.readings = 0  # of anything else: clocks, memory that the preceding launch may still write
        self._preempt = order.schedule == "random"

    def pause(self) -> Generator[None, None, None]:
        """Let another role run first, if the schedule wants that."""
        if self._preempt:
            yield None

    def tick(self) -> None:
        self.steps += 1
        if self.options.first_finding and self.findings.added:
            raise StopRun
        if not self.steps % _TOLD:
            self.progress.tell(len(self.waiting), self.steps)
        if self.steps > self.options.step_limit:
            why = f"no end after {self.options.step_limit:,} steps (step_limit): {self.whereabouts()}"
            self.stop(why, [role.at() for role in self.roles])

    def state(self) -> tuple[int, int]:
        """Identify the state that roles could see: while it stays equal, a role reads the same values."""
        return self.changes, self.readings

    def foresee(self, role: Role, rounds: int) -> None:
        """Stop the run if a role begins a loop of more rounds than the step limit leaves."""
        if self.steps + rounds > self.options.step_limit:
            place, limit = role.place(), f"{self.options.step_limit:,} steps (step_limit)"
            self.stop(f"{place} begins a loop of {rounds:,} rounds, and a run ends after {limit}", [place])

    def stop(self, why: str, places: Sequence[Place]) -> NoReturn:
        """Report that the run takes too long, and end it."""
        self.findings.add(Finding("StepLimit", why, tuple(places)))
        raise StopRun

    def whereabouts(self) -> str:
        """Say where the roles are, and what each waits for."""
        more = f"; and {len(self.roles) - _NAMED} more roles" if len(self.roles) > _NAMED else ""
        return "; ".join(role.whereabouts() for role in self.roles[:_NAMED]) + more

    def pending_at_exit(self, agent: Agent, why: str) -> None:
        text = f"the {agent.engine} of {agent.place} is under way at the end: {why}"
        self.findings.add(Finding("PendingAtExit", text, (agent.place,)))


class Program:
    """One CTA of a program of the grid."""

    def __init__(self, run: Run, index: tuple[int, int, int], cluster: Cluster, cta: int) -> None:
        self.index, self.cluster, self.cta = index, cluster, cta
        (width, height, _), (x, y, z) = run.grid, index
        self.number = ((z * height + y) * width + x) * cluster.count + cta  # as if each had an SM of its own
        self.pool = Pool(run.lanes)  # of work by the asynchronous proxy, which needs no fence to see its own
        self.ordinary = Pool(run.lanes)  # of other copies
        self.loads: dict[int, Agent] = {}  # the newest copy of every lane
        self.name = "" if cluster.count == 1 else f" of CTA {cta}"
        self.name += "" if run.grid == (1, 1, 1) else f" of program {index}"
        cluster.names.append(self.name)
        self.barriers: list[Barrier] = []
        self.ended: list[Ended] = []
        self.findings_before = run.findings.added
        self._named: dict[int, NamedBarrier] = {}

    def named_barrier(self, number: int) -> NamedBarrier:
        return self._named.setdefault(number, NamedBarrier(number))


class Role:
    """One role of a program, as it runs."""

    def __init__(self, run: Run, program: Program, name: str, num_warps: int, clock: Clock) -> None:
        self.run, self.program, self.num_warps = run, program, num_warps
        self.name = name + program.name
        self.lane, self.clock = run.lanes.new(), clock
        self.clock.mark(self.lane, 1, fenced=False)
        self.steps: Steps | None = None
        self.wait: Wait | None = None
        self.done = False
        self.op: Op | None = None
        self.loop: Rounds | None = None  # the last that went round
        self.events: deque[tuple[int, Op]] = deque(maxlen=LAST)
        self.last_run = 0
        self.warps = WarpAccesses()
        self.apart = AssemblyStores()
        self.products: list[Agent] = []  # matrix products that were not waited for
        self._last_product: Agent | None = None
        self._product_lane = -1
        self._product_epoch = 0
        self.stores: list[tuple[Agent, Agent]] = []  # bulk stores: (reads shared memory, writes global memory)
        self.stores_read = 0  # the oldest of them, whose reading was waited for
        self.copies: list[Agent] = []  # cp.async that is in no group yet
        self.before_copies: Clock | None = None  # what the role knew when it issued the last of them
        self.groups: list[list[Agent]] = []  # groups that were not waited for

    def place(self) -> Place:
        """Return this role at its current op."""
        return Place(self.name, self.op.frames if self.op else ())

    def at(self) -> Place:
        """Do the same, but for a role that repeats a loop with the loop's line."""
        return self.place() if self.wait is not None or self.loop is None else Place(self.name, self.loop.op.frames)

    def whereabouts(self) -> str:
        """Say where the role is, and what it waits for."""
        if self.wait is not None:
            return f"{self.place()} waits for {self.wait.describe()}"
        if self.loop is None:
            return f"{self.place()} runs"
        return f"{self.at()} goes round a loop {self.loop.reason(self)}"

    def toucher(self) -> Toucher:
        """Describe who accesses global memory, in a new epoch, so that a race names the right line."""
        self.advance()
        return Toucher(self.lane, self.clock.epoch(self.lane), self.clock, self.place(), cta=self.program.number)

    def access(self, view: MemDesc, writes: bool) -> Access:
        return Access(view, self.lane, self.clock.epoch(self.lane), writes, False, self.place(), self.program.cta)

    def store_apart(self, view: MemDesc) -> Access:
        """Describe a store by assembly, of which each warp does its own part; other warps need a barrier."""
        access = self.access(view, True)._replace(hidden=True)
        if self.num_warps > 1 and self.op is not None and self.op.meetings is not None:
            self.apart.add(access, self.op.meetings.anyway)
        return access

    def advance(self) -> None:
        """Begin a new epoch: earlier releases do not cover what this role does from now on."""
        self.clock.advance(self.lane)

    def learn(self, other: Clock | None) -> None:
        if other is not None:
            self.clock.join(other)

    def barrier(self, view: MemDesc, cta: int | None = None) -> Barrier:
        """Return the mbarrier in `view`, of this or another CTA."""
        cta = self.program.cta if cta is None else cta
        if view.stray:
            view.buffer.reached_outside(view, self.place())
        buffer, key = view.buffer, (cta, view.low)
        found = buffer.barriers.get(key)
        if found is None:
            name = buffer.name if buffer.nbytes == 8 else f"{buffer.name}[{view.low // 8}]"
            name += f" of CTA {cta}" if len(view.array) > 1 else ""
            found = buffer.barriers[key] = Barrier(name, self.run.findings, buffer.allocation)
            self.program.barriers.append(found)
        return found

    def issue(self, engine: str, pool: Pool, body: Callable[[Agent], None], after: Agent | None = None) -> Agent:
        """Start a copy that knows what this role knows."""
        clock = self.clock.copy()
        if after is not None:
            clock.mark(after.lane, after.epoch)
        lane, epoch = pool.take(clock)
        clock.mark(lane, epoch)
        agent = Agent(engine, self.place(), clock, (lane, epoch), body)
        agent.after, agent.cta = after, self.program.cta
        self.advance()
        if engine == "TMA load":
            self.program.loads[lane] = agent
        self.run.queue.add(agent)
        return agent

    def issue_product(self, body: Callable[[Agent], None], engine: str = "wgmma") -> Agent:
        """Start a matrix product; a role's products run in order, on one lane. Roles only wait for wgmma."""
        if self._product_lane < 0:
            self._product_lane = self.run.lanes.new()
        self._product_epoch += 1
        lane, epoch, clock = self._product_lane, self._product_epoch, self.clock.copy()
        clock.mark(lane, epoch)
        clock.admit_own(self.lane)
        agent = Agent(engine, self.place(), clock, (lane, epoch), body)
        last, agent.cta = self._last_product, self.program.cta
        agent.after = None if last is None or last.done else last
        self._last_product = agent
        self.advance()
        if engine == "wgmma":
            self.products.append(agent)
        self.run.queue.add(agent)
        return agent

    def stores_waited(self, count: int, read_only: bool) -> None:
        """Note that the oldest `count` stores were waited for: they have read shared memory, or also written."""
        if read_only:
            self.stores_read = max(self.stores_read, count)
        else:
            self.stores_read = max(0, self.stores_read - count)
            del self.stores[:count]

    def finish(self) -> None:
        """End the role: report what it leaves under way."""
        self.done = True
        copies = [agent for group in [*self.groups, self.copies] for agent in group if self._owes(agent)]
        for agent in [reader for reader, _ in self.stores[self.stores_read :]] + self.products + copies:
            self.run.pending_at_exit(agent, "the role ends without waiting for it")
        self.program.ended.append(Ended(self.name, tuple(self.events)))
        keep(self.run, self.program)

    def _owes(self, copy: Agent) -> bool:
        """Whether the role must have waited for a copy: it is no copy whose end an mbarrier tells."""
        return self.program.loads.get(copy.lane) is not copy and not self.clock.knows(copy.lane, copy.epoch)


class RolesEnd(Wait):
    """The end of other roles."""

    def __init__(self, roles: Sequence[Role]) -> None:
        self.roles = roles

    def ready(self) -> bool:
        return all(role.done for role in self.roles)

    def describe(self) -> str:
        return "the end of " + ", ".join(role.name for role in self.roles if not role.done)
