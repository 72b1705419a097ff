"""The machine: programs of a grid, their roles, and who runs next.

    Machine ─ up to `in_flight` Programs ─ Roles (generators over the IR) ─ issue ─▶ Agents (the Queue)

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
from .roles import Program, Role, RolesEnd, Run, Steps

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
            while waiting or self.roles:
                self.progress.tell(len(waiting), self.steps)
                while waiting and len({role.program.index for role in self.roles}) < in_flight:
                    self._launch(waiting.pop(), block, registers)
                ready = [role for role in self.roles if role.wait is None or role.wait.ready()]
                if not ready:
                    if not self._run_agent():
                        deadlock(self)
                    continue
                spun = self._turn(ready)
                spins = spins + 1 if spun else 0
                if spun and self._goes_round():
                    if not self._run_agent():
                        livelock(self)
                elif spins > _SPINNING * max(1, len(self.roles)):
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
            not role.wait.ready() if role.wait is not None else role.loop is not None and role.loop.still == state
            for role in self.roles
        )

    def _idle(self) -> None:
        """Limit how long roles may repeat loops that only change their own values."""
        if self.changes != self._changes:
            self._changes, self._changed = self.changes, self.steps
        idle = max(1, self.options.step_limit // _IDLE)
        if self.steps - self._changed > idle:
            why = f"in {idle:,} steps (step_limit / {_IDLE}) nothing changes but loops' own values: "
            self.stop(why + self.whereabouts(), [role.at() for role in self.roles])

    def cancel_one(self) -> tuple[int, int, int] | None:
        """Cancel a program that has not started; return its place in the grid, None if all have started."""
        return self.waiting.pop() if self.waiting else None

    def _launch(self, index: tuple[int, int, int], block: Block, registers: list[Any]) -> None:
        cluster = Cluster(self.module.num_ctas)
        for cta in range(cluster.count):
            program = Program(self, index, cluster, cta)
            role = Role(self, program, self.module.entry, self.module.num_warps, self.lanes.clock())
            role.steps = self._main(role, block, registers.copy())
            self.roles.append(role)
        self.changes += 1

    def _entry(self, arguments: Sequence[Any]) -> tuple[Block, list[Any]]:
        """Return what every program runs and its first registers; ops equal in all programs are computed once."""
        block = self.module.functions[self.module.entry]
        registers: list[Any] = [None] * block.frame
        for slot, value in zip(block.slots, arguments, strict=False):
            registers[slot] = value
        return hoisted(block, registers), registers

    def _main(self, role: Role, block: Block, frame: list[Any]) -> Steps:
        yield from run_block(role, block, frame)
        if role.program.cluster.count > 1:
            yield from role.program.cluster.meet(role)  # no CTA ends while others may access its memory
        for agent in role.program.loads.values():
            if not role.clock.knows(agent.lane, agent.epoch):
                self.pending_at_exit(agent, "the program ends without waiting for it")

    def _turn(self, ready: list[Role]) -> bool:
        """Run one role, or several in turn; return whether all of them only spun."""
        if self.schedule == "random":
            agents = len(self.queue.pending)
            pick = self.rng.randrange(len(ready) + min(agents, 2))
            if pick >= len(ready):
                self.queue.run_one()
                return False
            return self._step(ready[pick])
        if self.schedule == "adversarial":
            return self._step(max(ready, key=lambda role: role.last_run))
        spun = True
        for role in ready:
            spun &= self._step(role)
        return spun

    def _step(self, role: Role) -> bool:
        """Run a role until it yields; return whether it yields without waiting."""
        self.tick()
        role.wait = None
        assert role.steps is not None
        self.changes += role.op is not None and role.op.acts  # it may be in the middle of the op
        try:
            role.wait = next(role.steps)
        except StopIteration:
            role.finish()
            self.roles.remove(role)
            self.changes += 1
            return False
        # A role that only yields runs last; one that waits ran most recently and runs first again.
        role.last_run = -self.steps if role.wait is None else self.steps
        return role.wait is None

    def specialize(
        self, role: Role, own: Block, partitions: list[Block], captured: list[Any], registers: list[Any]
    ) -> Steps:
        """Split a program into roles, wait until all have ended, and return the default role's results."""
        workers = []
        role.clock.synchronise()
        for block in partitions:
            worker = Role(self, role.program, self._role(block, role), block.num_warps, role.clock.copy())
            frame: list[Any] = [None] * block.frame
            for slot, value in zip(block.slots, captured, strict=False):
                frame[slot] = value
            worker.steps = run_block(worker, block, frame)
            workers.append(worker)
        self.roles += workers
        role.advance()
        name, role.name = role.name, self._role(own, role) + role.program.name
        results = yield from run_block(role, own, registers)
        wait = RolesEnd(workers)
        if not wait.ready():
            yield wait
        role.name = name
        for worker in workers:
            role.learn(worker.clock)
        role.clock.synchronise()
        return results

    def _role(self, block: Block, role: Role) -> str:
        """Return the name of a partition: the function given to warp_specialize."""
        around = {enclosing_function(*frame) for frame in (role.op.frames if role.op else ())}
        self.role_names[block.label] = name = self._first_function(block, around | {self.module.entry, ""})
        return name

    def _first_function(self, block: Block, around: set[str]) -> str:
        for op in block.ops:
            for frame in reversed(op.frames):
                name = enclosing_function(*frame)
                if name not in around:
                    return name
        return block.label
