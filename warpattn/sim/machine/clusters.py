"""Clusters: which CTA holds which part of a tensor, and what the CTAs of a cluster share.

A kernel with num_ctas > 1 is one program over tensors of the whole cluster; a layout says which part is whose:

    CGALayout = [[1, 0]]    bit 0 of the CTA chooses the half of the rows
    CGALayout = [[0, 0]]    both CTAs hold the whole (a copy each)

Every role runs once per CTA. Its registers have the shape of the whole tensor, and only its own part is filled: the
rest is NaN (or 0), because loads fill nothing else. Buffers have a row per CTA, each of the size of a part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import SimulationError
from ..ir.module import Block, Module, Op
from ..ir.valuetypes import Type, split_top
from ..memory.clocks import Clock, joined
from .registry import PLAIN, TABLE
from .sync import Wait

if TYPE_CHECKING:
    from .machine import Task

_ENCODING = re.compile(r"^(#\S+) = (#\S+<.*>)\s*$", re.MULTILINE)
_BASES = re.compile(r"\b(CGALayout|block) = \[((?:\[[-\d, ]*\](?:, )?)*)\]")
_ACTING = {
    "tt.load", "tt.store", "tt.make_tensor_descriptor", "tt.get_program_id", "tt.get_num_programs",
    "ttg.local_alloc", "ttg.local_dealloc", "ttg.local_load", "ttg.local_store", "ttg.memdesc_index",
    "ttg.memdesc_subslice", "ttg.memdesc_trans", "ttg.memdesc_reshape", "ttg.memdesc_reinterpret",
    "ttng.fence_async_shared", "ttng.init_barrier", "ttng.inval_barrier",
    "ttng.barrier_expect", "ttng.arrive_barrier", "ttng.wait_barrier", "ttng.cluster_barrier",
    "ttng.async_tma_copy_global_to_local", "ttng.async_tma_copy_local_to_global", "ttng.async_tma_store_wait",
    "ttng.warp_group_dot", "ttng.warp_group_dot_wait", "ttng.tmem_alloc", "ttng.tmem_load", "ttng.tmem_store",
    "ttng.tmem_subslice", "ttng.tc_gen5_mma", "ttng.tc_gen5_commit", "tt.reduce", "scf.for", "scf.if", "scf.while",
    "scf.execute_region", "tt.call", "ttg.warp_specialize", "tt.map_elementwise",
}  # fmt: skip
_MOVING = {"tt.dot", "tt.dot_scaled", "tt.gather", "tt.histogram", "tt.reshape", "tt.cat", "tt.unsplat"}
_SETTING_UP = {
    "ttng.init_barrier", "ttg.local_alloc", "ttng.tmem_alloc", "ttg.memdesc_index",
    "ttng.fence_mbarrier_init_release_cluster",
}  # fmt: skip


class Split(NamedTuple):
    """How a tensor is spread: for each bit of the CTA, the part that it chooses; how many parts each dimension has."""

    bases: tuple[tuple[int, ...], ...]
    parts: tuple[int, ...]

    @property
    def copies(self) -> int:
        """The bits of the CTA that choose no part: CTAs that differ only there hold the same."""
        return sum(1 << i for i, basis in enumerate(self.bases) if not any(basis))

    def local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a part."""
        return tuple(n // p for n, p in zip(shape, self.parts, strict=True))

    def own(self, shape: tuple[int, ...], cta: int) -> tuple[slice, ...]:
        """The part of a CTA."""
        at = [0] * len(shape)
        for i, basis in enumerate(self.bases):
            if cta >> i & 1:
                at = [a ^ b for a, b in zip(at, basis, strict=True)]
        return tuple(slice(a * n, (a + 1) * n) for a, n in zip(at, self.local(shape), strict=True))


@dataclass(frozen=True)
class Ctas:
    """The cluster that a module is compiled for."""

    count: int
    pairs: bool  # products are made by two CTAs each
    names: dict[str, str] = field(hash=False)  # layouts and what they stand for

    @property
    def bits(self) -> int:
        return self.count.bit_length() - 1

    def split(self, kind: Type) -> Split:
        """How a tensor, tile or box of a type is spread over the CTAs."""
        shape = kind.shape
        if shape is None:
            return Split(((),) * self.bits, ())
        parts = split_top(kind.text.partition("<")[2][:-1])
        key, bases = self._bases(parts[1] if len(parts) > 1 else "")
        if len(bases) != self.bits:
            raise SimulationError(f"the type {kind} does not say how its elements are spread over the CTAs")
        bases = [(0,) * (len(shape) - len(basis)) + basis for basis in bases]
        return _split(shape, bases, key == "block", kind)

    def _bases(self, layout: str) -> tuple[str, list[tuple[int, ...]]]:
        text = self.names.get(layout, layout)
        if text.startswith(("#ttg.slice<", "#ttg.dot_op<")):
            parent = re.search(r"parent = (#.*?)(?:, kWidth = \d+)?\}>$", text)
            key, bases = self._bases(parent[1] if parent else "")
            found = re.search(r"\b(dim|opIdx) = (\d)", text)
            if found is not None and found[1] == "dim":
                dim = int(found[2])
                return key, [basis[:dim] + basis[dim + 1 :] for basis in bases]
            k = 1 if found is None or found[2] == "0" else 0
            return key, [tuple(0 if d == k else x for d, x in enumerate(basis)) for basis in bases]
        found = _BASES.search(text)
        if found is None:
            return "", []
        lists = re.findall(r"\[([-\d, ]*)\]", found[2])
        return found[1], [tuple(int(n) for n in each.split(",") if n.strip()) for each in lists]

    def local(self, kind: Type) -> Type:
        """The type of what one CTA has of a tile."""
        if not kind.shape:
            return kind
        shape = self.split(kind).local(kind.shape)
        before, after = ("".join(f"{n}x" for n in each) for each in (kind.shape, shape))
        return replace(kind, shape=shape, text=kind.text.replace(before, after, 1))


def _split(shape: tuple[int, ...], bases: list[tuple[int, ...]], elements: bool, kind: Type) -> Split:
    """Bases in parts; `elements`: they are given in elements."""
    if elements:
        bases = [tuple(x % n for x, n in zip(basis, shape, strict=True)) for basis in bases]
    counts = [1 << sum(1 for basis in bases if basis[d]) for d in range(len(shape))]
    for d, (n, count) in enumerate(zip(shape, counts, strict=True)):
        if n < count:
            bases = [(*basis[:d], 0, *basis[d + 1 :]) for basis in bases]
            counts[d] = 1
    if elements:
        units = [n // count for n, count in zip(shape, counts, strict=True)]
        if any(x % unit for basis in bases for x, unit in zip(basis, units, strict=True)):
            raise SimulationError(
                f"the type {kind} deals its elements out to the CTAs one by one: this is not simulated"
            )
        bases = [tuple(x // unit for x, unit in zip(basis, units, strict=True)) for basis in bases]
    if any(x >= count for basis in bases for x, count in zip(basis, counts, strict=True)):
        raise SimulationError(f"how the type {kind} is spread over the CTAs is not simulated")
    return Split(tuple(bases), tuple(counts))


def clustered(module: Module) -> None:
    """Tell every op of a module with clusters about them, and refuse what is not simulated there."""
    if module.num_ctas == 1:
        return
    if module.backend != "cuda":
        raise SimulationError(f"the kernel uses clusters of {module.num_ctas} on {module.target}: not simulated")
    pairs = re.search(r'"ttng.two-ctas" = true', module.text) is not None
    ctas = Ctas(module.num_ctas, pairs, dict(_ENCODING.findall(module.text)))
    for name, block in module.functions.items():
        _visit(block, ctas, "" if name == module.entry else "a function")
        _after_init(block)


def _visit(block: Block, ctas: Ctas, inside: str) -> None:
    for op in block.ops:
        op.ctas = ctas
        if op.name in TABLE and TABLE[op.name][0] < 4:
            known = op.name in _ACTING or (TABLE[op.name][0] == PLAIN and op.name not in _MOVING)
            known |= op.name == "ttg.inline_asm" and (not op.inputs or _votes(op))  # of the CTA alone, such as a fence
            if not known:
                raise op.error("not simulated in kernels with clusters")
        if inside and op.name in ("ttng.init_barrier", "ttng.cluster_barrier"):
            raise op.error(f"in {inside} of a kernel with clusters this is not simulated")
        _whole(op, ctas)
        for region in op.regions:
            _visit(region, ctas, "a partition" if op.name == "ttg.warp_specialize" else inside or "a loop or branch")


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


def local(op: Op, kind: Type) -> Type:
    """What one CTA has of a tile of a type: the type itself without clusters."""
    return kind if op.ctas is None else op.ctas.local(kind)


def parts_of(op: Op, kind: Type) -> list[tuple[slice, ...]] | None:
    """The part of a tensor that each CTA has in its registers; None if it is the whole."""
    if op.ctas is None or kind.shape is None:
        return None
    split = op.ctas.split(kind)
    return [split.own(kind.shape, cta) for cta in range(op.ctas.count)] if max(split.parts, default=1) > 1 else None


def to_registers(op: Op, kind: Type, tile: Type) -> Callable[[np.ndarray, int], np.ndarray]:
    """What loads the bits of a CTA's part of a tile into a tensor: into its own part of that."""
    parts = parts_of(op, kind)
    if parts is None:
        _same_shape(op, local(op, tile), kind.shape)
        return lambda value, cta: value
    shape, held = kind.shape or (), parts_of(op, tile)
    if held is not None and held != parts:
        raise op.error("the tile and the tensor are spread over the CTAs in different ways: this is not simulated")

    def spread(value: np.ndarray, cta: int) -> np.ndarray:
        whole = np.zeros(shape, value.dtype) if value.dtype.kind != "f" else np.full(shape, np.nan, value.dtype)
        whole[parts[cta]] = value if held is not None else value[parts[cta]]
        return whole

    return spread


def from_registers(op: Op, kind: Type, tile: Type) -> Callable[[Any, int], Any]:
    """What takes out of a tensor the part of a tile that a CTA stores."""
    parts, held = parts_of(op, kind), parts_of(op, tile)
    if parts is not None and held != parts:
        raise op.error("the tile and the tensor are spread over the CTAs in different ways: this is not simulated")
    if held is None:
        return lambda value, cta: value
    shape = kind.shape or ()
    return lambda value, cta: np.broadcast_to(value, shape)[held[cta]]


def _same_shape(op: Op, tile: Type, shape: tuple[int, ...] | None) -> None:
    if op.ctas is not None and tile.shape != shape:
        raise op.error("a CTA loads more of a tile than it has: this is not simulated")


def limited(op: Op, kind: Type, once: bool) -> Callable[[Any, int], Any] | None:
    """What turns the mask of a global access into that of a CTA's part; `once`: of equal parts only the first."""
    if op.ctas is None or (kind.shape is None and not once):
        return None
    shape, split, parts = kind.shape or (), op.ctas.split(kind), parts_of(op, kind)
    copies = op.ctas.count - 1 if kind.shape is None else split.copies

    def limit(mask: Any, cta: int) -> Any:
        if once and cta & copies:
            return np.zeros(shape, np.bool_)
        if parts is None:
            return mask
        own = np.zeros(shape, np.bool_)
        own[parts[cta]] = True if mask is None else np.broadcast_to(mask, shape)[parts[cta]]
        return own

    return limit


class Cluster:
    """The CTAs of one program while it runs: what they share."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.names: list[str] = []  # of its CTAs, as roles end
        self._turns: dict[tuple[int, int], int] = {}
        self._made: dict[tuple[int, int], tuple[Any, int]] = {}  # (op, turn) -> (buffer, CTAs that have it)
        self._come = self.generation = 0
        self._collected: Clock | None = None
        self._released: Clock | None = None

    def shared(self, uid: int, cta: int, make: Callable[[], Any]) -> Any:
        """The buffer of an allocation: made by the CTA that comes first, and the same for the others."""
        if self.count == 1:
            return make()
        turn = self._turns[uid, cta] = self._turns.get((uid, cta), 0) + 1
        buffer, seen = self._made.pop((uid, turn), None) or (make(), 0)
        if seen + 1 < self.count:
            self._made[uid, turn] = buffer, seen + 1
        return buffer

    def meet(self, task: Task, relaxed: bool = False) -> Generator[Wait | None, None, None]:
        """Wait until every CTA has come; each then knows what all knew, unless the barrier is relaxed."""
        mine = task.clock if not relaxed else task.clock * 0
        self._collected = mine.copy() if self._collected is None else joined(self._collected, mine)
        task.advance()
        self._come += 1
        wait = ClusterWait(self)
        if self._come == self.count:
            self._come = 0
            self.generation += 1
            self._released, self._collected = self._collected, None
        if not wait.ready():
            yield wait
        task.learn(self._released)

    @property
    def come(self) -> int:
        return self._come


class ClusterWait(Wait):
    """A generation of the barrier of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.generation = cluster, cluster.generation

    def ready(self) -> bool:
        return self.cluster.generation > self.generation

    def describe(self) -> str:
        return f"the barrier of its cluster; {self.cluster.come} of {self.cluster.count} CTAs have come"


def group(cta: int, bits: int) -> list[int]:
    """The CTAs that differ from one only in some bits."""
    return [cta & ~bits | each for each in range(bits + 1) if each & ~bits == 0]


def barrier_copies(op: Op, kind: Type) -> int:
    """The bits of the CTA that do not choose a barrier: of those CTAs only the first has one, and it is theirs."""
    return 0 if op.ctas is None else op.ctas.split(kind).copies


__all__ = ["Cluster", "ClusterWait", "Ctas", "Split", "clustered"]
