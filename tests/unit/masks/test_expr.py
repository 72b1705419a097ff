"""The language of masks and scores: one meaning for numbers, tensors and nodes, and errors that name the line."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warpattn.errors import AttentionError
from warpattn.language.evaluate import evaluate, evaluate_all
from warpattn.language.expr import (
    Expr,
    Table,
    exp,
    load,
    log,
    maximum,
    minimum,
    symbol,
    tanh,
    to_float,
    to_int,
    trace,
    where,
)
from warpattn.language.nodes import postorder
from warpattn.language.user_code import call_user

TRUE = ("const", "bool", True)
TABLE = torch.arange(5)

INT_OPS = [
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: x * (y % 7),
    lambda x, y: x // where(y == 0, 3, y),
    lambda x, y: x % where(y == 0, -3, y),
    lambda x, y: -x + abs(y),
    lambda x, y: minimum(x, y) - maximum(x, 3),
    lambda x, y: where(x < y, x, y + 1),
    lambda x, y: (x & y) | (x ^ 5),
    lambda x, y: ((x % 16) << 2) >> (y % 3),
    lambda x, y: ~x,
    lambda x, y: to_int(to_float(x) * 0.5),
    lambda x, y: (x <= y) + (y != 2) * 2,
]
BOOL_OPS = [
    lambda x, y: x < y,
    lambda x, y: (x <= y) & (x != 3) | (y > 2),
    lambda x, y: (x == y) ^ (x >= 0),
    lambda x, y: where(x > y, x != 1, y == 1),
    lambda x, y: (x > y) == (y > 2),
]
FLOAT_OPS = [
    lambda x, y: x / 4 + y,
    lambda x, y: to_float(x) // 2.5,
    lambda x, y: to_float(x) % 2.5,
    lambda x, y: exp(-abs(x) * 0.1) + tanh(y * 0.25),
    lambda x, y: log(abs(x) + 1),
    lambda x, y: where(x < y, 0.1, 0.7) * x,
    lambda x, y: maximum(to_float(x), 1.5) - minimum(2.5, y),
]


def traced(fn):
    return trace(lambda: fn(symbol("q"), symbol("k")))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(INT_OPS) - 1), st.integers(0, 9), st.integers(0, 9)), max_size=6),
    st.sampled_from(BOOL_OPS + FLOAT_OPS + INT_OPS),
)
def test_numbers_tensors_and_traces_agree(steps, last):
    def fn(q, k):
        values = [q, k, 2, -5]
        for op, i, j in steps:
            value = INT_OPS[op](values[i % len(values)], values[j % len(values)])
            values.append(value % 1000 - 500)
        return last(values[-1], values[len(values) // 2])

    grid = torch.arange(-4, 5)
    program = traced(fn)
    eager = torch.as_tensor(fn(grid[:, None], grid), dtype=torch.float64)
    lazy = evaluate(program.outputs[0], {"q": grid[:, None], "k": grid}, program.tensors, torch.float64)
    torch.testing.assert_close(lazy.double().expand(9, 9), eager.expand(9, 9), rtol=1e-5, atol=1e-5)
    for q, k in ((-4, 3), (0, 0), (4, -1)):
        number = evaluate(program.outputs[0], {"q": q, "k": k}, program.tensors, torch.float64)
        assert number.item() == pytest.approx(fn(q, k), rel=1e-12)
        torch.testing.assert_close(number.double(), lazy.double().expand(9, 9)[q + 4, k + 4])


def test_dtypes_and_casts():
    program = traced(lambda q, k: (q + True, q + 0.5, q / k, q < k, (q < k) + 1, (q < k) & True, to_float(q < k)))
    assert [node.dtype for node in program.outputs] == ["int", "float", "float", "bool", "int", "bool", "float"]
    assert program.outputs[1] == ("add", "float", ("float", "float", ("sym", "int", "q")), ("const", "float", 0.5))
    assert traced(lambda q, k: (q < k) < (k < q)).outputs[0].operands[0].op == "int"


@pytest.mark.parametrize(
    ("fn", "node"),
    [
        (lambda q, k: (q < q * 0) | True, TRUE),
        (lambda q, k: True & (k == q) | (q != q + 0) ^ True | True, TRUE),
        (lambda q, k: minimum(q, q) + 0, ("sym", "int", "q")),
        (lambda q, k: 1 * (0 + q) - 0, ("sym", "int", "q")),
        (lambda q, k: where(True & (q * 0 == 0) | True, k, q), ("sym", "int", "k")),
        (lambda q, k: where(q < k, k, k), ("sym", "int", "k")),
        (lambda q, k: ~~(q < k), ("lt", "bool", ("sym", "int", "q"), ("sym", "int", "k"))),
        (lambda q, k: (q < k) & (k < 3) & (q < k), traced(lambda q, k: (q < k) & (k < 3)).outputs[0]),
        (lambda q, k: minimum(minimum(q, k), k), ("minimum", "int", ("sym", "int", "q"), ("sym", "int", "k"))),
        (lambda q, k: -7 // 2, ("const", "int", -4)),
        (lambda q, k: exp(1.0), ("const", "float", math.e)),
    ],
)
def test_folding(fn, node):
    assert traced(fn).outputs[0] == node


def test_equal_parts_are_one_node():
    program = traced(lambda q, k: (q // 3 == k // 3) & (q // 3 > 1))
    assert len(postorder(program.outputs)) == 9  # 3 and q // 3 once each
    assert program.key == traced(lambda q, k: (q // 3 == k // 3) & (q // 3 > 1)).key
    assert program.key != traced(lambda q, k: (q // 3 == k // 3) & (q // 3 > 2)).key
    assert traced(lambda q, k: q * 0.0).key != traced(lambda q, k: q * -0.0).key
    assert len({program.key, traced(lambda q, k: q).key}) == 2


def test_deeply_shared_nodes_stay_small():
    def fn(q, k):
        for _ in range(200):
            q = where(q < k, q + k, q - k)
        return q

    program = traced(fn)
    assert len(program.key[0]) == 805  # three casts to int64 on the way
    evaluate(program.outputs[0], {"q": 3, "k": 2}, ())


def test_loads():
    table, other = torch.arange(6, dtype=torch.float16).view(2, 3), torch.tensor([True, False])
    program = traced(lambda q, k: (Table(table)[q, k] + load(table, k, q), load(other, k)))
    assert program.tensors == (table, other)
    assert [node.dtype for node in program.outputs] == ["float", "bool"]
    q, k = torch.arange(-1, 4)[:, None], torch.arange(-1, 4)
    both = evaluate_all(program.outputs, {"q": q, "k": k}, program.tensors)
    for i in range(-1, 4):
        for j in range(-1, 4):
            expected = sum(float(table[a, b]) for a, b in ((i, j), (j, i)) if 0 <= a < 2 and 0 <= b < 3)
            assert both[0].dtype == torch.float32
            assert both[0][i + 1, j + 1] == expected
        assert bool(both[1][i + 1]) == (i == 0)
    assert load(other, 5) is False
    assert load(table, 1, 2) == 5
    assert Table(other)[torch.tensor([0, 2])].tolist() == [True, False]
    empty = traced(lambda q, k: load(torch.zeros(0, dtype=torch.int32), k))
    assert evaluate(empty.outputs[0], {"k": k}, empty.tensors).tolist() == [0] * 5


def test_loads_are_differentiable():
    table = torch.ones(3, dtype=torch.float64, requires_grad=True)
    program = traced(lambda q, k: load(table, k) * 2.0)
    evaluate(program.outputs[0], {"k": torch.tensor([0, 2, 2, 7])}, program.tensors, torch.float64).sum().backward()
    assert table.grad is not None
    assert table.grad.tolist() == [2, 0, 4]


def test_program_key_tells_tensor_kinds_apart():
    def keyed(tensor):
        return traced(lambda q, k: load(tensor, *([k] * tensor.ndim)) + 0).key

    assert keyed(torch.zeros(2, dtype=torch.int32)) == keyed(torch.zeros(9, dtype=torch.int32))
    assert keyed(torch.zeros(2, dtype=torch.int32)) != keyed(torch.zeros(2, dtype=torch.int64))
    assert keyed(torch.zeros(2, dtype=torch.int32)) != keyed(torch.zeros(2, 2, dtype=torch.int32))


def test_traces_nest():
    table = torch.arange(4)

    def outer():
        inner = trace(lambda: load(table, symbol("k")))
        assert inner.tensors == (table,)
        return load(TABLE, symbol("q"))

    assert trace(outer).tensors == (TABLE,)


def test_numpy_numbers_are_numbers():
    outputs = traced(lambda q, k: (np.int64(3) * q, q * np.float32(0.5), np.bool_(True) & (q < k))).outputs
    assert outputs[0] == ("mul", "int", ("const", "int", 3), ("sym", "int", "q"))
    assert outputs[1][1] == "float"
    assert outputs[2][0] == "lt"


def test_division_by_zero_is_no_error():
    program = traced(lambda q, k: (where(k > 0, q // k, -1), where(k > 0, q % k, -1), q / k))
    values = evaluate_all(program.outputs, {"q": torch.tensor([7, 7]), "k": torch.tensor([0, 2])}, ())
    assert values[0].tolist() == [-1, 3]
    assert values[1].tolist() == [-1, 1]
    assert values[2].tolist() == [math.inf, 3.5]
    assert evaluate(program.outputs[2], {"q": 7, "k": 0}, ()) == math.inf


BAD = [
    (lambda q, k: q if k else 3, "use & | ~ and where()"),
    (lambda q, k: q < k and k < 3, "use & | ~ and where()"),
    (lambda q, k: not q, "use & | ~ and where()"),
    (lambda q, k: 0 < k < q, "use & | ~ and where()"),
    (lambda q, k: q in (1, 2), "use & | ~ and where()"),
    (lambda q, k: math.exp(q), "use to_float, exp"),
    (lambda q, k: float(q), "use to_float, exp"),
    (lambda q, k: int(q), "use to_int"),
    (lambda q, k: [1, 2][q], "captured keyword arguments"),
    (lambda q, k: np.exp(q), "warpattn's functions"),
    (lambda q, k: torch.exp(q), "torch function exp"),
    (lambda q, k: torch.where(q < k, q, k), "torch function where"),
    (lambda q, k: TABLE[q], "capture tensors as keyword arguments"),
    (lambda q, k: TABLE[None, :][0, q], "capture tensors as keyword arguments"),
    (lambda q, k: TABLE * q, "torch function mul"),
    (lambda q, k: q * TABLE, "a whole tensor of shape (5,)"),
    (lambda q, k: Table(TABLE) + q, "a whole tensor of shape (5,)"),
    (lambda q, k: Table(TABLE)[q, k], "one index per dimension"),
    (lambda q, k: Table(TABLE)[q * 0.5], "indices must be ints"),
    (lambda q, k: Table(TABLE)[q < k], "indices must be ints"),
    (lambda q, k: Table(TABLE)[1:3], "a slice meets a symbol"),
    (lambda q, k: Table(TABLE * 1j)[q], "capture bool, integer or real tensors"),
    (lambda q, k: q + "1", "a str meets a symbol"),
    (lambda q, k: q + None, "None meets a symbol"),
    (lambda q, k: q @ k, "unsupported operand"),
    (lambda q, k: q.exp(), "no attribute 'exp'"),
    (lambda q, k: where(q, 1, k), "the condition of where() is int"),
    (lambda q, k: (q * 1.5) & 1, "got a float"),
    (lambda q, k: (q * 1.5) >> 1, "got a float"),
    (lambda q, k: len(q), "has no length"),
    (lambda q, k: list(k), "cannot be iterated"),
    (lambda q, k: {q: 1}, "unhashable"),
    (lambda q: q, "takes 1 positional argument"),
]


@pytest.mark.parametrize(("fn", "rule"), BAD)
def test_errors_name_the_line(fn, rule):
    with pytest.raises(AttentionError) as caught:
        trace(lambda: call_user(fn, symbol("q"), symbol("k")))
    assert rule in str(caught.value)
    assert str(caught.value).startswith(f"{Path(__file__)}:{fn.__code__.co_firstlineno}: ")


def test_symbols_load_only_inside_a_trace():
    with pytest.raises(AttentionError, match="inside a trace"):
        load(TABLE, symbol("q"))


def test_expr_shows_its_node():
    assert repr(symbol("q")) == "Expr(('sym', 'int', 'q'))"
    assert isinstance(symbol("q") == symbol("k"), Expr)


@pytest.mark.parametrize("exponent", [0, 1, 2, 5, 13, -1, -2, 0.5, 1.7, -0.3, 100])
def test_powers(exponent):
    x = torch.tensor([0.3, 1.0, 1.2], dtype=torch.float64)
    program = trace(lambda: symbol("x", "float") ** exponent)
    found = evaluate(program.outputs[0], {"x": x}, (), torch.float64)
    torch.testing.assert_close(found.expand(3), x**exponent)
    program = trace(lambda: 1.7 ** (symbol("x", "float") * exponent))
    found = evaluate(program.outputs[0], {"x": x}, (), torch.float64)
    torch.testing.assert_close(found.expand(3), 1.7 ** (x * exponent))


def test_powers_of_ints_are_ints():
    assert trace(lambda: symbol("q") ** 3).outputs[0][1] == "int64"  # of positions
    found = evaluate(trace(lambda: symbol("q") ** 3).outputs[0], {"q": torch.tensor([-3, 2])}, ())
    assert found.tolist() == [-27, 8]
