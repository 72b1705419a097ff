"""Branches that a warp takes alone hold nothing that needs the other warps of its role.

A vote of a warp (`vote.sync`) may differ from those of the other warps, so a branch on it may be taken by one warp. A
role is one unit in the simulator and takes such a branch as a whole. On a card a barrier, a product of four warps or an
exchange of elements with another warp would wait for ever in it, or read what was never written. So it is refused here,
before anything runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from .ctas import layouts_of
from .module import Block, Module, Op
from .warps import warps_of

_VOTE = "vote.sync"
_OF_A_ROLE = {  # operations that Triton compiles for all warps of a role, or for one thread of them
    "gpu.barrier", "ttg.barrier", "ttng.cluster_barrier", "ttng.arrive_barrier", "ttng.barrier_expect",
    "ttng.warp_group_dot", "ttng.warp_group_dot_wait", "ttng.tc_gen5_mma", "ttng.tc_gen5_mma_scaled",
    "ttng.tc_gen5_commit", "ttng.async_tma_copy_global_to_local", "ttng.async_tma_copy_local_to_global",
    "ttng.async_tma_reduce", "ttng.async_tma_gather", "ttng.async_tma_scatter", "ttng.async_tma_store_wait",
}  # fmt: skip
_BRANCHES = {"scf.if", "scf.for", "scf.while", "scf.index_switch"}


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
            whole = any(0 < basis[axis] < rows[axis] for basis in warps_of(op.inputs[0], self.layouts) or ())
        if op.name == "ttg.convert_layout":
            before, after = (warps_of(kind, self.layouts) for kind in (op.inputs[0], op.outputs[0]))
            whole = None not in (before, after) and before != after
        if whole:
            raise op.error("one warp may be here without the others of its role, after a vote; this needs all of them")


def _votes(op: Op) -> bool:
    return bool(op.strings) and _VOTE in op.strings[0]


def _carried(op: Op, region: Block) -> list[str]:
    """The arguments of a loop's region that its last pass filled."""
    return region.arguments[1:] if op.name == "scf.for" else region.arguments
