"""How the elements of a register tensor are spread over the warps of a role."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from .ctas import layouts_of
from .module import Block, Meetings, Module, Op
from .valuetypes import Type, split_top

_LISTS = re.compile(r"\[([-\d, ]*)\]")
_ACCESSES = {"tt.load", "tt.store", "amdg.buffer_load", "amdg.buffer_store"}
_WITHOUT_BARRIER = (
    "arith.", "math.", "scf.", "cf.", "tt.splat", "tt.make_range", "tt.expand_dims", "tt.broadcast", "tt.addptr",
    "tt.bitcast", "tt.fp_to_fp", "tt.get_", "tt.clampf", "tt.int_to_ptr", "tt.return",
)  # fmt: skip
_NAMED = re.compile(r"(?<![\w.])bar(?:rier)?\.(?!warp)")
_WITHOUT_OWN = ("ttg.memdesc_", "ttng.fence_async_shared", "tt.elementwise_inline_asm", "ttg.local_load")
READING = {  # what any warp stored to shared memory; Triton puts a barrier before that only if it knows of a store
    "ttng.warp_group_dot", "ttng.warp_group_dot_parts", "ttng.tc_gen5_mma", "ttng.async_tma_copy_local_to_global",
    "ttng.async_tma_reduce",
}  # fmt: skip

Bases = tuple[tuple[int, ...], ...]  # the element that each bit of the warp's number selects


def warps_of(kind: Type, layouts: Mapping[str, str]) -> Bases | None:
    """Return how a tensor is spread over warps; None if its layout is not understood."""
    parts = split_top(kind.text.partition("<")[2][:-1])
    return _warps(parts[1], layouts) if kind.kind == "tensor" and len(parts) > 1 else None


def owners(kind: Type, layouts: Mapping[str, str]) -> np.ndarray | None:
    """Return the warp of each element, the first of those that have it; 0 for a scalar. None if that is unknown."""
    shape, bases = kind.shape, warps_of(kind, layouts)
    if shape is None:
        return np.zeros((), np.int16)
    if bases is None:
        return None
    found, indices = np.zeros(shape, np.int16), np.indices(shape, sparse=True)
    for bit, basis in enumerate(bases):
        steps = [(dim, step) for dim, step in enumerate(basis) if step % shape[dim]]
        if len(steps) > 1 or any(step & (step - 1) for _, step in steps):
            return None
        for dim, step in steps:
            found |= (indices[dim] & step != 0).astype(np.int16) << bit
    return found


def mark_accesses(module: Module) -> None:
    """Fill `owners` of loads and stores of global memory in roles of several warps, and `meetings`."""
    if module.num_ctas == 1:
        _mark(module.functions[module.entry], module.num_warps, layouts_of(module.text), Meetings())


def _mark(block: Block, num_warps: int, layouts: Mapping[str, str], meetings: Meetings) -> None:
    for op in block.ops:
        if op.name in _ACCESSES and num_warps > 1 and not op.flag("isVolatile"):
            op.owners = owners(op.inputs[0] if op.name.startswith("tt.") else op.outputs[0], layouts)
        if op.owners is not None or not _without_barrier(op, layouts):
            op.meetings = meetings
        for region in op.regions if op.name not in ("tt.reduce", "tt.scan", "tt.map_elementwise") else ():
            _mark(region, region.num_warps or num_warps, layouts, meetings)


def _without_barrier(op: Op, layouts: Mapping[str, str]) -> bool:
    """Whether Triton surely puts no barrier into an operation."""
    if op.name == "ttg.convert_layout":
        before, after = (warps_of(kind, layouts) for kind in (op.inputs[0], op.outputs[0]))
        return before is not None and before == after
    return op.name in _ACCESSES or op.name.startswith(_WITHOUT_BARRIER)


def needs_reason(op: Op) -> bool:
    """Whether Triton puts a barrier into an operation only for a store to its shared memory that Triton knows."""
    if op.name == "ttg.inline_asm":
        return _NAMED.search(op.strings[0]) is None
    return op.name in READING or op.name.startswith(_WITHOUT_OWN)


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
