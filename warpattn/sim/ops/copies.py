"""Copies in commit groups (cp.async of sm_80 and later, LDS on AMD), and descriptors that the kernel makes itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..ir.formats import encode, register_dtype
from ..ir.module import Op
from ..ir.parts import from_registers
from ..machine.agents import Agent
from ..machine.registry import acting, blocking, plain
from ..machine.sync import AgentWait, all_but_newest
from ..memory.clocks import Clock
from ..memory.descriptor import make_descriptor
from ..memory.global_memory import Toucher
from ..memory.shared import Access, MemDesc
from .memory import load_pointers, pointee


@blocking("ttg.async_copy_global_to_local")
def _copy(op: Op) -> Callable[..., Any]:
    kind = pointee(op.inputs[0])
    masked = re.search(r"\bmask %", op.text) is not None
    dtype = register_dtype(kind.elem)
    part = from_registers(op, op.inputs[0], [*op.inputs, *op.outputs][1])

    def run(role: Any, pointers: Any, view: MemDesc, *rest: Any) -> Any:
        yield from role.run.pause()
        mask = rest[0] if masked else None
        other = rest[1] if masked and len(rest) > 1 else None
        addresses, mask, other = (x if x is None else part(x, role.program.cta) for x in (pointers, mask, other))

        def body(agent: Agent) -> None:
            who = Toucher(agent.lane, agent.epoch, agent.clock, agent.place)
            values = load_pointers(role.run.memory, who, kind, addresses, mask, other)
            access = Access(view, agent.lane, agent.epoch, True, False, agent.place, agent.cta)
            bits = encode(np.asarray(values, dtype), kind.elem)
            if amd and mask is not None and other is None:
                _write_where(access, agent.clock, bits, np.asarray(mask, np.bool_))
            else:
                view.buffer.write(access, agent.clock, bits)

        amd = role.run.module.backend == "hip"
        engine = "copy to LDS" if amd else "cp.async"
        role.before_copies = role.clock.copy()
        role.copies.append(role.issue(engine, role.program.ordinary, body))

    return run


def _write_where(access: Access, clock: Clock, bits: np.ndarray, mask: np.ndarray) -> None:
    """Write only where the mask is on, as AMD's copies by pointers do; cp.async writes zeros elsewhere."""
    view = access.view
    view.buffer.touch(access, clock)
    np.copyto(view.array[0], bits, where=mask)
    np.copyto(view.written[0], np.iinfo(view.written.dtype).max, where=mask)


@acting("ttg.async_commit_group")
def _commit(op: Op) -> Callable[..., Any]:
    def run(role: Any, *tokens: Any) -> None:
        role.groups.append(role.copies)
        role.copies = []

    return run


@blocking("ttg.async_wait")
def _wait(op: Op) -> Callable[..., Any]:
    allowed = op.integer("num")

    def run(role: Any, *tokens: Any) -> Any:
        yield from role.run.pause()
        over = all_but_newest(role.groups, allowed)
        agents = [agent for group in over for agent in group]
        wait = AgentWait(agents, "its copies to shared memory")
        if not wait.ready():
            yield wait
        for agent in agents:
            role.clock.mark(agent.lane, agent.epoch, fenced=False)
        del role.groups[: len(over)]

    return run


@blocking("ttng.async_copy_mbarrier_arrive")
def _arrive_behind(op: Op) -> Callable[..., Any]:
    """Let every thread arrive on an mbarrier when its copies so far are done. The phase counts these arrivals in
    addition to its own, unless `noIncrement`."""
    counted = not op.flag("noIncrement")

    def run(role: Any, view: MemDesc) -> Any:
        yield from role.run.pause()
        barrier, threads, before = role.barrier(view), 32 * role.num_warps, role.before_copies
        copies = [agent for group in [*role.groups, role.copies] for agent in group]
        if counted:
            barrier.follow(threads, role)

        def body(agent: Agent) -> None:
            for copy in copies:
                copy.run()
            barrier.arrive_after(threads, copies, before, agent)

        role.issue("cp.async", role.program.ordinary, body)
        role.program.loads |= {copy.lane: copy for copy in copies}  # any role may wait for the barrier
        role.copies = [copy for copy in role.copies if not role.clock.knows(copy.lane, copy.epoch)]

    return run


class Scratch:
    """A place in global scratch memory that holds a descriptor."""

    def __init__(self) -> None:
        self.tensor: tuple[int, list[int], list[int]] | None = None  # address, shape, strides in bytes
        self.nan = False  # what is outside


@acting("ttg.global_scratch_alloc")
def _scratch(op: Op) -> Callable[..., Any]:
    return lambda role: Scratch()


@acting("ttng.tensormap_create")
def _create(op: Op) -> Callable[..., Any]:
    """Operands: place, address, [box], [sizes], [strides in bytes but the last], [element strides], innermost first."""
    lists = [len(re.findall(r"%", part)) for part in re.findall(r"\[([^\]]*)\]", op.text)]
    if len(lists) != 4:
        raise op.error("this descriptor is not understood")
    rank = lists[1]

    def run(role: Any, place: Scratch, address: int, *numbers: int) -> None:
        sizes = numbers[lists[0] : lists[0] + rank]
        strides = numbers[lists[0] + rank : lists[0] + rank + lists[2]]
        place.nan = op.integer("fill_mode", 0) != 0
        place.tensor = (address, [int(n) for n in reversed(sizes)], [int(n) for n in reversed(strides)])

    return run


@plain("ttng.tensormap_fenceproxy_acquire")
def _acquire(op: Op) -> Callable[..., Any]:
    return lambda place: None


@acting("ttng.reinterpret_tensor_descriptor")
def _reinterpret(op: Op) -> Callable[..., Any]:
    kind = op.outputs[0]

    def run(role: Any, place: Scratch) -> Any:
        if place.tensor is None:
            raise op.error("no descriptor was made here")
        address, shape, strides = place.tensor
        steps = [s // kind.itemsize for s in strides] + [1]
        return make_descriptor(role.run.memory, address, shape, steps, kind, place.nan)

    return run
