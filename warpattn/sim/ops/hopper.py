"""sm_90: mbarriers, copies between global and shared memory by TMA, asynchronous matrix products, fences.

copy in    lands its box (clipped, filled with zeros) and its bytes on a barrier
copy out   reads shared memory (what store_wait(read_only) waits for), then writes global memory
product    reads its operands from shared memory; products of one role run in their order
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..agents import Agent
from ..clocks import marked
from ..descriptor import Descriptor, make_descriptor
from ..findings import Finding
from ..formats import decode, register_dtype, rounder
from ..globalmem import Toucher
from ..ir import Op
from ..pending import Pending, Undefined
from ..registry import blocking, plain, tasked
from ..shared import Access, MemDesc
from ..sync import AgentWait, BarrierWait


@tasked("ttng.init_barrier")
def _init(op: Op) -> Callable[..., Any]:
    count = int(op.text.split(",")[1].split()[0])
    return lambda task, view: task.barrier(view).init(count, task.place())


@tasked("ttng.inval_barrier")
def _inval(op: Op) -> Callable[..., Any]:
    return lambda task, view: task.barrier(view).invalidate(task.place())


@blocking("ttng.barrier_expect")
def _expect(op: Op) -> Callable[..., Any]:
    nbytes = int(op.text.split(",")[1].split()[0])

    def run(task: Any, view: MemDesc, predicate: Any = True) -> Any:
        yield from task.machine.pause()
        if predicate:
            task.barrier(view).expect(nbytes)
            arrive(task, view, 1)

    return run


@blocking("ttng.arrive_barrier")
def _arrive(op: Op) -> Callable[..., Any]:
    count = int(op.text.split(",")[1].split()[0])

    def run(task: Any, view: MemDesc, predicate: Any = True) -> Any:
        yield from task.machine.pause()
        if predicate:
            arrive(task, view, count)

    return run


def arrive(task: Any, view: MemDesc, count: int) -> None:
    """`count` arrivals of a role on the barrier in `view`."""
    task.barrier(view).arrive(count, task.clock, task.place())
    task.advance()


@blocking("ttng.wait_barrier")
def _wait(op: Op) -> Callable[..., Any]:
    def run(task: Any, view: MemDesc, parity: int, predicate: Any = True, *_: Any) -> Any:
        if not predicate:
            return
        yield from task.machine.pause()
        barrier = task.barrier(view)
        if not barrier.usable(task.place(), "waits on"):
            return
        if barrier.phase & 1 == parity & 1:
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


@tasked("ttng.fence_async_shared")
def _fence(op: Op) -> Callable[..., Any]:
    def run(task: Any) -> None:
        task.clock[1] = task.clock[0]
        task.advance()

    return run


@tasked("tt.make_tensor_descriptor")
def _make_descriptor(op: Op) -> Callable[..., Any]:
    kind = op.outputs[0]
    rank = len(kind.shape or ())

    def run(task: Any, pointer: int, *numbers: int) -> Descriptor:
        return make_descriptor(task.machine.memory, int(pointer), numbers[:rank], numbers[rank : 2 * rank], kind)

    return run


@blocking("ttng.async_tma_copy_global_to_local")
def _copy_in(op: Op) -> Callable[..., Any]:
    if "multicast" in op.text and "multicast = false" not in op.text:
        raise op.error("multicast copies are not simulated")
    rank = len(op.inputs[0].shape or ())

    def run(task: Any, descriptor: Descriptor, *rest: Any) -> Any:
        yield from task.machine.pause()
        coordinates, (view, bar, predicate) = rest[:rank], rest[-3:]
        if not predicate:
            return
        barrier, nbytes = task.barrier(bar), view.array[0].nbytes

        def body(agent: Agent) -> None:
            who = Toucher(agent.lane, agent.epoch, agent.clock, agent.place)
            bits = descriptor.read(task.machine.memory, coordinates, who).reshape(view.shape)
            access = Access(view, agent.lane, agent.epoch, True, True, agent.place)
            view.buffer.write(access, agent.clock, bits)
            barrier.land(nbytes, agent)

        task.issue("TMA load", task.program.pool, body)

    return run


@blocking("ttng.async_tma_copy_local_to_global", "ttng.async_tma_reduce")
def _copy_out(op: Op) -> Callable[..., Any]:
    rank = len(op.inputs[0].shape or ())
    if op.name == "ttng.async_tma_reduce":
        raise op.error("reductions by TMA are not simulated")

    def run(task: Any, descriptor: Descriptor, *rest: Any) -> Any:
        yield from task.machine.pause()
        coordinates, view = rest[:rank], rest[rank]

        def read(agent: Agent) -> None:
            access = Access(view, agent.lane, agent.epoch, False, True, agent.place)
            agent.result = view.buffer.read(access, agent.clock).copy()

        def write(agent: Agent) -> None:
            who = Toucher(agent.lane, agent.epoch, agent.clock, agent.place)
            descriptor.write(task.machine.memory, coordinates, reader.result, who)

        reader = task.issue("TMA store", task.program.pool, read)
        writer = task.issue("TMA store", task.program.pool, write, after=reader)
        task.stores.append((reader, writer))

    return run


@blocking("ttng.async_tma_store_wait")
def _store_wait(op: Op) -> Callable[..., Any]:
    allowed, read_only = op.integer("pendings"), op.flag("read_only")

    def run(task: Any) -> Any:
        over = task.stores[: len(task.stores) - allowed] if allowed else list(task.stores)
        agents = [reader for reader, _ in over]
        if not read_only:
            agents += [writer for _, writer in [*task.unwritten, *over]]
        wait = AgentWait(agents, "its bulk stores")
        yield from task.machine.pause()
        if not wait.ready():
            yield wait
        for agent in agents:
            task.clock = marked(task.clock, agent.lane, agent.epoch)
        task.trim_stores(len(over), read_only)

    return run


@blocking("ttng.warp_group_dot")
def _dot(op: Op) -> Callable[..., Any]:
    a_kind, b_kind = op.inputs[0], op.inputs[1]
    asynchronous = op.flag("isAsync") and "isAsync = false" not in op.text
    multiply = multiplier(a_kind.elem, b_kind.elem, op.outputs[0].elem)
    narrow = rounder(op.outputs[0].elem)

    def run(task: Any, a: Any, b: MemDesc, c: Any, use_accumulator: Any = True) -> Any:
        yield from task.machine.pause()
        if isinstance(a, Pending):
            a.array  # noqa: B018  reading it is the fault

        def body(agent: Agent) -> None:
            left: Any = _operand(a, agent) if isinstance(a, MemDesc) else a
            product = multiply(left, _operand(b, agent))
            if use_accumulator:
                product += c.value() if isinstance(c, Pending) else c
                agent.unwritten = agent.unwritten or (c.agent.unwritten if isinstance(c, Pending) else None)
            agent.result = product if narrow is None else narrow(product)

        agent = task.issue_product(body)
        result = Pending(agent)
        if asynchronous:
            return result
        yield from _products_done(task, 0)
        return _result(result)

    return run


def _result(pending: Pending) -> Any:
    """The value of a finished product, or a stand-in for it if its operands were never written."""
    return pending.value() if pending.agent.unwritten is None else Undefined(pending.agent)


def _operand(view: MemDesc, agent: Agent) -> np.ndarray:
    access = Access(view, agent.lane, agent.epoch, False, True, agent.place)
    agent.unwritten = agent.unwritten or view.buffer.unwritten(access)
    view.buffer.touch(access, agent.clock)
    return decode(view.array[0], view.elem)


def multiplier(a: str, b: str, result: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Matrix product with exact products and fp32 (or int32) sums, as the tensor core's operand types ask for."""
    if result == "i32":
        return lambda x, y: (x.astype(np.int64) @ y.astype(np.int64)).astype(np.int32)
    if a == "f32" and b == "f32":
        return lambda x, y: _tf32(x) @ _tf32(y)
    return np.matmul


def _tf32(x: np.ndarray) -> np.ndarray:
    """float32 with the mantissa cut to ten bits, as the tensor core reads it."""
    return (np.ascontiguousarray(x).view(np.uint32) & 0xFFFFE000).view(np.float32)


def _products_done(task: Any, allowed: int) -> Any:
    """Wait until at most `allowed` products of the role are under way."""
    over = task.products[: len(task.products) - allowed] if allowed else list(task.products)
    wait = AgentWait(over, "its matrix products")
    if not wait.ready():
        yield wait
    if over:
        task.clock = marked(task.clock, over[-1].lane, over[-1].epoch)
        for agent in over:
            agent.number = -1  # waited for
        del task.products[: len(over)]


@blocking("ttng.warp_group_dot_wait")
def _dot_wait(op: Op) -> Callable[..., Any]:
    allowed, single = op.integer("pendings"), len(op.outs) == 1

    def run(task: Any, *values: Any) -> Any:
        yield from task.machine.pause()
        yield from _products_done(task, allowed)
        finished = tuple(_result(v) if isinstance(v, Pending) and v.agent.number < 0 else v for v in values)
        return finished[0] if single else finished

    return run


@plain("tt.dot")
def _tt_dot(op: Op) -> Callable[..., Any]:
    """A synchronous product of register operands."""
    a, b, result = op.inputs[0].elem, op.inputs[1].elem, op.outputs[0].elem
    exact = "inputPrecision = tf32" not in op.text
    multiply = np.matmul if exact and result != "i32" else multiplier(a, b, result)
    narrow, dtype = rounder(result), register_dtype(result)

    def run(x: Any, y: Any, c: Any) -> Any:
        total = np.asarray(multiply(x, y) + c, dtype)
        return total if narrow is None else narrow(total)

    return run


__all__ = ["arrive", "multiplier"]
