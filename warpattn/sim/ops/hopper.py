"""sm_90: copies between global and shared memory by TMA, asynchronous matrix products, fences.

copy in    lands its box (clipped, filled with zeros) and its bytes on a barrier
copy out   reads shared memory (what store_wait(read_only) waits for), then writes or reduces into global memory
product    reads its operands from shared memory; products of one role run in their order
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ..ir.ctas import group
from ..ir.formats import decode, register_dtype, rounder
from ..ir.module import Op
from ..ir.parts import barrier_copies, from_registers, local, parts_of, to_registers
from ..ir.product_asm import product_group
from ..machine.agents import Agent
from ..machine.pending import Pending, opened, poisoned, used
from ..machine.registry import acting, blocking, plain
from ..machine.sync import AgentWait, Barrier, all_but_newest
from ..memory.descriptor import Descriptor, make_descriptor
from ..memory.findings import Finding
from ..memory.global_memory import Toucher
from ..memory.shared import Access, MemDesc, Missing, either, of_product, side_by_side
from .updates import update_of


@acting("ttng.fence_async_shared")
def _fence(op: Op) -> Callable[..., Any]:
    def run(role: Any) -> None:
        role.clock.fence()
        role.advance()

    return run


@acting("tt.make_tensor_descriptor")
def _make_descriptor(op: Op) -> Callable[..., Any]:
    kind = op.outputs[0]
    rank = len(kind.shape or ())
    nan = op.integer("padding", 1) != 1

    def run(role: Any, pointer: int, *numbers: int) -> Descriptor:
        return make_descriptor(role.run.memory, int(pointer), numbers[:rank], numbers[rank : 2 * rank], kind, nan)

    return run


@blocking("ttng.async_tma_copy_global_to_local")
def _copy_in(op: Op) -> Callable[..., Any]:
    """Copy into each CTA's part of a tile; `multicast`: the first CTA of those with equal parts copies for all."""
    kind = op.inputs[0]
    rank = (len(op.operands) - 2) // 2 if kind.of_pixels else len(kind.shape or ())
    box = _boxes(op)
    if kind.of_pixels and op.ctas is not None:
        raise op.error("im2col mode in clusters is not simulated")
    shared = op.ctas.split(op.inputs[0]).copies if op.ctas is not None and op.flag("multicast") else 0
    copies = barrier_copies(op, op.inputs[1])

    def run(role: Any, descriptor: Descriptor, *rest: Any) -> Any:
        yield from role.run.pause()
        coordinates, (view, bar, predicate) = rest[:rank], rest[-3:]
        cta = role.program.cta
        if not predicate or cta & shared:
            return
        for target in group(cta, shared):
            barrier = role.barrier(bar, target & ~copies)
            role.issue(
                "TMA load",
                role.program.pool,
                _landing(role, descriptor, (*box(coordinates, cta), rest[rank:-3]), (view, target, barrier)),
            )

    return run


def _boxes(op: Op) -> Callable[[tuple, int], tuple[tuple, tuple[int, ...] | None]]:
    """Return a CTA's box: start and shape (None: the descriptor's); coordinates are read when the copy is issued."""
    kind = op.inputs[0]
    parts, shape = parts_of(op, kind), local(op, kind).shape
    if parts is None:
        return lambda coordinates, cta: (tuple(int(c) for c in coordinates), None)
    return lambda coordinates, cta: (
        tuple(int(c) + part.start for c, part in zip(coordinates, parts[cta], strict=True)),
        shape,
    )


def _by_tma(agent: Agent) -> Toucher:
    return Toucher(agent.lane, agent.epoch, agent.clock, agent.place, asynchronous=True)


def _landing(
    role: Any, descriptor: Descriptor, box: tuple[tuple, Any, tuple], target: tuple[MemDesc, int, Barrier]
) -> Callable[[Agent], None]:
    """Return the work of a copy of a box (start, shape, offsets of pixels) to a CTA's tile, which completes its bytes
    on a barrier."""
    (first, shape, offsets), (view, cta, barrier) = box, target

    def body(agent: Agent) -> None:
        who = _by_tma(agent)
        memory = role.run.memory
        part = view if shape else descriptor.rows_of(view)
        if descriptor.pixels is None:
            bits = descriptor.read(memory, first, who, shape).reshape(part.shape)
        else:
            bits = descriptor.read_pixels(memory, first, offsets, who).reshape(part.shape)
        part.buffer.write(Access(part, agent.lane, agent.epoch, True, True, agent.place, cta), agent.clock, bits)
        barrier.land(part.array[0].nbytes, agent)

    return body


@blocking("ttng.async_tma_gather")
def _gather(op: Op) -> Callable[..., Any]:
    """Copy rows by number into a tile; rows outside of the tensor are zeros."""

    def run(role: Any, descriptor: Descriptor, rows: Any, column: int, *rest: Any) -> Any:
        yield from role.run.pause()
        view, bar, predicate = rest
        if not predicate:
            return
        barrier, numbers = role.barrier(bar), np.asarray(rows).tolist()

        def body(agent: Agent) -> None:
            who = _by_tma(agent)
            memory, box = role.run.memory, (1, view.shape[1])
            bits = np.concatenate([descriptor.read(memory, (row, column), who, box) for row in numbers])
            view.buffer.write(Access(view, agent.lane, agent.epoch, True, True, agent.place), agent.clock, bits)
            barrier.land(view.array[0].nbytes, agent)

        role.issue("TMA load", role.program.pool, body)

    return run


@blocking("ttng.async_tma_scatter")
def _scatter(op: Op) -> Callable[..., Any]:
    """Copy the rows of a tile to rows by number; those beyond the tensor's end are dropped."""

    def run(role: Any, descriptor: Descriptor, rows: Any, column: int, view: MemDesc) -> Any:
        yield from role.run.pause()
        numbers, place = np.asarray(rows).tolist(), role.place()
        if min(numbers) < 0 or column < 0:
            text = (
                f"{place} scatters to row {min(numbers)}, column {column} of {descriptor.buffer.name}: neither may be"
            )
            role.run.findings.add(Finding("OutOfBounds", f"{text} negative", (place,), descriptor.buffer.name))

        def put(agent: Agent, bits: np.ndarray) -> None:
            who = _by_tma(agent)
            for row, part in zip(numbers, bits, strict=True):
                if row >= 0:
                    descriptor.write(role.run.memory, (row, column), part, who, (1, view.shape[1]))

        def inside(bits: np.ndarray) -> Any:
            return [0 <= row < descriptor.shape[0] for row in numbers]

        _store(role, view, put, inside)

    return run


def _store(
    role: Any, view: MemDesc, put: Callable[[Agent, np.ndarray], None], inside: Callable[[np.ndarray], Any]
) -> None:
    """Start a copy out of a tile: it reads shared memory, then `put` writes the bits; `inside` is what it writes."""

    def read(agent: Agent) -> None:
        access = Access(view, agent.lane, agent.epoch, False, True, agent.place, agent.cta)
        bits, missing = view.buffer.read(access, agent.clock)
        agent.result = bits.copy(), missing

    def write(agent: Agent) -> None:
        bits, missing = reader.result
        put(agent, bits)
        if missing is not None and missing.where.reshape(bits.shape)[inside(bits)].any():
            role.run.findings.add(used(missing, agent.place))
        reader.result = None  # a role may keep its stores until it ends

    reader = role.issue("TMA store", role.program.pool, read)
    writer = role.issue("TMA store", role.program.pool, write, after=reader)
    role.stores.append((reader, writer))


@blocking("ttng.async_tma_copy_local_to_global", "ttng.async_tma_reduce")
def _copy_out(op: Op) -> Callable[..., Any]:
    """Copy a tile out. All CTAs with copies of the tile store it: equal bits count as one store."""
    box, rank = _boxes(op), len(op.inputs[0].shape or ())
    copies = 0 if op.ctas is None else op.ctas.split(op.inputs[0]).copies
    update = update_of(op) if op.name == "ttng.async_tma_reduce" else None
    how = "write" if update is None else "sum" if op.text.startswith(" add") and op.inputs[0].is_float else "atomic"
    if copies and update is not None:
        raise op.error("each CTA that has a copy of the tile adds it: this is not simulated")

    def run(role: Any, descriptor: Descriptor, *rest: Any) -> Any:
        yield from role.run.pause()
        cta = role.program.cta
        coordinates, shape = box(rest[:rank], cta)
        view = rest[rank] if shape else descriptor.rows_of(rest[rank])
        stored: list[bytes] = role.program.cluster.shared((op.uid, cta & ~copies), cta, list, 1 << copies.bit_count())

        def put(agent: Agent, bits: np.ndarray) -> None:
            who = _by_tma(agent)
            stored.append(bits.tobytes())
            if stored[-1] != stored[0]:
                text = f"{agent.place} stores a tile of which other CTAs store copies, and theirs have other values"
                role.run.findings.add(Finding("Race", text, (agent.place,), view.buffer.name))
            if not cta & copies:
                descriptor.write(role.run.memory, coordinates, bits, who, shape, update, how)

        _store(role, view, put, lambda bits: descriptor.inside(coordinates, bits))

    return run


@blocking("ttng.async_tma_store_wait")
def _store_wait(op: Op) -> Callable[..., Any]:
    allowed, read_only = op.integer("pendings"), op.flag("read_only")

    def run(role: Any) -> Any:
        over = all_but_newest(role.stores, allowed)
        agents = [reader for reader, _ in over[role.stores_read :]]
        if not read_only:
            agents += [writer for _, writer in over]
        wait = AgentWait(agents, "its bulk stores")
        yield from role.run.pause()
        if not wait.ready():
            yield wait
        for agent in agents:
            role.clock.mark(agent.lane, agent.epoch)
        role.stores_waited(len(over), read_only)

    return run


@blocking("ttng.warp_group_dot")
def _dot(op: Op) -> Callable[..., Any]:
    a_kind, b_kind = op.inputs[0], op.inputs[1]
    asynchronous = op.flag("isAsync") and "isAsync = false" not in op.text
    multiply = multiplier(a_kind.elem, b_kind.elem, op.outputs[0].elem)
    narrow = rounder(op.outputs[0].elem)
    part, spread = _parts(op)

    def run(role: Any, a: Any, b: MemDesc, c: Any, use_accumulator: Any = True) -> Any:
        yield from role.run.pause()
        if isinstance(a, Pending):
            a.array  # noqa: B018  reading it is the fault
        a, a_missing = opened(a)
        c, c_missing = opened(c)

        def body(agent: Agent) -> None:
            left, missing = _operand(a, agent) if isinstance(a, MemDesc) else (part(a, agent.cta), a_missing)
            right, right_missing = _operand(b, agent)
            product = spread(multiply(left, right), agent.cta)
            agent.missing = of_product(missing, right_missing, product.shape)
            if use_accumulator:
                product += c.value() if isinstance(c, Pending) else c
                agent.missing = either(agent.missing, c.missing if isinstance(c, Pending) else c_missing)
            agent.result = product if narrow is None else narrow(product)

        agent = role.issue_product(body)
        result = Pending(agent)
        if asynchronous:
            return result
        yield from _products_done(role, 0)
        return _result(result)

    return run


@blocking("ttng.warp_group_dot_parts")
def _dot_parts(op: Op) -> Callable[..., Any]:
    """Add P·V to an accumulator in parts of columns, by a group of wgmma in assembly. P is packed in registers, V boxes
    of columns one after the other in shared memory."""
    count, widths = len(op.outputs), [(kind.shape or (0, 0))[1] for kind in op.outputs]
    box = op.inputs[-1]
    if op.strings[0] != product_group(sum(widths), box):
        raise op.error("products in assembly with another descriptor or order of operands are not simulated")
    ends = list(accumulate(widths))

    def run(role: Any, *operands: Any) -> Any:
        yield from role.run.pause()
        (pairs, p_missing), boxes = opened(operands[count]), operands[count + 1 :]
        if isinstance(pairs, Pending):
            pairs.array  # noqa: B018  reading it is the fault
        if any(after.low != before.low + before.array[0].nbytes for before, after in pairwise(boxes)):
            raise op.error("boxes of a product in assembly that are not one after the other are not simulated")
        p, p_missing = _unpacked(pairs, p_missing, box.elem)

        def body(agent: Agent) -> None:
            v, v_missing = side_by_side([_operand(view, agent) for view in boxes], ends[-1])
            product, missing = np.matmul(p, v), of_product(p_missing, v_missing, (p.shape[0], ends[-1]))
            result, faults = [], []
            for c, end, width in zip(operands, ends, widths, strict=False):
                columns = np.s_[:, end - width : end]
                old, old_missing = (c.value(), c.missing) if isinstance(c, Pending) else opened(c)
                result.append(product[columns] + old)
                own = None if missing is None else missing.at(missing.where[columns])
                faults.append(either(own, old_missing))
            agent.result, agent.missing = tuple(result), tuple(faults)

        agent = role.issue_product(body)
        return tuple(Pending(agent, part) for part in range(count)) if count > 1 else Pending(agent, 0)

    return run


def _unpacked(pairs: Any, missing: Missing | None, elem: str) -> tuple[np.ndarray, Missing | None]:
    """Return P [M, N] of pairs [M, N / 8, 4] of 16-bit elements in 32 bits, and its undefined elements."""
    rows = pairs.shape[0]
    halves = np.ascontiguousarray(pairs).view(np.uint16).reshape(rows, -1)
    where = None if missing is None else missing.at(np.repeat(missing.where.reshape(rows, -1), 2, axis=1))
    return decode(halves, elem), where


def _parts(op: Op) -> tuple[Callable[[Any, int], Any], Callable[[Any, int], Any]]:
    """Return functions that extract a CTA's part of the first operand, and that place its part of the product."""
    if op.ctas is None:
        return (lambda a, cta: a), (lambda product, cta: product)
    a, b, result = (op.ctas.split(kind).parts for kind in (op.inputs[0], op.inputs[1], op.outputs[0]))
    if (a[0], b[1]) != result or a[1] > 1 or b[0] > 1:
        raise op.error("operands that are spread over the CTAs otherwise than the product are not simulated")
    return from_registers(op, op.inputs[0], op.inputs[0]), to_registers(op, op.outputs[0], op.outputs[0])


def _result(pending: Pending) -> Any:
    """Return the value of a finished product; elements that depend on unwritten operands are undefined."""
    return poisoned(pending.value(), pending.missing)


def _operand(view: MemDesc, agent: Agent) -> tuple[np.ndarray, Missing | None]:
    bits, missing = view.buffer.read(
        Access(view, agent.lane, agent.epoch, False, True, agent.place, agent.cta), agent.clock
    )
    return decode(bits, view.elem), missing


def multiplier(a: str, b: str, result: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a matrix product with exact products and fp32 (or int32) sums, by the tensor core's operand types."""
    if result == "i32":
        return lambda x, y: (x.astype(np.int64) @ y.astype(np.int64)).astype(np.int32)
    if a == "f32" and b == "f32":
        return lambda x, y: _tf32(x) @ _tf32(y)
    return np.matmul


def _tf32(x: np.ndarray) -> np.ndarray:
    """Cut float32 to ten mantissa bits, as the tensor core does."""
    return (np.ascontiguousarray(x).view(np.uint32) & 0xFFFFE000).view(np.float32)


def _products_done(role: Any, allowed: int) -> Any:
    """Wait until at most `allowed` products of the role are under way."""
    over = all_but_newest(role.products, allowed)
    wait = AgentWait(over, "its matrix products")
    if not wait.ready():
        yield wait
    if over:
        role.clock.mark(over[-1].lane, over[-1].epoch)
        for agent in over:
            agent.number = -1  # waited for
        del role.products[: len(over)]


@blocking("ttng.warp_group_dot_wait")
def _dot_wait(op: Op) -> Callable[..., Any]:
    allowed, single = op.integer("pendings"), len(op.outs) == 1

    def run(role: Any, *values: Any) -> Any:
        yield from role.run.pause()
        yield from _products_done(role, allowed)
        finished = tuple(_result(v) if isinstance(v, Pending) and v.agent.number < 0 else v for v in values)
        return finished[0] if single else finished

    return run


@plain("tt.dot")
def _tt_dot(op: Op) -> Callable[..., Any]:
    """Compute a synchronous product of register operands."""
    a, b, result = op.inputs[0].elem, op.inputs[1].elem, op.outputs[0].elem
    exact = "inputPrecision = tf32" not in op.text
    multiply = np.matmul if exact and result != "i32" else multiplier(a, b, result)
    narrow, dtype = rounder(result), register_dtype(result)

    def run(x: Any, y: Any, c: Any) -> Any:
        total = np.asarray(multiply(x, y) + c, dtype)
        return total if narrow is None else narrow(total)

    return run


