"""Derivatives of traced scores: reverse mode over their nodes, so that a score needs no second function.

    f(s, b, h, q, k, captured) ──▶ slope        df/ds, a node over the same symbols
                               ──▶ adjoints     for every read T[i, j]: df/dT[i, j], and the indices i, j

With g the gradient of the new score, s gets g * slope, and g * value is added to T's gradient at the index. Derivatives
are nodes of the same language: `evaluate` and the kernels run them like the score itself, and a slope that depends on
nothing folds to a constant (1.0 for ALiBi, Bias and others that only add).

Derivatives at kinks are torch's: 0 for abs at 0; of two equal operands of minimum or maximum each gets half, but all of
it if the other is a constant. Comparisons, ints, // and the computation of an index have none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from warpattn.language.nodes import Node, Program, Trace, build, const, make, postorder, running


class Adjoint(NamedTuple):
    """The derivative with respect to an element of a captured float tensor; an index outside has none."""

    slot: int  # of the tensor among the program's
    index: tuple[Node, ...]
    value: Node

    @property
    def symbols(self) -> frozenset[str]:
        """Symbols that the index depends on: {"h"} for a number per head, {"h", "q", "k"} for a bias per head."""
        return frozenset(node.value for node in postorder(self.index) if node.op == "sym")


@dataclass(frozen=True, eq=False)
class Derivative:
    """A score and its derivatives, recorded in one trace, so that shared parts are one node.

    `tensors` are the score's, in its order. Scores with equal keys have equal derivatives.
    """

    score: Node
    slope: Node
    adjoints: tuple[Adjoint, ...]
    tensors: tuple[Tensor, ...]

    @property
    def constant_slope(self) -> float | None:
        """df/ds if it is one number, so that no kernel has to compute it; else None."""
        return self.slope.value if self.slope.is_constant else None

    @property
    def bounded(self) -> bool:
        """Whether slope and adjoints are finite for finite scores and tensors, so that 0 times them is 0."""
        nodes = postorder((self.slope, *(adjoint.value for adjoint in self.adjoints)))
        return not any(node.op in ("exp", "log") or _divides_by_a_value(node) for node in nodes)

    def program(self, *outputs: Node) -> Program:
        """Make a program of some of the nodes, for a kernel to compile."""
        return Program(outputs, self.tensors)


def differentiate(score: Node, tensors: tuple[Tensor, ...]) -> Derivative:
    """Differentiate a traced score by the symbol s and by the elements of float `tensors` that it reads."""
    recorder = Trace()
    recorder.tensors = list(tensors)
    token = running.set(recorder)
    try:
        score = _recorded(score)
        order = postorder((score,))
        adjoint_of = _reverse(score, order)
    finally:
        running.reset(token)
    slope = const(0.0, "float")
    adjoints = []
    for node in order:
        if node.op == "sym" and node.value == "s":
            slope = adjoint_of.get(id(node), slope)
        elif node.op == "load" and id(node) in adjoint_of:
            adjoints.append(Adjoint(node.value, node.operands, adjoint_of[id(node)]))
    return Derivative(score, slope, tuple(adjoints), tensors)


def _recorded(score: Node) -> Node:
    """Rebuild the nodes in the running trace, so that equal nodes built on them are the same objects."""
    again: dict[int, Node] = {}
    for node in postorder((score,)):
        op, dtype, *rest = node
        again[id(node)] = make(op, dtype, *(again[id(part)] if type(part) is Node else part for part in rest))
    return again[id(score)]


def _reverse(score: Node, order: list[Node]) -> dict[int, Node]:
    """Return the adjoint of every float node that needs one, by `id`."""
    moving: set[int] = set()  # nodes that change with s or with a float that is read
    for node in order:
        leaf = node.value == "s" if node.op == "sym" else node.op == "load"
        if node.dtype == "float" and (leaf or (node.op in _RULES and any(id(x) in moving for x in node.operands))):
            moving.add(id(node))
    adjoint_of = {id(score): const(1.0, "float")} if id(score) in moving else {}
    for node in reversed(order):
        if id(node) not in adjoint_of or node.op not in _RULES:
            continue
        for operand, rule in zip(node.operands, _RULES[node.op], strict=True):
            if rule is not None and id(operand) in moving:
                part = rule(adjoint_of[id(node)], node, *node.operands)
                known = adjoint_of.get(id(operand))
                adjoint_of[id(operand)] = part if known is None else _add(known, part)
    return adjoint_of


def _divides_by_a_value(node: Node) -> bool:
    if node.op != "truediv":
        return False
    _, divisor = node.operands
    return not (divisor.is_constant and divisor.value != 0)


def _float(op: str) -> Callable[..., Node]:
    return lambda *operands: build(op, "float", *operands)


_add, _div, _neg, _sub = (_float(op) for op in ("add", "truediv", "neg", "sub"))


def _mul(a: Node, b: Node) -> Node:
    """a * b with constant factors multiplied together: cap * (1 - t * t) * (1 / cap) is 1 - t * t."""
    for this, other in ((a, b), (b, a)):
        if this.is_constant and other.op == "mul":
            for inner, rest in (other.operands, other.operands[::-1]):
                if inner.is_constant:
                    factor = this.value * inner.value
                    return _mul(const(1.0 if abs(factor - 1.0) < 1e-15 else factor, "float"), rest)
    return build("mul", "float", a, b)


def _zero() -> Node:
    return const(0.0, "float")


def _where(condition: Node, yes: Node, no: Node) -> Node:
    return build("where", "float", condition, yes, no)


def _sign_of(g: Node, x: Node) -> Node:
    """g * sign(x), 0 at 0; not a product, so that it stays finite where g is not used."""
    above, below = build("gt", "bool", x, _zero()), build("lt", "bool", x, _zero())
    return _where(above, g, _where(below, _neg(g), _zero()))


def _chosen(g: Node, x: Node, other: Node, op: str) -> Node:
    """g where minimum or maximum is x. At a tie each operand gets half, but all of it if the other is a constant."""
    if other.is_constant:
        return _where(build({"minimum": "le", "maximum": "ge"}[op], "bool", x, other), g, _zero())
    strictly = build({"minimum": "lt", "maximum": "gt"}[op], "bool", x, other)
    return _where(strictly, g, _where(build("eq", "bool", x, other), _mul(g, const(0.5, "float")), _zero()))


def _mod_divisor(g: Node, node: Node, a: Node, b: Node) -> Node:
    """The adjoint of b in a % b = a - b * (a // b), where the quotient counts as constant."""
    return _neg(_mul(g, build("floordiv", "float", a, b)))


# For each operand of an op its rule (g, node, *operands) -> adjoint, None if it has no derivative.
_RULES: dict[str, tuple[Callable[..., Node] | None, ...]] = {
    "add": (lambda g, *_: g, lambda g, *_: g),
    "sub": (lambda g, *_: g, lambda g, *_: _neg(g)),
    "neg": (lambda g, *_: _neg(g),),
    "mul": (lambda g, _, a, b: _mul(g, b), lambda g, _, a, b: _mul(g, a)),
    "truediv": (lambda g, _, a, b: _div(g, b), lambda g, node, a, b: _neg(_mul(g, _div(node, b)))),
    "mod": (lambda g, *_: g, _mod_divisor),
    "abs": (lambda g, _, a: _sign_of(g, a),),
    "minimum": (lambda g, _, a, b: _chosen(g, a, b, "minimum"), lambda g, _, a, b: _chosen(g, b, a, "minimum")),
    "maximum": (lambda g, _, a, b: _chosen(g, a, b, "maximum"), lambda g, _, a, b: _chosen(g, b, a, "maximum")),
    "where": (None, lambda g, _, c, a, b: _where(c, g, _zero()), lambda g, _, c, a, b: _where(c, _zero(), g)),
    "exp": (lambda g, node, a: _mul(g, node),),
    "log": (lambda g, _, a: _div(g, a),),
    "tanh": (lambda g, node, a: _mul(g, _sub(const(1.0, "float"), _mul(node, node))),),
}
