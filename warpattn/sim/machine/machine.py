"""The machine: programs of a grid, their roles, and who runs next.

    Machine ─ up to `in_flight` Programs ─ Tasks (one per role: a generator over the IR) ─ issue ─▶ Agents (the Queue)

One role runs at a time, until it has to wait; with the random schedule it may be interrupted at every synchronising
operation. When no role can run, the queue runs one piece of asynchronous work; with none left, the run is deadlocked.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from ..errors import StopRun
from ..ir.locations import enclosing_function
from ..ir.module import Block
from .clusters import Cluster
from .deadlock import deadlock, livelock
from .interpreter import hoisted, run_block
from .roles import Program, Run, Steps, Task, TasksWait

_SPINNING = 32  # rounds in which roles only spin before asynchronous work runs beside them
_IDLE = 100  # a run may take 1 / _IDLE of the step limit without changing anything

_RESIDENT = 2  # programs side by side in kernels that cancel programs: with fewer, more are left to cancel


class Machine(Run):
    """A run of a kernel."""

    _changes = _changed = 0  # the count of changes at the last look, and its step

    def run(self, arguments: Sequence[Any]) -> None:
        """Run every program of the grid."""
        in_flight = self.options.in_flight
        if "ttng.clc_try_cancel" in self.module.text:
            in_flight = min(in_flight, _RESIDENT)
        waiting = self.waiting = [(x, y, z) for z, y, x in product(*(range(n) for n in reversed(self.grid)))][::-1]
        block, registers = self._entry(arguments)
        spins = 0
        try:
            while waiting or self.tasks:
                self.progress.tell(len(waiting), self.steps)
                while waiting and len({task.program.index for task in self.tasks}) < in_flight:
                    self._launch(waiting.pop(), block, registers)
                ready = [task for task in self.tasks if task.wait is None or task.wait.ready()]
                if not ready:
                    if not self._run_agent():
                        deadlock(self)
                    continue
                spun = self._turn(ready)
                spins = spins + 1 if spun else 0
                if spun and self._goes_round():
                    if not self._run_agent():
                        livelock(self)
                elif spins > _SPINNING * max(1, len(self.tasks)):
                    self._run_agent()
                    self._idle()
                    spins = 0
            while self._run_agent():
                pass
        except StopRun:
            pass
        finally:
            self.progress.close()

    def _run_agent(self) -> bool:
        """Run one piece of asynchronous work; false if none is left."""
        ran = self.queue.run_one()
        self.changes += ran
        return ran

    def _goes_round(self) -> bool:
        """Whether roles can only repeat loops that change nothing."""
        state = self.state()
        return all(
            not task.wait.ready() if task.wait is not None else task.loop is not None and task.loop.still == state
            for task in self.tasks
        )

    def _idle(self) -> None:
        """Limit how long roles may repeat loops that only change their own values."""
        if self.changes != self._changes:
            self._changes, self._changed = self.changes, self.steps
        idle = max(1, self.options.step_limit // _IDLE)
        if self.steps - self._changed > idle:
            why = f"in {idle:,} steps (step_limit / {_IDLE}) nothing changes but loops' own values: "
            self.stop(why + self.whereabouts(), [task.at() for task in self.tasks])

    def cancel_one(self) -> tuple[int, int, int] | None:
        """Cancel a program that has not started; return its place in the grid, None if all have started."""
        return self.waiting.pop() if self.waiting else None

    def _launch(self, index: tuple[int, int, int], block: Block, registers: list[Any]) -> None:
        cluster = Cluster(self.module.num_ctas)
        for cta in range(cluster.count):
            program = Program(self, index, cluster, cta)
            task = Task(self, program, self.module.entry, self.module.num_warps, self.lanes.clock())
            task.steps = self._main(task, block, registers.copy())
            self.tasks.append(task)
        self.changes += 1

    def _entry(self, arguments: Sequence[Any]) -> tuple[Block, list[Any]]:
        """Return what every program runs and its first registers; ops equal in all programs are computed once."""
        block = self.module.functions[self.module.entry]
        registers: list[Any] = [None] * block.frame
        for slot, value in zip(block.slots, arguments, strict=False):
            registers[slot] = value
        return hoisted(block, registers), registers

    def _main(self, task: Task, block: Block, frame: list[Any]) -> Steps:
        yield from run_block(task, block, frame)
        if task.program.cluster.count > 1:
            yield from task.program.cluster.meet(task)  # no CTA ends while others may access its memory
        for agent in task.program.loads.values():
            if not task.clock.knows(agent.lane, agent.epoch):
                self.pending_at_exit(agent, "the program ends without waiting for it")

    def _turn(self, ready: list[Task]) -> bool:
        """Run one role, or several in turn; return whether all of them only spun."""
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
        """Run a role until it yields; return whether it yields without waiting."""
        self.tick()
        task.wait = None
        assert task.steps is not None
        self.changes += task.op is not None and task.op.acts  # it may be in the middle of the op
        try:
            task.wait = next(task.steps)
        except StopIteration:
            task.finish()
            self.tasks.remove(task)
            self.changes += 1
            return False
        # A role that only yields runs last; one that waits ran most recently and runs first again.
        task.last_run = -self.steps if task.wait is None else self.steps
        return task.wait is None

    def specialize(
        self, task: Task, own: Block, partitions: list[Block], captured: list[Any], registers: list[Any]
    ) -> Steps:
        """Split a program into roles, wait until all have ended, and return the default role's results."""
        roles = []
        task.clock.synchronise()
        for block in partitions:
            role = Task(self, task.program, self._role(block, task), block.num_warps, task.clock.copy())
            frame: list[Any] = [None] * block.frame
            for slot, value in zip(block.slots, captured, strict=False):
                frame[slot] = value
            role.steps = run_block(role, block, frame)
            roles.append(role)
        self.tasks += roles
        task.advance()
        name, task.role = task.role, self._role(own, task) + task.program.name
        results = yield from run_block(task, own, registers)
        wait = TasksWait(roles)
        if not wait.ready():
            yield wait
        task.role = name
        for role in roles:
            task.learn(role.clock)
        task.clock.synchronise()
        return results

    def _role(self, block: Block, task: Task) -> str:
        """Return the name of a partition: the function given to warp_specialize."""
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
