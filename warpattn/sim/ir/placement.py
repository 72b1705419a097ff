"""Where Triton puts a kernel's buffers in shared memory.

Two buffers may get the same bytes if their uses do not overlap; uses extend from the allocation to the last operation
that names it. Work that runs later, such as a copy out of a tile, then reads what the next buffer holds.
"""

from __future__ import annotations

import re
import tempfile
from functools import lru_cache
from typing import Any, NamedTuple

# Bytes of shared memory that a block may have.
BLOCK_BYTES = {
    "cuda:90": 232_448, "cuda:100": 232_448, "cuda:103": 232_448, "hip:gfx942": 65_536, "hip:gfx950": 163_840,
}  # fmt: skip
_PTX = 90  # PTX version, on which the space for layout conversions depends
_TOTAL = re.compile(r"\bttg\.shared = (\d+)")
_ALLOCATED = re.compile(r"= ttg\.local_alloc\b.*\ballocation\.offset = (\d+)")


class Placement(NamedTuple):
    """Offsets in shared memory."""

    first: tuple[int, ...]  # the first one of each buffer, in the order of their allocations
    total: int


def may_share(block: Any) -> bool:
    """Whether buffers of a kernel may get the same bytes: one is allocated after another's last use, or within a loop,
    a branch or a role."""
    owners: dict[str, str] = {}  # a name of a buffer or a view of it -> the buffer
    begins: dict[str, int] = {}
    ends: dict[str, int] = {}
    for i, op in enumerate(block.ops):
        if op.name == "ttg.local_alloc":
            owners[op.results[0]] = op.results[0]
            begins[op.results[0]] = ends[op.results[0]] = i
        for inner in _within(op):
            if inner is not op and inner.name == "ttg.local_alloc":
                return True
            named = {owners[name] for name in inner.operands if name in owners}
            ends.update(dict.fromkeys(named, i))
            views = [name for name, kind in zip(inner.results, inner.outputs, strict=False) if "memdesc" in kind.text]
            owners.update({view: owner for view in views for owner in named})
    return len(begins) > 1 and min(ends.values()) < max(begins.values())


def _within(op: Any) -> list[Any]:
    """List an operation and those of its regions."""
    return [op, *(each for region in op.regions for inner in region.ops for each in _within(inner))]


@lru_cache(64)
def placement(text: str, target: str) -> Placement:
    """Place a kernel's buffers by the passes that Triton runs on its TTGIR; none for a text that Triton cannot
    read."""
    from triton._C.libtriton import amd, ir, nvidia, passes

    context = ir.context()
    for dialects in (ir, nvidia, amd):
        dialects.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(text)
        file.flush()
        try:
            module = ir.parse_mlir_module(file.name, context)
        except RuntimeError:
            return Placement((), 0)
    module.context = context
    manager, (maker, _, chip) = ir.pass_manager(context), target.partition(":")
    if maker == "cuda":
        passes.ttgpuir.add_combine_tensor_select_and_if(manager)
        passes.ttgpuir.add_allocate_warp_groups(manager, False)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    if maker == "cuda":
        nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, int(chip), _PTX)
    else:
        amd.passes.ttgpuir.add_allocate_shared_memory(manager, chip)
    manager.run(module, "placement")
    placed = str(module)
    total = _TOTAL.search(placed)
    return Placement(tuple(int(found) for found in _ALLOCATED.findall(placed)), int(total[1]) if total else 0)
