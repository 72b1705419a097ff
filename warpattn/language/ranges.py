"""Bounds the values of integer nodes, so that results that may exceed 32 bits are computed in 64.

Positions stay below `POSITIONS`: that many keys of 8 two-byte elements fill 4 GiB per head. An int32 tensor may hold
any 32-bit number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from warpattn.inputs import kind_of
from warpattn.language import eager
from warpattn.language.nodes import Node, cast, const, running
from warpattn.language.user_code import user_error


class Interval(NamedTuple):
    """The least and the greatest value of an integer."""

    low: int
    high: int

    @property
    def magnitude(self) -> int:
        """The largest absolute value."""
        return max(-self.low, self.high, 0)

    def within(self, bounds: Interval) -> bool:
        """Whether all values are within the bounds."""
        return bounds.low <= self.low and self.high <= bounds.high


Known = dict[int, tuple[Interval, Node]]  # by the node's id, unique while the entry keeps the node alive

POSITIONS = 2**28
ZERO, BOOL = Interval(0, 0), Interval(0, 1)
INT32 = Interval(*eager.INT32)
INT64 = Interval(-(2**63), 2**63 - 1)


def interval(node: Node, known: Known | None = None) -> Interval:
    """Bound the values of an integer or boolean node. 32-bit nodes are not cut to 32 bits, which only nodes made by
    hand exceed. Stores what it finds in `known`."""
    known = {} if known is None else known
    if id(node) not in known:
        known[id(node)] = _interval(node, known), node
    values, _ = known[id(node)]
    return values


def whole_number(value: int) -> Node:
    """Make a constant of 32 or, if needed, 64 bits; raises AttentionError beyond 64."""
    exactly = Interval(value, value)
    if not exactly.within(INT64):
        raise user_error(f"the number {kind_of(value)} meets a symbol", "ints have at most 64 bits")
    return const(value, "int" if exactly.within(INT32) else "int64")


def wide_enough(op: str, nodes: list[Node]) -> list[Node]:
    """Cast 32-bit operands to int64 if their result might not fit 32 bits."""
    if nodes[0].dtype != "int" or _OF[op](*(interval(node, _known()) for node in nodes)).within(INT32):
        return nodes
    return [cast(node, "int64") for node in nodes]


def never_zero(node: Node) -> bool:
    """Whether an integer node cannot be 0."""
    low, high = interval(node, _known())
    return low > 0 or high < 0


def is_below(node: Node, limit: int) -> bool:
    """Whether an integer node has values from 0 on and below the limit alone."""
    low, high = interval(node, _known())
    return low >= 0 and high < limit


def _known() -> Known:
    """Return the ranges that the running trace knows."""
    recorder = running.get()
    return {} if recorder is None else recorder.ranges


def _interval(node: Node, known: Known) -> Interval:
    op, dtype = node.op, node.dtype
    if op == "const":
        return Interval(int(node.value), int(node.value))
    if dtype == "bool":
        return BOOL
    if op == "sym":
        return Interval(-POSITIONS if node.value.startswith("q") else 0, 2 * POSITIONS)
    whole = INT64 if dtype == "int64" else INT32
    operands = node.operands
    if op not in _OF or any(operand.dtype == "float" for operand in operands):
        return whole
    values = _OF[op](*(interval(operand, known) for operand in operands))
    return values if dtype == "int" or values.within(whole) else whole


def _product(a: Interval, b: Interval) -> Interval:
    ends = [x * y for x in a for y in b]
    return Interval(min(ends), max(ends))


def _quotient(a: Interval, b: Interval) -> Interval:
    """A quotient by 0 is 0."""
    if b.low > 0:
        ends = [x // y for x in a for y in b]
        return Interval(min(0, *ends) if a.low < 0 < a.high else min(ends), max(ends))
    return Interval(-a.magnitude, a.magnitude)


def _remainder(a: Interval, b: Interval) -> Interval:
    """The remainder of a division by 0 is the dividend; the quotient by -1 has its magnitude and must fit as well."""
    if b.low > 0:
        return Interval(0, b.high - 1)
    most = max(b.magnitude - 1, a.magnitude if b.high >= -1 else 0)
    return Interval(-most, most)


def _shifted(a: Interval, b: Interval) -> Interval:
    most = 2 ** min(max(b.high, 0), 64)
    return Interval(min(a.low, a.low * most), max(a.high, a.high * most))


def _either(*options: Interval) -> Interval:
    return Interval(min(option.low for option in options), max(option.high for option in options))


def _bits(a: Interval, b: Interval = ZERO) -> Interval:
    """Bound bitwise results by all numbers of as many bits."""
    bits = max(abs(end).bit_length() for end in (*a, *b))
    return Interval(0 if a.low >= 0 and b.low >= 0 else -(2**bits), 2**bits - 1)


_OF: dict[str, Callable[..., Interval]] = {
    "add": lambda a, b: Interval(a.low + b.low, a.high + b.high),
    "sub": lambda a, b: Interval(a.low - b.high, a.high - b.low),
    "mul": _product,
    "floordiv": _quotient,
    "mod": _remainder,
    "neg": lambda a: Interval(-a.high, -a.low),
    "abs": lambda a: Interval(max(a.low, -a.high, 0), a.magnitude),
    "not": lambda a: Interval(-a.high - 1, -a.low - 1),
    "and": _bits,
    "or": _bits,
    "xor": _bits,
    "shl": _shifted,
    "shr": lambda a, _: _either(a, ZERO),
    "where": lambda _, a, b: _either(a, b),
    "minimum": lambda a, b: Interval(min(a.low, b.low), min(a.high, b.high)),
    "maximum": lambda a, b: Interval(max(a.low, b.low), max(a.high, b.high)),
    "int": lambda a: a,
    "int64": lambda a: a,
}
