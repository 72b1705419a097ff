"""Which integers a node can be: the range holds every value that its operands' ranges give, by trying them all."""

from __future__ import annotations

import itertools
import random

import pytest

from warpattn.language import eager
from warpattn.language.nodes import const, make
from warpattn.language.ranges import _OF, BOOL, INT32, Interval, interval

EXACT = ("add", "sub", "mul", "neg", "abs", "not", "where", "minimum", "maximum", "int")  # no wider than they must be
FIRST = {"where": BOOL}
COUNT = {"neg": 1, "abs": 1, "not": 1, "int": 1, "int64": 1, "where": 3}


def drawn_range(rnd: random.Random) -> Interval:
    low, high = sorted(rnd.randrange(-9, 10) for _ in range(2))
    return Interval(low, high)


def applied(op: str, *args: int) -> int:
    """Of integers; `expr` keeps divisions by 0 away from the operation."""
    if op in ("floordiv", "mod") and args[1] == 0:
        return 0 if op == "floordiv" else args[0]
    return int(eager.OPS[op](*args))


def values_of(op: str, ranges: list[Interval]) -> list[int]:
    """Of the operation, for all values of its operands; shifts by a negative number have none."""
    every = itertools.product(*(range(r.low, r.high + 1) for r in ranges))
    return [applied(op, *args) for args in every if op not in ("shl", "shr") or args[1] >= 0]


@pytest.mark.parametrize("op", [op for op in _OF if op in eager.OPS])
def test_a_range_holds_every_value(op: str) -> None:
    rnd = random.Random(op)
    for _ in range(40):
        ranges = [drawn_range(rnd) for _ in range(COUNT.get(op, 2))]
        if op == "where":
            ranges[0] = FIRST[op]
        values = values_of(op, ranges)
        found = _OF[op](*ranges)
        assert all(found.low <= value <= found.high for value in values), (op, ranges, found)
        if op in EXACT:
            assert found == (min(values), max(values)), (op, ranges)


def test_every_operation_of_ranges_is_tried() -> None:
    assert set(_OF) - set(eager.OPS) <= {"int", "int64"}


def test_positions_may_be_added_in_32_bits_and_not_multiplied() -> None:
    q, k = make("sym", "int", "q"), make("sym", "int", "k")
    assert interval(make("add", "int", q, k)).within(INT32)
    assert not interval(make("mul", "int", q, k)).within(INT32)


def test_a_remainder_by_a_loaded_number_has_32_bits() -> None:
    """Whatever the number is. The least dividend of 32 bits needs 64: its quotient by -1 has no place in 32."""
    q, loaded = make("sym", "int", "q"), make("load", "int")
    assert interval(make("mod", "int", q, loaded)).within(INT32)
    assert not interval(make("mod", "int", loaded, loaded)).within(INT32)
    assert not interval(make("mod", "int", loaded, const(-1, "int"))).within(INT32)
