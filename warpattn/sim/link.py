"""Makes a parsed module ready to run: every SSA name gets a slot, every op its function.

Functions and partitions have a frame of slots each; names are looked up from the inside out. Bodies of reductions are
written for scalars but run on whole arrays, so their types are lifted.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from typing import Any

from . import ops as _ops  # noqa: F401  fills the table
from .errors import SimulationError
from .ir.branches import check_branches
from .ir.module import Block, Module, Op, walk
from .ir.warps import READING, mark_accesses, needs_reason
from .machine.clusters import clustered
from .machine.exchange import exchange, update_once
from .machine.registry import ACTING, BLOCKING, END, LOOKING, PLAIN, TABLE

_ALLOCATING = {"ttg.local_alloc", "ttng.tmem_alloc"}
_ISOLATED = {"ttg.warp_specialize"}
_LIFTED = {"tt.reduce", "tt.scan", "tt.map_elementwise"}
_FOR = re.compile(r"(%[\w.$-]+) = (%\S+) to (%\S+) step (%\S+)")
_PAIR = re.compile(r"(%[\w.$-]+) = (%[\w.$-]+(?:#\d+)?)")


class Scope:
    """Names of one region, and those around it."""

    def __init__(self, outer: Scope | None, counter: list[int]) -> None:
        self.slots: dict[str, int] = {}
        self.outer, self.counter = outer, counter

    def define(self, name: str) -> int:
        slot = self.counter[0]
        self.counter[0] += 1
        self.slots[name] = slot
        return slot

    def find(self, name: str) -> int | None:
        slot = self.slots.get(name)
        return self.outer.find(name) if slot is None and self.outer is not None else slot


def link(module: Module) -> Module:
    """Fill `slots`, `frame`, `ins`, `outs`, `kind` and `run` of every block and op, in place."""
    clustered(module)
    mark_accesses(module)
    _label([op for block in module.functions.values() for op in walk(block) if op.name in _ALLOCATING])
    for block in module.functions.values():
        _frame(block)
    if module.num_ctas > 1:
        for op in (op for block in module.functions.values() for op in walk(block) if op.name == "tt.atomic_rmw"):
            update_once(op, module.text)
            op.acts = True
    check_branches(module)
    return module


def _label(allocations: list[Op]) -> None:
    """Name allocations after the Python variable they are assigned to, with Triton's number if that is ambiguous."""
    variables = [_variable(op) for op in allocations]
    for op, variable in zip(allocations, variables, strict=True):
        number = re.search(r"_\d+$", op.results[0])
        unique = variables.count(variable) == 1
        op.label = variable + ("" if unique or number is None else number[0])


def _variable(op: Op) -> str:
    line = linecache.getline(*op.frames[0]) if op.frames else ""
    found = re.match(r"\s*([A-Za-z_]\w*) = ", line)
    return found[1] if found else op.results[0].lstrip("%")


def _frame(block: Block) -> None:
    counter = [0]
    _block(block, Scope(None, counter), False)
    block.frame = counter[0]


def _block(block: Block, scope: Scope, lifted: bool) -> None:
    block.slots = tuple(scope.define(name) for name in block.arguments)
    for op in block.ops:
        if lifted:
            op.inputs, op.outputs = [t.lifted() for t in op.inputs], [t.lifted() for t in op.outputs]
        _op(op, scope, lifted)
    block.blocking = any(op.kind != PLAIN for op in block.ops if op.kind != END)


def _op(op: Op, scope: Scope, lifted: bool) -> None:
    if op.name == "scf.for":
        found = _FOR.search(op.text)
        if found is None:
            raise op.error("the header of this loop is not understood")
        carried = _PAIR.findall(op.text.partition("iter_args(")[2].partition(") -> (")[0])
        op.regions[0].arguments = [found[1], *(name for name, _ in carried)]
        op.operands = [found[2], found[3], found[4], *(value for _, value in carried)]
    elif op.name == "scf.while":
        carried = _PAIR.findall(op.text.partition(") : ")[0])
        op.regions[0].arguments = [name for name, _ in carried]
        op.operands = [value for _, value in carried]
    op.ins = tuple(_lookup(op, name, scope) for name in op.operands)
    for region in op.regions:
        if op.name in _ISOLATED and region.label != "default":
            _frame(region)
        elif op.targets:  # the blocks of one region see each other's names
            _block(region, scope, lifted)
        else:
            _block(region, Scope(scope, scope.counter), lifted or op.name in _LIFTED)
    op.outs = tuple(scope.define(name) for name in op.results)
    found = TABLE.get(op.name)
    if found is None:
        raise SimulationError(f"the simulator does not know the operation {op.name} at {op.where}: {op.raw[:160]}")
    op.kind = found[0]
    op.run = built(op)
    if op.exchanged:
        exchange(op)
    op.acts = op.kind in (ACTING, BLOCKING) and (op.exchanged or op.name not in LOOKING)


def built(op: Op) -> Callable[..., Any]:
    """Build the function of an op; it counts the op if the warps of a role may meet in it."""
    run, meetings = TABLE[op.name][1](op), op.meetings
    if meetings is None or op.owners is not None:
        return run
    anyway = not needs_reason(op)

    def met(*values: Any) -> Any:
        meetings.count += 1
        meetings.anyway += anyway
        return run(*values)

    def read(role: Any, *values: Any) -> Any:
        if role.apart.seen:
            role.apart.check(values, role.place(), meetings.anyway)
        return met(role, *values)

    return read if op.name in READING else met


def _lookup(op: Op, name: str, scope: Scope) -> int:
    slot = scope.find(name)
    if slot is None and scope.find(f"{name}#0") is not None:
        slot = scope.find(f"{name}#0")
    if slot is None:
        raise op.error(f"{name} is not defined")
    return slot
