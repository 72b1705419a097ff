"""Branches that a warp takes alone hold nothing that needs the other warps of its role.

A vote of a warp (`vote.sync`) may differ from those of the other warps, so a branch on it may be taken by one warp. A
role is one unit in the simulator and takes such a branch as a whole. On a card a barrier, a product of four warps or an
exchange of elements with another warp would wait for ever in it, or read what was never written. So it is refused here,
before anything runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .ctas import layouts_of
from .module import Block, Module, Op
from .valuetypes import Type, split_top

_VOTE = "vote.sync"
_OF_A_ROLE = {  # operations that Triton compiles for all warps of a role, or for one thread of them
    "gpu.barrier", "ttg.barrier", "ttng.cluster_barrier", "ttng.arrive_barrier", "ttng.barrier_expect",
    "ttng.warp_group_dot", "ttng.warp_group_dot_wait", "ttng.tc_gen5_mma", "ttng.tc_gen5_mma_scaled",
    "ttng.tc_gen5_commit", "ttng.async_tma_copy_global_to_local", "ttng.async_tma_copy_local_to_global",
    "ttng.async_tma_reduce", "ttng.async_tma_gather", "ttng.async_tma_scatter", "ttng.async_tma_store_wait",
}  # fmt: skip
_BRANCHES = {"scf.if", "scf.for", "scf.while", "scf.index_switch"}
_LISTS = re.compile(r"\[([-\d, ]*)\]")

Bases = tuple[tuple[int, ...], ...]  # the element that each bit of the warp's number selects


def check_branches(module: Module) -> None:
    """Raises SimulationError at the first operation of all warps in a branch of one."""
    found = _Branches(layouts_of(module.text))
    for block in module.functions.values():
        found.block(block, frozenset(), module.num_warps == 1, False)


class _Branches:
    """Follows what depends on votes."""

    def __init__(self, layouts: Mapping[str, str]) -> None:
        self.layouts = layouts

    def block(self, block: Block, votes: frozenset[str], single: bool, alone: bool) -> list[bool]:
        """Which operands of the block's last operation depend on votes. `votes`: names around it that do; `single`: its
        role has one warp; `alone`: a warp may be here without the others."""
        known = set(votes) - set(block.arguments)
        for op in block.ops:
            if alone and not single:
                self.check(op)
            depends = [name in known for name in op.operands]
            results = [any(depends) or _votes(op)] * len(op.results)
            if op.regions:
                results = self.regions(op, known, single, alone)
            for name, kind, does in zip(op.results, op.outputs, results, strict=False):
                known.add(name) if does and kind.shape is None else known.discard(name)
        return [name in known for name in block.ops[-1].operands] if block.ops else []

    def regions(self, op: Op, known: set[str], single: bool, alone: bool) -> list[bool]:
        """Which results of an operation with regions depend on votes."""
        branches = op.name in _BRANCHES
        own = branches and any(name in known for name in op.operands[: 3 if op.name == "scf.for" else 1])
        carried, inside = [False] * len(op.results), known
        for _ in range(2):  # what a pass over a loop returns, the next one begins with
            for region in op.regions:
                warps = single if not region.num_warps else region.num_warps == 1
                entry = inside | {name for name, does in zip(_carried(op, region), carried, strict=False) if does}
                yields = self.block(region, frozenset(entry), warps, alone or own)
                if op.name == "scf.while" and region is op.regions[0]:
                    own, yields = own or yields[:1] == [True], yields[1:]
                if branches:
                    carried = [a or b for a, b in zip(carried, yields + [False] * len(carried), strict=False)]
        return [does or own for does in carried]

    def check(self, op: Op) -> None:
        """Refuses an operation that needs all warps."""
        whole = op.name in _OF_A_ROLE
        if op.name == "tt.reduce":
            axis, rows = op.integer("axis"), op.inputs[0].shape or ()
            whole = any(0 < basis[axis] < rows[axis] for basis in self.warps(op.inputs[0]) or ())
        if op.name == "ttg.convert_layout":
            before, after = self.warps(op.inputs[0]), self.warps(op.outputs[0])
            whole = None not in (before, after) and before != after
        if whole:
            raise op.error("one warp may be here without the others of its role, after a vote; this needs all of them")

    def warps(self, kind: Type) -> Bases | None:
        """How the elements of a tensor are spread over warps; None if its layout is not understood."""
        parts = split_top(kind.text.partition("<")[2][:-1])
        return _warps(parts[1], self.layouts) if kind.kind == "tensor" and len(parts) > 1 else None


def _votes(op: Op) -> bool:
    return bool(op.strings) and _VOTE in op.strings[0]


def _carried(op: Op, region: Block) -> list[str]:
    """The arguments of a loop's region that its last pass filled."""
    return region.arguments[1:] if op.name == "scf.for" else region.arguments


def _warps(layout: str, layouts: Mapping[str, str]) -> Bases | None:
    text = layouts.get(layout, layout)
    if text.startswith("#ttg.slice<"):
        dim, parent = re.search(r"\bdim = (\d)", text), re.search(r"parent = (#.*)\}>$", text)
        bases = _warps(parent[1], layouts) if parent else None
        if dim is None or bases is None:
            return None
        return tuple(basis[: int(dim[1])] + basis[int(dim[1]) + 1 :] for basis in bases)
    if found := re.search(r"\bwarp = \[((?:\[[-\d, ]*\](?:, )?)*)\]", text):
        return tuple(_numbers(each) for each in _LISTS.findall(found[1]))
    lists = {name: _numbers(each) for name, each in re.findall(r"\b(\w+) = \[([-\d, ]*)\]", text)}
    if text.startswith("#ttg.blocked<"):
        units = [n * m for n, m in zip(lists["sizePerThread"], lists["threadsPerWarp"], strict=True)]
        return _dealt(units, lists["warpsPerCTA"], lists["order"])
    if text.startswith("#ttg.nvidia_mma<") and lists["warpsPerCTA"][1:] == (1,):
        return _dealt([16, 1], lists["warpsPerCTA"], (0, 1))
    return None


def _dealt(units: list[int], counts: tuple[int, ...], order: tuple[int, ...]) -> Bases:
    """Bases of warps that have `units` elements of each dimension, `counts` warps in a dimension, in an order."""
    places = [(dim, bit) for dim in order for bit in range(counts[dim].bit_length() - 1)]
    return tuple(tuple(units[d] << bit if d == dim else 0 for d in range(len(units))) for dim, bit in places)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n.strip())
