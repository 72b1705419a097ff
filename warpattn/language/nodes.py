"""Nodes of traced masks and scores, the key of a recorded program, and which symbols and tensors its outputs read.

A `Node` is written `(op, dtype, *args)`, dtype one of "bool", "int" (32 bits), "int64", "float", each argument a node
except in
    ("const", dtype, number)   ("sym", dtype, name)   ("load", dtype, slot, *index nodes)
The other ops: add sub mul truediv floordiv mod neg abs | lt le gt ge eq ne | and or xor not shl shr |
where minimum maximum exp log tanh | float int int64 (casts). Operands of one node have one dtype: casts are nodes.
Within one trace equal nodes are one object, so a walk can store results by `id`.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from warpattn.language import eager

KEEP, FIRST, SPAN = 0, 1, slice(1, None)  # outputs of a mask's program: its condition, then its span from `first` on
_PYTHON = {"bool": bool, "int": int, "int64": int, "float": float}


class Node(tuple[Any, ...]):
    """A node: a tuple, equal to a plain tuple with the same items."""

    __slots__ = ()
    op = property(itemgetter(0))
    dtype = property(itemgetter(1))
    value = property(itemgetter(2))  # of a constant; a symbol's name; the slot of the tensor that a load reads

    @property
    def operands(self) -> tuple[Node, ...]:
        """The nodes that it is computed from; for a load the indices."""
        return () if self.op in ("const", "sym") else self[3:] if self.op == "load" else self[2:]

    @property
    def is_constant(self) -> bool:
        return self.op == "const"


class Trace:
    """Nodes and tensors of one running trace."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[Any, ...], Node] = {}
        self.tensors: list[torch.Tensor] = []
        self.ranges: dict[int, Any] = {}  # see `ranges.Known`

    def slot(self, tensor: torch.Tensor) -> int:
        for slot, known in enumerate(self.tensors):
            if known is tensor:
                return slot
        self.tensors.append(tensor)
        return len(self.tensors) - 1


running: ContextVar[Trace | None] = ContextVar("warpattn_trace", default=None)


class ProgramKey(NamedTuple):
    """Hashable identity of a program's code. Its text is a plain tuple's, which files and operators keep."""

    code: tuple[tuple[Any, ...], ...]  # the nodes in postorder, with numbers for operands
    outputs: tuple[int, ...]  # numbers of the outputs
    tensors: tuple[tuple[str, int], ...]  # dtype and rank of each captured tensor

    def __repr__(self) -> str:
        return tuple.__repr__(self)


@dataclass(frozen=True, eq=False)
class Program:
    """A recorded function: one node per output and the captured tensors, in the order of the load slots."""

    outputs: tuple[Node, ...]
    tensors: tuple[torch.Tensor, ...]

    @cached_property
    def key(self) -> ProgramKey:
        """Hashable identity of the code."""
        order = postorder(self.outputs)
        number_of = {id(node): position for position, node in enumerate(order)}
        code = tuple(_shape_of(node, number_of) for node in order)
        tensors = tuple((str(tensor.dtype), tensor.ndim) for tensor in self.tensors)
        return ProgramKey(code, tuple(number_of[id(node)] for node in self.outputs), tensors)


class Reads(NamedTuple):
    """The symbols and tensors that some outputs of a program are computed from."""

    symbols: frozenset[str]
    tensors: frozenset[int]  # load slots


def reads(key: ProgramKey, outputs: slice = slice(None)) -> Reads:
    """Return what the selected outputs of a program read."""
    code, reached = key.code, set[int]()
    waiting = list(key.outputs[outputs])
    while waiting:
        number = waiting.pop()
        if number not in reached:
            reached.add(number)
            waiting += _operand_numbers(code[number])
    leaves = [code[number][:1] + code[number][2:3] for number in reached]
    return Reads(
        frozenset(name for op, name in leaves if op == "sym"), frozenset(slot for op, slot in leaves if op == "load")
    )


def _operand_numbers(coded: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the numbers of operands of a node in `ProgramKey.code`; constants, symbols and a load's slot have none."""
    op, _, *args = coded
    return () if op in ("const", "sym") else tuple(args[1:] if op == "load" else args)


def postorder(roots: tuple[Node, ...]) -> list[Node]:
    """List every distinct node (by identity) under `roots`, operands before users."""
    order: list[Node] = []
    seen: set[int] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, operands_done = stack.pop()
        if operands_done:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((operand, False) for operand in reversed(node.operands))
    return order


def make(op: str, dtype: str, *args: Any) -> Node:
    """Make a node without simplifying it; inside a trace equal nodes are one object."""
    node = Node((op, dtype, *args))
    recorder = running.get()
    if recorder is None:
        return node
    key = (op, dtype, repr(args[0])) if op == "const" else tuple(id(a) if type(a) is Node else a for a in node)
    return recorder.nodes.setdefault(key, node)


def const(value: Any, dtype: str) -> Node:
    """A constant node."""
    return make("const", dtype, _PYTHON[dtype](value))


def cast(node: Node, dtype: str) -> Node:
    """Cast `node` to "int", "int64" or "float"; returns the node itself if it has that dtype."""
    return node if node.dtype == dtype else build(dtype, dtype, node)


def build(op: str, dtype: str, *args: Node) -> Node:
    """Make the simplest node that equals `op(*args)`: folds constants and operations that change nothing."""
    if all(arg.is_constant for arg in args):
        try:
            return const(eager.OPS[op](*(arg.value for arg in args)), dtype)
        except (ArithmeticError, ValueError):
            pass  # such as 1 << -1: stays as it is
    return _identity(op, args) or make(op, dtype, *args)


def _shape_of(node: Node, number_of: dict[int, int]) -> tuple[Any, ...]:
    """Replace a node's operands by their numbers, a constant by its text, so that -0.0 and nan stay distinct."""
    if node.is_constant:
        return ("const", node.dtype, repr(node.value))
    return tuple(number_of[id(arg)] if type(arg) is Node else arg for arg in node)


def _identity(op: str, args: tuple[Node, ...]) -> Node | None:
    """Return the operand that `op(*args)` equals whatever the others are, else None."""
    if op == "where":
        condition, yes, no = args
        if yes is no:
            return yes
        return None if not condition.is_constant else yes if condition.value else no
    if op in ("not", "neg"):
        (arg,) = args
        return arg.operands[0] if arg.op == op else None
    if len(args) != 2:
        return None
    for this, other in (args, args[::-1]):
        again = this is other or (other.op == op and any(arg is this for arg in other.operands))
        if again and op in ("minimum", "maximum", "and", "or"):
            return other
        if not this.is_constant:
            continue
        value = this.value
        if op in ("and", "or") and this.dtype == "bool":
            return other if value == (op == "and") else this
        if (op == "add" and value == 0) or (op == "mul" and value == 1):
            return other
        if this is args[1] and ((op == "sub" and value == 0) or (op == "truediv" and value == 1)):
            return other
    return None
