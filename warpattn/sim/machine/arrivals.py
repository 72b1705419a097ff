"""Finds the lines of a kernel that may arrive on a barrier in the IR, for the report of a deadlock.

It follows a barrier from its allocation through index and view operations, and into partitions as their arguments.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ir.module import Block, Module, Op

_ARRIVING = {
    "ttng.arrive_barrier", "ttng.barrier_expect", "ttng.async_tma_copy_global_to_local", "ttg.inline_asm",
    "ttng.tc_gen5_mma", "ttng.tc_gen5_commit", "ttng.tc_gen5_mma_scaled", "ttng.clc_try_cancel",
    "ttng.async_tma_gather",
}  # fmt: skip
_VIEWS = {"ttg.memdesc_index", "ttg.memdesc_subslice", "ttg.memdesc_reshape", "ttg.memdesc_trans"}


def arriving_ops(module: Module, allocation: int) -> Iterator[tuple[str, Op]]:
    """Yield (partition, op) of every operation that may arrive on barriers of the allocation with that uid."""
    yield from _search(module.functions[module.entry], "", {}, allocation)


def _search(block: Block, region: str, roots: dict[str, int], allocation: int) -> Iterator[tuple[str, Op]]:
    for op in block.ops:
        if op.name == "ttg.local_alloc":
            roots[op.results[0]] = op.uid
        elif op.name in _VIEWS and op.operands[0] in roots:
            roots[op.results[0]] = roots[op.operands[0]]
        elif op.name in _ARRIVING and any(roots.get(name) == allocation for name in op.operands):
            yield region, op
        for inner in op.regions:
            if inner.label.startswith("partition"):
                pairs = zip(inner.arguments, op.operands, strict=False)
                known = {argument: roots[name] for argument, name in pairs if name in roots}
                yield from _search(inner, inner.label, known, allocation)
            else:
                known = roots if op.targets else dict(roots)
                yield from _search(inner, region if inner.label == "region" else inner.label, known, allocation)
