"""The values that an integer node can have, so that sums and products that leave 32 bits are computed in 64.

Positions stay below `POSITIONS`: as many keys of 8 elements fill 4 GiB for one head. An int32 tensor may hold any
32-bit number.
"""

from __future__ import annotations

from collections.abc import Callable

from warpattn.inputs import kind_of
from warpattn.language.eager import INT32
from warpattn.language.nodes import Node, cast, const, running
from warpattn.language.user_code import user_error

Interval = tuple[int, int]
Known = dict[int, tuple[Interval, Node]]  # by the node's id, which is its own as long as the node is kept

POSITIONS = 2**28
INT64: Interval = (-(2**63), 2**63 - 1)


def fits(values: Interval, bounds: Interval = INT32) -> bool:
    """Whether all values are within the bounds."""
    return bounds[0] <= values[0] and values[1] <= bounds[1]


def interval(node: Node, known: Known | None = None) -> Interval:
    """The least and the greatest value of an integer or boolean node, of 32-bit ones without their limit of bits, which
    only nodes made by hand exceed. `known` is filled in on the way."""
    known = {} if known is None else known
    if id(node) not in known:
        known[id(node)] = _interval(node, known), node
    return known[id(node)][0]


def whole_number(value: int) -> Node:
    """A constant of as many bits as it needs; AttentionError beyond 64."""
    if not fits((value, value), INT64):
        raise user_error(f"the number {kind_of(value)} meets a symbol", "ints have at most 64 bits")
    return const(value, "int" if fits((value, value)) else "int64")


def wide_enough(op: str, nodes: list[Node]) -> list[Node]:
    """Operands as int64 if the result of 32-bit ones might not fit 32 bits."""
    if nodes[0][1] != "int" or fits(_OF[op](*(interval(node, _known()) for node in nodes))):
        return nodes
    return [cast(node, "int64") for node in nodes]


def never_zero(node: Node) -> bool:
    """Whether an integer node has no value 0."""
    low, high = interval(node, _known())
    return low > 0 or high < 0


def _known() -> Known:
    """What the running trace knows."""
    recorder = running.get()
    return {} if recorder is None else recorder.ranges


def _interval(node: Node, known: Known) -> Interval:
    op, dtype, *args = node
    if op == "const":
        return int(args[0]), int(args[0])
    if dtype == "bool":
        return 0, 1
    if op == "sym":
        return (-POSITIONS if args[0].startswith("q") else 0), 2 * POSITIONS
    whole = INT64 if dtype == "int64" else INT32
    if op not in _OF or any(arg[1] == "float" for arg in args):
        return whole
    values = _OF[op](*(interval(arg, known) for arg in args))
    return values if dtype == "int" or fits(values, whole) else whole


def _around(a: Interval) -> int:
    return max(-a[0], a[1], 0)


def _product(a: Interval, b: Interval) -> Interval:
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


def _quotient(a: Interval, b: Interval) -> Interval:
    """A quotient by 0 is 0."""
    if b[0] > 0:
        ends = [x // y for x in a for y in b]
        return min(0, *ends) if a[0] < 0 < a[1] else min(ends), max(ends)
    return -_around(a), _around(a)


def _rest(a: Interval, b: Interval) -> Interval:
    """A rest of a division by 0 is the dividend."""
    if b[0] > 0:
        return 0, b[1] - 1
    most = max(_around(b), _around(a) if b[1] >= 0 else 0)
    return -most, most


def _shifted(a: Interval, b: Interval) -> Interval:
    most = 2 ** min(max(b[1], 0), 64)
    return min(a[0], a[0] * most), max(a[1], a[1] * most)


def _either(*options: Interval) -> Interval:
    return min(option[0] for option in options), max(option[1] for option in options)


def _bits(a: Interval, b: Interval = (0, 0)) -> Interval:
    """All numbers of as many bits."""
    bits = max(abs(end).bit_length() for end in (*a, *b))
    return (0 if a[0] >= 0 and b[0] >= 0 else -(2**bits)), 2**bits - 1


_OF: dict[str, Callable[..., Interval]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _product,
    "floordiv": _quotient,
    "mod": _rest,
    "neg": lambda a: (-a[1], -a[0]),
    "abs": lambda a: (max(a[0], -a[1], 0), _around(a)),
    "not": lambda a: (-a[1] - 1, -a[0] - 1),
    "and": _bits,
    "or": _bits,
    "xor": _bits,
    "shl": _shifted,
    "shr": lambda a, _: _either(a, (0, 0)),
    "where": lambda _, a, b: _either(a, b),
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "int": lambda a: a,
    "int64": lambda a: a,
}
