"""Checks that a kernel's shared and tensor memory fit into those of a block."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from ..errors import SimulationError
from ..ir.module import Block, Module, Op, parse_module
from ..ir.parts import local
from ..ir.placement import BLOCK_BYTES, placement
from ..memory.tensor_memory import COLUMNS, columns_of, layouts
from .clusters import clustered

_VIEWS = {"ttg.memdesc_index", "ttng.tmem_subslice", "ttg.memdesc_reinterpret"}


def check_shared_memory(module: Module) -> None:
    """Raise SimulationError if a kernel needs more shared memory than a block may have. Only if its buffers nearly fill
    that, Triton places them, which takes as long as parsing the text."""
    most = BLOCK_BYTES[module.target]
    buffers = sum(prod(buffer.type.shape or ()) * buffer.type.itemsize for buffer in module.buffers)
    if buffers > most - most // 64 and (needed := placement(module.text, module.target).total) > most:
        needs = f"{module.entry} needs {needed:,} bytes of shared memory"
        raise SimulationError(f"{needs}; a block of {module.target} has {most:,} at most")


def check_tensor_memory(module: Module) -> None:
    """Raise SimulationError if a kernel needs more tensor memory than there is."""
    needed = _needed(module.text)
    if needed > COLUMNS:
        raise SimulationError(f"{module.entry} needs {needed} columns of tensor memory at once; there are {COLUMNS}")


@lru_cache(64)
def _needed(text: str) -> int:
    """Return the most columns that a kernel's allocations need at once; each lives until its last use."""
    module = parse_module(text)
    clustered(module)
    block, names = module.functions[module.entry], layouts(text)
    spans: list[list[int]] = []  # [columns, first, last]
    owners: dict[str, int] = {}
    ops = _straight(block)
    for i, op in enumerate(ops):
        for inner in _walk(op):
            if inner.name == "ttng.tmem_alloc":
                kind = local(inner, inner.outputs[0])
                owners[inner.results[0]] = len(spans)
                spans.append([columns_of(kind, names), i, i])
            for name in inner.operands:
                if name in owners:
                    spans[owners[name]][2] = i
                    if inner.name in _VIEWS:
                        owners[inner.results[0]] = owners[name]
    return max((sum(n for n, a, b in spans if a <= i <= b) for i in range(len(ops))), default=0)


def _straight(block: Block) -> list[Op]:
    """List the ops of all blocks of a region, one block after the other."""
    last = block.ops[-1:]
    if not last or not last[0].targets:
        return block.ops
    return [*block.ops[:-1], *(op for each in last[0].regions for op in each.ops)]


def _walk(op: Op) -> list[Op]:
    """List an op and those in its regions, without partitions, which only see the op's operands."""
    regions: list[Block] = [r for r in op.regions if r.label in ("region", "default")]
    return [op, *(inner for region in regions for each in region.ops for inner in _walk(each))]
