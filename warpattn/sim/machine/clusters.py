"""Clusters: prepares a kernel with num_ctas > 1, and holds the state that CTAs of a cluster share.

Such a kernel is one program over tensors of the whole cluster (`ir.ctas`). Every role runs once per CTA; buffers have a
row per CTA, each of the size of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from typing import Any

import numpy as np

from ..errors import SimulationError
from ..ir.ctas import Ctas, ctas_of
from ..ir.module import Block, Module, Op
from ..ir.valuetypes import Type
from ..memory.clocks import Clock
from ..memory.shared import SharedBuffer
from .registry import PLAIN, TABLE
from .sync import Participant, Wait

_ACTING = {
    "tt.load", "tt.store", "tt.int_to_ptr", "tt.ptr_to_int",
    "tt.make_tensor_descriptor", "tt.get_program_id", "tt.get_num_programs",
    "ttg.local_alloc", "ttg.local_dealloc", "ttg.local_load", "ttg.local_store", "ttg.memdesc_index",
    "ttg.memdesc_subslice", "ttg.memdesc_trans", "ttg.memdesc_reshape", "ttg.memdesc_reinterpret",
    "ttng.fence_async_shared", "ttng.init_barrier", "ttng.inval_barrier",
    "ttng.barrier_expect", "ttng.arrive_barrier", "ttng.wait_barrier", "ttng.cluster_barrier",
    "ttng.async_tma_copy_global_to_local", "ttng.async_tma_copy_local_to_global", "ttng.async_tma_store_wait",
    "ttng.async_tma_reduce",
    "ttng.warp_group_dot", "ttng.warp_group_dot_wait", "ttng.tmem_alloc", "ttng.tmem_load", "ttng.tmem_store",
    "ttng.tmem_subslice", "ttng.tmem_copy", "ttng.tc_gen5_mma", "ttng.tc_gen5_commit", "ttg.async_copy_global_to_local",
    "ttng.clc_try_cancel", "ttng.clc_load_result", "ttg.async_commit_group", "ttg.async_wait", "tt.reduce", "scf.for",
    "scf.if", "scf.while", "scf.execute_region", "tt.call", "ttg.warp_specialize", "tt.map_elementwise", "tt.scan",
    "tt.atomic_rmw",
}  # fmt: skip
_MIXING = {"tt.dot", "tt.dot_scaled", "tt.gather", "tt.histogram"}
_MOVING = {"tt.reshape", "tt.cat", "tt.unsplat", "tt.split", "tt.join", "tt.trans", "tt.broadcast", "tt.expand_dims"}
_SETTING_UP = {
    "ttng.init_barrier", "ttg.local_alloc", "ttng.tmem_alloc", "ttg.memdesc_index",
    "ttng.fence_mbarrier_init_release_cluster",
}  # fmt: skip


def clustered(module: Module) -> None:
    """Set the cluster in every op of a module, and refuse ops that are not simulated with clusters."""
    if module.num_ctas == 1:
        return
    if module.backend != "cuda":
        raise SimulationError(f"the kernel uses clusters of {module.num_ctas} on {module.target}: not simulated")
    ctas = ctas_of(module.text, module.num_ctas)
    for block in module.functions.values():
        _visit(block, ctas, False)
        _after_init(block)


def _visit(block: Block, ctas: Ctas, role: bool) -> None:
    for op in block.ops:
        op.ctas, op.in_role = ctas, role
        if op.name in TABLE and TABLE[op.name][0] < 4:
            known = op.name in _ACTING or (TABLE[op.name][0] == PLAIN and op.name not in _MIXING)
            known |= op.name == "ttg.inline_asm" and (not op.inputs or _votes(op))  # of the CTA alone, such as a fence
            if not known and op.name not in _MIXING:
                raise op.error("the simulator runs this operation in kernels without clusters only")
        op.exchanged = _exchanged(op, ctas)
        for region in op.regions:
            _visit(region, ctas, role or op.name == "ttg.warp_specialize")


def _held_whole(op: Op, ctas: Ctas) -> bool:
    """Whether every CTA holds all elements that an operation moves."""
    return all(max(ctas.split(kind).parts, default=1) == 1 for kind in (*op.inputs, *op.outputs) if kind.shape)


def _votes(op: Op) -> bool:
    """Whether threads of one CTA vote; elements of other CTAs are NaN here."""
    return "vote.sync.any" in op.strings[0] or "barrier.cta.red.or" in op.strings[0]


def _exchanged(op: Op, ctas: Ctas) -> bool:
    """Whether an operation needs elements that another CTA has."""
    if op.name in _MIXING:
        return not _held_whole(op, ctas)
    if op.name in _MOVING:
        return not _stays(op, ctas)
    if op.name in ("tt.reduce", "tt.scan"):
        return any(ctas.split(kind).parts[op.integer("axis")] > 1 for kind in op.inputs)
    if op.name == "ttg.convert_layout":
        shape, (source, result) = op.inputs[0].shape or (), (ctas.split(k) for k in (op.inputs[0], op.outputs[0]))
        return source.own(shape, 0) != tuple(slice(0, n) for n in shape) and source != result
    return False


def _stays(op: Op, ctas: Ctas) -> bool:
    """Whether each CTA's part of the results comes from its part of the operands: tried with marks."""
    run = TABLE[op.name][1](op)
    for cta in range(ctas.count):
        marks = []
        for kind in op.inputs:
            mark = np.zeros(kind.shape or (), np.bool_)
            mark[_part(kind, ctas, cta)] = True
            marks.append(mark)
        moved = run(*marks)
        for mark in moved if isinstance(moved, tuple) else (moved,):  # both of a split are of one type
            part = _part(op.outputs[0], ctas, cta) if np.ndim(mark) else ()
            if not np.all(np.asarray(mark)[part]):
                return False
    return True


def _part(kind: Type, ctas: Ctas, cta: int) -> tuple[slice, ...]:
    return ctas.split(kind).own(kind.shape or (), cta)


def _after_init(block: Block) -> None:
    """Insert a cluster barrier after the initialisation of barriers, as Triton does; after the loop or branch, if it is
    within one."""
    ops: list[Op] = []
    fresh = False
    for op in block.ops:
        kind = TABLE.get(op.name, (PLAIN,))[0]
        if fresh and kind != PLAIN and op.name not in _SETTING_UP:
            fresh = False
            if op.name != "ttng.cluster_barrier":
                wait = Op("ttng.cluster_barrier", [], [], "{relaxed = true}", [], [], [], op.frames, "", ctas=op.ctas)
                ops.append(wait)
        fresh |= op.name != "ttg.warp_specialize" and _initialises(op)
        ops.append(op)
        for each in op.regions if op.targets else ():
            _after_init(each)
    block.ops = ops


def _initialises(op: Op) -> bool:
    """Whether an op or one in its regions initialises barriers."""
    return op.name == "ttng.init_barrier" or any(_initialises(each) for region in op.regions for each in region.ops)


class Cluster:
    """The CTAs of one program while it runs: what they share."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.names: list[str] = []  # of its CTAs, as roles end
        self.buffers: list[SharedBuffer] = []  # those that share bytes with others
        self._turns: dict[tuple[Hashable, int], int] = {}
        self._made: dict[tuple[Hashable, int], tuple[Any, int]] = {}  # (what, turn) -> (value, CTAs that have it)
        self._meetings: dict[int, Meeting] = {}

    def shared(self, what: Hashable, cta: int, make: Callable[[], Any], ctas: int = 0) -> Any:
        """Return what an operation makes, such as a buffer: the first CTA makes it, the others share it, `ctas` in all
        (0: the whole cluster)."""
        if self.count == 1:
            return make()
        turn = self._turns[what, cta] = self._turns.get((what, cta), 0) + 1
        value, seen = self._made.pop((what, turn), None) or (make(), 0)
        if seen + 1 < (ctas or self.count):
            self._made[what, turn] = value, seen + 1
        return value

    def meet(self, role: Participant, relaxed: bool = False, where: int = 0) -> Generator[Wait | None, None, None]:
        """Wait until every CTA has arrived; each then knows all that any knew, unless the barrier is relaxed.

        where: 0 for the programs themselves; for roles the operation at which they meet.
        """
        meeting = self._meetings.setdefault(where, Meeting(self.count))
        mine = role.clock.copy() if not relaxed else role.clock.empty()
        role.advance()
        wait = ClusterWait(meeting)
        meeting.arrive(mine)
        if not wait.ready():
            yield wait
        role.learn(meeting.released)


class Meeting:
    """A barrier of a cluster."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.arrived = self.generation = 0
        self.released: Clock | None = None
        self._collected: Clock | None = None

    def arrive(self, known: Clock) -> None:
        """Count one more CTA, with the knowledge that it passes to the others."""
        if self._collected is not None:
            known.join(self._collected)
        self._collected = known
        self.arrived += 1
        if self.arrived == self.count:
            self.arrived = 0
            self.generation += 1
            self.released, self._collected = self._collected, None


class ClusterWait(Wait):
    """A generation of a barrier of a cluster."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting, self.generation = meeting, meeting.generation

    def ready(self) -> bool:
        return self.meeting.generation > self.generation

    def describe(self) -> str:
        return f"the barrier of its cluster; {self.meeting.arrived} of {self.meeting.count} CTAs have arrived"
