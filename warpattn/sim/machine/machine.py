"""The machine: programs of a grid, their roles, and who runs next.

    Machine ─ up to `in_flight` Programs ─ Tasks (one per role: a generator over the IR) ─ issue ─▶ Agents (the Queue)

One role runs at a time, until it has to wait; with the random schedule it may be interrupted at every synchronising
operation. When nobody can run, the queue runs a piece of asynchronous work; when there is none, it is a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import product
from random import Random
from typing import Any

from ..errors import StopRun
from ..ir.locations import enclosing_function
from ..ir.module import Block, Module, Op
from ..memory.clocks import Clock, Lanes, Pool, joined, knows, marked
from ..memory.findings import Finding, Findings, Place
from ..memory.global_memory import GlobalMemory, Toucher
from ..memory.shared import Access, MemDesc
from .agents import Agent, Queue
from .clusters import Cluster
from .deadlock import deadlock
from .interpreter import run_block
from .sync import Barrier, NamedBarrier, TasksWait, Wait

_SPINNING = 32  # rounds in which roles only spin before asynchronous work goes on beside them


class Program:
    """One CTA of a program of the grid."""

    def __init__(self, machine: Machine, index: tuple[int, int, int], cluster: Cluster, cta: int) -> None:
        self.index, self.cluster, self.cta = index, cluster, cta
        self.pool = Pool(machine.lanes, "copy")
        self.loads: dict[int, Agent] = {}  # the newest copy of every lane
        self.name = "" if cluster.count == 1 else f" of CTA {cta}"
        self.name += "" if machine.grid == (1, 1, 1) else f" of program {index}"
        cluster.names.append(self.name)
        self._named: dict[int, NamedBarrier] = {}

    def named_barrier(self, number: int) -> NamedBarrier:
        return self._named.setdefault(number, NamedBarrier(number))


class Task:
    """One role of a program."""

    def __init__(self, machine: Machine, program: Program, name: str, num_warps: int, clock: Clock) -> None:
        self.machine, self.program, self.num_warps = machine, program, num_warps
        self.role = name + program.name
        self.lane = machine.lanes.new(self.role)
        self.clock = marked(clock, self.lane, 1)
        self.clock[1, self.lane] = 0
        self.steps: Generator[Wait | None, None, Any] | None = None
        self.wait: Wait | None = None
        self.done = False
        self.op: Op | None = None
        self.last_run = 0
        self.products: list[Agent] = []  # matrix products that were not waited for
        self._last_product: Agent | None = None
        self._product_lane = -1
        self._product_epoch = 0
        self.stores: list[tuple[Agent, Agent]] = []  # bulk stores: (reads shared memory, writes global memory)
        self.unwritten: list[tuple[Agent, Agent]] = []  # those of which only the reading was waited for
        self.copies: list[Agent] = []  # cp.async that is in no group yet
        self.groups: list[list[Agent]] = []  # groups that were not waited for

    def place(self) -> Place:
        """This role at its present op."""
        return Place(self.role, self.op.frames if self.op else ())

    def toucher(self) -> Toucher:
        """Who accesses global memory; in an epoch of its own, so that a race names the right line."""
        self.advance()
        return Toucher(self.lane, int(self.clock[0, self.lane]), self.clock, self.place())

    def access(self, view: MemDesc, writes: bool) -> Access:
        return Access(view, self.lane, int(self.clock[0, self.lane]), writes, False, self.place(), self.program.cta)

    def advance(self) -> None:
        """Begin a new epoch: what this role does from now on is not covered by what it has released."""
        self.clock[0, self.lane] += 1

    def learn(self, other: Clock | None) -> None:
        if other is not None:
            self.clock = joined(self.clock, other)

    def barrier(self, view: MemDesc, cta: int | None = None) -> Barrier:
        """The mbarrier whose bytes `view` shows, of this or another CTA."""
        cta = self.program.cta if cta is None else cta
        buffer, key = view.buffer, (cta, view.low)
        found = buffer.barriers.get(key)
        if found is None:
            name = buffer.name if buffer.nbytes == 8 else f"{buffer.name}[{view.low // 8}]"
            name += f" of CTA {cta}" if len(view.array) > 1 else ""
            found = buffer.barriers[key] = Barrier(name, self.machine.findings, buffer.allocation)
        return found

    def issue(self, engine: str, pool: Pool, body: Callable[[Agent], None], after: Agent | None = None) -> Agent:
        """Start a copy that knows what this role knows."""
        clock = self.clock.copy()
        if after is not None:
            clock = marked(clock, after.lane, after.epoch)
        lane, epoch = pool.take(clock)
        agent = Agent(engine, self.place(), marked(clock, lane, epoch), (lane, epoch), body)
        agent.after, agent.cta = after, self.program.cta
        self.advance()
        if engine == "TMA load":
            self.program.loads[lane] = agent
        self.machine.queue.add(agent)
        return agent

    def issue_product(self, body: Callable[[Agent], None], engine: str = "wgmma") -> Agent:
        """Start a matrix product; those of a role run in order, on one lane. Only wgmma is waited for by the role."""
        if self._product_lane < 0:
            self._product_lane = self.machine.lanes.new(f"products of {self.role}")
        self._product_epoch += 1
        lane, epoch = self._product_lane, self._product_epoch
        agent = Agent(engine, self.place(), marked(self.clock.copy(), lane, epoch), (lane, epoch), body)
        last, agent.cta = self._last_product, self.program.cta
        agent.after = None if last is None or last.done else last
        self._last_product = agent
        self.advance()
        if engine == "wgmma":
            self.products.append(agent)
        self.machine.queue.add(agent)
        return agent

    def trim_stores(self, count: int, read_only: bool) -> None:
        """The first `count` stores have been waited for: they have read shared memory, or also written."""
        self.unwritten = self.unwritten + self.stores[:count] if read_only else []
        del self.stores[:count]

    def out_of_bounds(self, text: str, place: Place, buffer: str) -> None:
        self.machine.findings.add(Finding("OutOfBounds", text, (place,), buffer))

    def finish(self) -> None:
        """The role has ended: report what it leaves under way."""
        self.done = True
        copies = [agent for group in [*self.groups, self.copies] for agent in group]
        for agent in [reader for reader, _ in self.stores] + self.products + copies:
            self.machine.pending_at_exit(agent, "nobody waits for it before the role ends")


class Machine:
    """A run of a kernel."""

    def __init__(self, module: Module, grid: tuple[int, int, int], schedule: str, seed: int) -> None:
        self.module, self.grid, self.schedule = module, grid, schedule
        self.rng = Random(seed)
        self.findings = Findings()
        self.memory = GlobalMemory(self.findings)
        self.lanes = Lanes()
        self.front = self.lanes.new("the launch in front")
        self.queue = Queue(schedule, self.rng)
        self.tasks: list[Task] = []
        self.roles: dict[str, str] = {}  # partition -> role
        self.steps = 0
        self.step_limit = 0
        self._preempt = schedule == "random"

    def run(self, arguments: Sequence[Any], in_flight: int, step_limit: int) -> None:
        """Run every program of the grid."""
        self.step_limit = step_limit
        waiting = [(x, y, z) for z, y, x in product(*(range(n) for n in reversed(self.grid)))][::-1]
        spins = 0
        try:
            while waiting or self.tasks:
                while waiting and len({task.program.index for task in self.tasks}) < in_flight:
                    self._launch(waiting.pop(), arguments)
                ready = [task for task in self.tasks if task.wait is None or task.wait.ready()]
                if not ready:
                    if not self.queue.run_one():
                        deadlock(self)
                    continue
                spun = self._turn(ready)
                spins = spins + 1 if spun else 0
                if spins > _SPINNING * max(1, len(self.tasks)):
                    self.queue.run_one()
                    spins = 0
            while self.queue.run_one():
                pass
        except StopRun:
            pass

    def _launch(self, index: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        block, cluster = self.module.functions[self.module.entry], Cluster(self.module.num_ctas)
        for cta in range(cluster.count):
            program = Program(self, index, cluster, cta)
            task = Task(self, program, self.module.entry, self.module.num_warps, self.lanes.clock())
            frame: list[Any] = [None] * block.frame
            for slot, value in zip(block.slots, arguments, strict=False):
                frame[slot] = value
            task.steps = self._main(task, block, frame)
            self.tasks.append(task)

    def _main(self, task: Task, block: Block, frame: list[Any]) -> Generator[Wait | None, None, Any]:
        yield from run_block(task, block, frame)
        if task.program.cluster.count > 1:
            yield from task.program.cluster.meet(task)  # nobody leaves while others may reach its memory
        for agent in task.program.loads.values():
            if not knows(task.clock, agent.lane, agent.epoch):
                self.pending_at_exit(agent, "the program ends without knowing that it has landed")

    def _turn(self, ready: list[Task]) -> bool:
        """Let one role run, or several in turn; whether all of them only spun."""
        if self.schedule == "random":
            agents = len(self.queue.pending)
            pick = self.rng.randrange(len(ready) + min(agents, 2))
            if pick >= len(ready):
                self.queue.run_one()
                return False
            return self._step(ready[pick])
        if self.schedule == "adversarial":
            return self._step(max(ready, key=lambda task: task.last_run))
        spun = True
        for task in ready:
            spun &= self._step(task)
        return spun

    def _step(self, task: Task) -> bool:
        """Run a role until it yields; whether it yields without waiting for anything."""
        self.tick()
        task.wait = None
        assert task.steps is not None
        try:
            task.wait = next(task.steps)
        except StopIteration:
            task.finish()
            self.tasks.remove(task)
            return False
        # A role that only lets others go first comes last; one that waits was the last to run and runs first again.
        task.last_run = -self.steps if task.wait is None else self.steps
        return task.wait is None

    def pause(self) -> Generator[None, None, None]:
        """A point at which another role may go first."""
        if self._preempt:
            yield None

    def tick(self) -> None:
        self.steps += 1
        if self.steps > self.step_limit:
            roles = ", ".join(str(task.place()) for task in self.tasks[:8])
            places = tuple(task.place() for task in self.tasks)
            self.findings.add(
                Finding("StepLimit", f"no end after {self.step_limit} steps; running are {roles}", places)
            )
            raise StopRun

    def specialize(
        self, task: Task, own: Block, partitions: list[Block], captured: list[Any], registers: list[Any]
    ) -> Generator[Wait | None, None, None]:
        """Split a program into roles, and go on when all of them have ended."""
        roles = []
        for block in partitions:
            role = Task(self, task.program, self._role(block, task), block.num_warps, task.clock.copy())
            role.clock[0, role.lane] = 1
            frame: list[Any] = [None] * block.frame
            for slot, value in zip(block.slots, captured, strict=False):
                frame[slot] = value
            role.steps = run_block(role, block, frame)
            roles.append(role)
        self.tasks += roles
        task.advance()
        name, task.role = task.role, self._role(own, task) + task.program.name
        yield from run_block(task, own, registers)
        wait = TasksWait(roles)
        if not wait.ready():
            yield wait
        task.role = name
        for role in roles:
            task.learn(role.clock)

    def _role(self, block: Block, task: Task) -> str:
        """The name of a partition: the function that was given to warp_specialize."""
        around = {enclosing_function(*frame) for frame in (task.op.frames if task.op else ())}
        self.roles[block.label] = name = self._first_function(block, around | {self.module.entry, ""})
        return name

    def _first_function(self, block: Block, around: set[str]) -> str:
        for op in block.ops:
            for frame in reversed(op.frames):
                name = enclosing_function(*frame)
                if name not in around:
                    return name
        return block.label

    def pending_at_exit(self, agent: Agent, why: str) -> None:
        text = f"the {agent.engine} of {agent.place} is under way at the end: {why}"
        self.findings.add(Finding("PendingAtExit", text, (agent.place,)))


__all__ = ["Machine", "Program", "Task"]
