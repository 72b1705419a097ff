"""Clusters: preparing a kernel with num_ctas > 1, and what the CTAs of one cluster share while it runs.

Such a kernel is one program over tensors of the whole cluster (`ir.ctas`). Every role runs once per CTA; buffers have a
row per CTA, each of the size of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from ..errors import SimulationError
from ..ir.ctas import Ctas, ctas_of
from ..ir.module import Block, Module, Op
from ..memory.clocks import Clock
from .registry import PLAIN, TABLE
from .sync import Role, Wait

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
    "ttng.tmem_subslice", "ttng.tc_gen5_mma", "ttng.tc_gen5_commit", "ttg.async_copy_global_to_local",
    "ttg.async_commit_group", "ttg.async_wait", "tt.reduce", "scf.for", "scf.if", "scf.while",
    "scf.execute_region", "tt.call", "ttg.warp_specialize", "tt.map_elementwise",
}  # fmt: skip
_MOVING = {"tt.dot", "tt.dot_scaled", "tt.gather", "tt.histogram", "tt.reshape", "tt.cat", "tt.unsplat"}
_SETTING_UP = {
    "ttng.init_barrier", "ttg.local_alloc", "ttng.tmem_alloc", "ttg.memdesc_index",
    "ttng.fence_mbarrier_init_release_cluster",
}  # fmt: skip


def clustered(module: Module) -> None:
    """Tell every op of a module with clusters about them, and refuse what is not simulated there."""
    if module.num_ctas == 1:
        return
    if module.backend != "cuda":
        raise SimulationError(f"the kernel uses clusters of {module.num_ctas} on {module.target}: not simulated")
    ctas = ctas_of(module.text, module.num_ctas)
    for name, block in module.functions.items():
        _visit(block, ctas, "" if name == module.entry else "a function")
        _after_init(block)


def _visit(block: Block, ctas: Ctas, inside: str) -> None:
    for op in block.ops:
        op.ctas = ctas
        if op.name in TABLE and TABLE[op.name][0] < 4:
            known = op.name in _ACTING or (TABLE[op.name][0] == PLAIN and op.name not in _MOVING)
            known |= op.name == "ttg.inline_asm" and (not op.inputs or _votes(op))  # of the CTA alone, such as a fence
            known |= op.name in _MOVING and _held_whole(op, ctas)
            if not known:
                raise op.error("not simulated in kernels with clusters")
        if inside and op.name in ("ttng.init_barrier", "ttng.cluster_barrier"):
            raise op.error(f"in {inside} of a kernel with clusters this is not simulated")
        _whole(op, ctas)
        for region in op.regions:
            _visit(region, ctas, "a partition" if op.name == "ttg.warp_specialize" else inside or "a loop or branch")


def _held_whole(op: Op, ctas: Ctas) -> bool:
    """Whether every CTA holds all elements that an operation moves."""
    return all(max(ctas.split(kind).parts, default=1) == 1 for kind in (*op.inputs, *op.outputs) if kind.shape)


def _votes(op: Op) -> bool:
    """Whether threads of one CTA agree on something; what other CTAs have in their registers is NaN here."""
    return "vote.sync.any" in op.strings[0] or "barrier.cta.red.or" in op.strings[0]


def _whole(op: Op, ctas: Ctas) -> None:
    """Refuse what needs elements that another CTA has."""
    if op.name == "tt.reduce" and any(ctas.split(kind).parts[op.integer("axis")] > 1 for kind in op.inputs):
        raise op.error("a reduction over elements of several CTAs is not simulated")
    if op.name == "ttg.convert_layout":
        shape, (source, result) = op.inputs[0].shape or (), (ctas.split(k) for k in (op.inputs[0], op.outputs[0]))
        if source.own(shape, 0) != tuple(slice(0, n) for n in shape) and source != result:
            raise op.error("a change of layout that moves elements between CTAs is not simulated")


def _after_init(block: Block) -> None:
    """Triton lets the CTAs wait for each other after they have initialised barriers; so must the simulation."""
    ops: list[Op] = []
    fresh = False
    for op in block.ops:
        kind = TABLE.get(op.name, (PLAIN,))[0]
        if fresh and kind != PLAIN and op.name not in _SETTING_UP:
            fresh = False
            if op.name != "ttng.cluster_barrier":
                wait = Op("ttng.cluster_barrier", [], [], "{relaxed = true}", [], [], [], op.frames, "", ctas=op.ctas)
                ops.append(wait)
        fresh |= op.name == "ttng.init_barrier"
        ops.append(op)
    block.ops = ops


class Cluster:
    """The CTAs of one program while it runs: what they share."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.names: list[str] = []  # of its CTAs, as roles end
        self._turns: dict[tuple[int, int], int] = {}
        self._made: dict[tuple[int, int], tuple[Any, int]] = {}  # (op, turn) -> (buffer, CTAs that have it)
        self._arrived = self.generation = 0
        self._collected: Clock | None = None
        self._released: Clock | None = None

    def shared(self, uid: int, cta: int, make: Callable[[], Any]) -> Any:
        """The buffer of an allocation: made by the first CTA that allocates it, shared with the others."""
        if self.count == 1:
            return make()
        turn = self._turns[uid, cta] = self._turns.get((uid, cta), 0) + 1
        buffer, seen = self._made.pop((uid, turn), None) or (make(), 0)
        if seen + 1 < self.count:
            self._made[uid, turn] = buffer, seen + 1
        return buffer

    def meet(self, role: Role, relaxed: bool = False) -> Generator[Wait | None, None, None]:
        """Wait until every CTA has arrived; each then knows what all knew, unless the barrier is relaxed."""
        mine = role.clock.copy() if not relaxed else role.clock.empty()
        if self._collected is not None:
            mine.join(self._collected)
        self._collected = mine
        role.advance()
        self._arrived += 1
        wait = ClusterWait(self)
        if self._arrived == self.count:
            self._arrived = 0
            self.generation += 1
            self._released, self._collected = self._collected, None
        if not wait.ready():
            yield wait
        role.learn(self._released)

    @property
    def arrived(self) -> int:
        return self._arrived


class ClusterWait(Wait):
    """A generation of the barrier of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.generation = cluster, cluster.generation

    def ready(self) -> bool:
        return self.cluster.generation > self.generation

    def describe(self) -> str:
        return f"the barrier of its cluster; {self.cluster.arrived} of {self.cluster.count} CTAs have arrived"
