"""The conditions of a mask, and for each when a whole tile meets it, so that the kernel tests no element of it.

      k > q - 99 and k <= q    ─▶    [k > q - 99 unless k_lo > q_hi - 99]   [k <= q unless k_hi <= q_lo]

A comparison per element of a tile takes a pair of scalar registers, of which a wave has 102, and the compiler computes
all comparisons of a basic block before it uses the first: both conditions of a window in one block kept 26 to 30
scalars in lanes of a vector register (128 x 64 tiles). With a branch for each condition, comparisons are used at once.

Alternatives ("or") cannot be separated. They become one comparison of numbers, *margins*, at least 0 where a condition
holds: k >= a or k <= b is maximum(k - a, b - k) >= 0. That is done where no difference leaves 32 bits
(language/ranges.py); of other 32-bit numbers only for equality, which holds modulo 2^32 as well.
"""

from typing import NamedTuple

from warpattn.language.nodes import Node, build, const, make
from warpattn.language.ranges import INT32, interval

TILE_SYMBOLS = ("b", "q_lo", "q_hi", "k_lo", "k_hi", "len_q", "len_k")


class Ends(NamedTuple):
    """The values of an integer node in a tile."""

    least: Node
    most: Node


class Condition(NamedTuple):
    """A boolean node or a margin, and a boolean node of `TILE_SYMBOLS` that is true only where all elements meet it
    (None: not known)."""

    keep: Node
    always: Node | None


def conditions(node: Node) -> tuple[Condition, ...]:
    """The conditions whose conjunction is the boolean `node`, its outermost ands taken apart; those without an `always`
    first. A condition of more than one comparison is a margin."""
    parts = _parts(spread(node))
    found = [Condition(margin(part) if part.op in ("or", "not") else part, always(part)) for part in parts]
    return tuple(sorted(found, key=lambda condition: condition.always is not None))


def _parts(node: Node) -> tuple[Node, ...]:
    return sum((_parts(arg) for arg in node.operands), ()) if node.op == "and" else (node,)


def spread(node: Node) -> Node:
    """The condition with q // n == k // n as an interval of keys (a division per row instead of one per element), and
    with the negation of a comparison as a comparison."""
    op, args = node.op, node.operands
    if op == "not" and args[0].op in _OPPOSITE and all(side.dtype == "int" for side in args[0].operands):
        return build(_OPPOSITE[args[0].op], "bool", *args[0].operands)
    if op in ("and", "or", "not"):
        return build(op, "bool", *map(spread, args))
    if op != "eq" or any((arg.op, arg.dtype) != ("floordiv", "int") for arg in args):
        return node
    (a, b), (divisor, other) = args, (arg.operands[1] for arg in args)
    if divisor != other or not divisor.is_constant or divisor.value <= 0 or _knows_key(a) == _knows_key(b):
        return node
    size = int(divisor.value)
    row, (key, _) = (b, a.operands) if _knows_key(a) else (a, b.operands)
    first = build("mul", "int", row, const(size, "int"))
    last = build("add", "int", first, const(size - 1, "int"))
    return build("and", "bool", build("ge", "bool", key, first), build("le", "bool", key, last))


def always(node: Node) -> Node | None:
    """True only if every element of a tile meets a condition."""
    op, args = node.op, node.operands
    if op in ("and", "or"):
        a, b = (always(arg) for arg in args)
        return None if a is None or b is None else build(op, "bool", a, b)
    if op not in ("lt", "le", "gt", "ge") or any(arg.dtype != "int" for arg in args):
        return None
    a, b = (ends(arg) for arg in args)
    if a is None or b is None:
        return None
    return build(op, "bool", a.most, b.least) if op in ("lt", "le") else build(op, "bool", a.least, b.most)


def ends(node: Node) -> Ends | None:
    """Those of a node; None: not known."""
    op = node.op
    if op == "sym" and node.value in ("q", "k"):
        return Ends(make("sym", "int", f"{node.value}_lo"), make("sym", "int", f"{node.value}_hi"))
    if op == "const" or (op == "sym" and node.value != "h"):
        return Ends(node, node)
    if op not in ("add", "sub", "minimum", "maximum"):
        return None
    a, b = (ends(arg) for arg in node.operands)
    if a is None or b is None:
        return None
    b = Ends(b.most, b.least) if op == "sub" else b
    return Ends(build(op, "int", a.least, b.least), build(op, "int", a.most, b.most))


def margin(node: Node) -> Node:
    """An int node that is at least 0 where the boolean `node` is true."""
    op, args = node.op, node.operands
    if op in ("and", "or"):
        a, b = (margin(arg) for arg in args)
        return build("minimum" if op == "and" else "maximum", "int", a, b)
    if op == "not":
        return build("sub", "int", const(-1, "int"), margin(args[0]))
    if op in _DIFFERENCES and all(arg.dtype == "int" for arg in args):
        number = _DIFFERENCES[op](*args)
        if op in ("eq", "ne") or interval(number).within(INT32):
            return number
    return build("where", "int", node, const(0, "int"), const(-1, "int"))


def _minus(a: Node, b: Node) -> Node:
    return build("sub", "int", a, b)


def _more(a: Node, b: Node) -> Node:
    """The margin of a > b. The 1 is subtracted on the operand without keys, which has fewer elements."""
    one = const(1, "int")
    return _minus(a, build("add", "int", b, one)) if _knows_key(a) else _minus(_minus(a, one), b)


def _knows_key(node: Node) -> bool:
    return (node.op == "sym" and node.value == "k") or any(_knows_key(operand) for operand in node.operands)


_OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}
_DIFFERENCES = {
    "ge": _minus,
    "le": lambda a, b: _minus(b, a),
    "gt": _more,
    "lt": lambda a, b: _more(b, a),
    "eq": lambda a, b: build("minimum", "int", _minus(a, b), _minus(b, a)),
    "ne": lambda a, b: build("maximum", "int", _more(a, b), _more(b, a)),
}
