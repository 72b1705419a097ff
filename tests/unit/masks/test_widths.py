"""Integers that need 64 bits, divisions by zero, and casts: the same numbers from nodes, torch and Python."""

import math

import pytest
import torch

pytest.importorskip("warpattn.kernels.pieces.codegen", exc_type=ImportError)

import warpattn as wa
from tests.unit.masks.test_emit import run
from warpattn.errors import AttentionError
from warpattn.kernels.pieces.codegen import MASK_SYMBOLS
from warpattn.language.eager import OPS
from warpattn.language.evaluate import evaluate
from warpattn.language.expr import load, saturated, symbol, to_int, trace, where

BIG = 2**40
IDS = torch.tensor([BIG, BIG + 1, 1, 2**31, -(2**33)])
FEW = torch.tensor([7, 2**31 - 1, -(2**31), 0, 5], dtype=torch.int32)
COUNTS = torch.tensor([-1, 5, 0, 31, 32], dtype=torch.int32)
Q, K = torch.tensor([0, 1, 4]), torch.tensor([0, 1, 3, 4])

INTEGERS = {
    "ids": lambda q, k: load(IDS, q) - load(IDS, k),
    "literal": lambda q, k: q + BIG,
    "product": lambda q, k: q * 1000003 * k * 1009,
    "square of what was read": lambda q, k: load(FEW, q) * load(FEW, k),
    "sum of what was read": lambda q, k: load(FEW, q) + load(FEW, k),
    "difference": lambda q, k: load(FEW, q) - load(FEW, k) - 1,
    "negation": lambda q, k: -load(FEW, q) + 0 * k,
    "distance": lambda q, k: abs(load(FEW, q)) + abs(k),
    "shift": lambda q, k: (q + 1) << (k * 9),
    "shift to the left by any number": lambda q, k: (q + 3) << load(COUNTS, k),
    "shift to the right by any number": lambda q, k: (q - 3) >> load(COUNTS, k),
    "shift of ids": lambda q, k: load(IDS, q) >> (load(COUNTS, k) * 2),
    "shift by all bits": lambda q, k: ((q - 3) >> 40) + ((k + 1) << 64),
    "shift by less than none": lambda q, k: ((q - 3) >> -1) + ((k + 1) << -1),
    "quotient": lambda q, k: load(FEW, q) // (k - 1),
    "rest": lambda q, k: load(FEW, q) % (k - 1),
    "quotient by zero": lambda q, k: (q - 3) // 0 + k,
    "rest by zero": lambda q, k: (q - 3) % 0 + k,
    "quotient of ids": lambda q, k: load(IDS, q) // load(FEW, k),
    "rest of ids": lambda q, k: load(IDS, q) % load(FEW, k),
}



def exact(name: str, q: int, k: int) -> int:
    """The same in Python, with any number of bits."""
    ids, few, counts = IDS.tolist(), FEW.tolist(), COUNTS.tolist()

    def quotient(a, b):
        return a // b if b else 0

    def rest(a, b):
        return a % b if b else a

    def right(a, count):
        return a >> (count if count >= 0 else 64)

    return {
        "ids": lambda: ids[q] - ids[k],
        "literal": lambda: q + BIG,
        "product": lambda: q * 1000003 * k * 1009,
        "square of what was read": lambda: few[q] * few[k],
        "sum of what was read": lambda: few[q] + few[k],
        "difference": lambda: few[q] - few[k] - 1,
        "negation": lambda: -few[q],
        "distance": lambda: abs(few[q]) + k,
        "shift": lambda: (q + 1) << (k * 9),
        "shift to the left by any number": lambda: 0 if counts[k] < 0 else (q + 3) << counts[k],
        "shift to the right by any number": lambda: right(q - 3, counts[k]),
        "shift of ids": lambda: right(ids[q], counts[k] * 2),
        "shift by all bits": lambda: right(q - 3, 40),
        "shift by less than none": lambda: right(q - 3, -1),
        "quotient": lambda: quotient(few[q], k - 1),
        "rest": lambda: rest(few[q], k - 1),
        "quotient by zero": lambda: k,
        "rest by zero": lambda: q - 3 + k,
        "quotient of ids": lambda: quotient(ids[q], few[k]),
        "rest of ids": lambda: rest(ids[q], few[k]),
    }[name]()


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_have_the_bits_that_they_need(name):
    program = trace(lambda: INTEGERS[name](symbol("q"), symbol("k")))
    expected = torch.tensor([[exact(name, int(q), int(k)) for k in K] for q in Q])
    env = {"q": Q[:, None], "k": K}
    assert torch.equal(evaluate(program.outputs[0], env, program.tensors).expand(3, 4), expected)
    kernel_env = dict.fromkeys(MASK_SYMBOLS, torch.tensor(0)) | {"q": Q[:, None].int(), "k": K[None].int()}
    compiled = run(program.outputs, MASK_SYMBOLS, kernel_env, program.tensors)
    assert torch.equal(compiled.expand(3, 4).long(), expected)


def test_positions_and_small_numbers_stay_narrow():
    masks = [wa.Causal(), wa.SlidingWindow(9), wa.Chunked(7), wa.Prefix(5), wa.Causal(top_left=True)]
    masks += [wa.Padding(torch.tensor([3])), wa.Prefix(torch.tensor([3])), wa.Document(IDS), ~wa.Chunked(7)]
    for mask in masks:
        assert "int64" not in {node[1] for node in mask.program().span}, mask
    for node in (lambda q, k: (q // 3) * 3 + k % 5 - 2**20, lambda q, k: load(FEW, q) // 8 + where(q < k, q, k)):
        assert trace(lambda node=node: node(symbol("q"), symbol("k"))).outputs[0][1] == "int"


def test_lengths_of_64_bits_saturate():
    lengths = torch.tensor([2**31 + 5, -(2**35), 9])
    assert saturated(lengths).tolist() == [2**31 - 1, -(2**31), 9]
    program = wa.Padding(lengths).program()
    env = {"b": torch.arange(3)[:, None], "k": torch.tensor([0, 8, 9])}
    assert evaluate(program.keep, env, program.tensors).tolist() == [[True] * 3, [False] * 3, [True, True, False]]


def test_an_integer_beyond_64_bits_is_refused():
    with pytest.raises(AttentionError, match="ints have at most 64 bits"):
        wa.CustomMask(lambda b, h, q, k: k < 2**64).program()


A = torch.tensor([5.5, -5.5, 0.0, math.inf, math.nan, 7.0, -0.3])
B = torch.tensor([2.0, -2.0, 0.0, math.inf, -math.inf, 0.1])


@pytest.mark.parametrize("op", ["//", "%", "/"])
def test_floats_divide_as_in_torch(op):
    def divide(a, b):
        return a // b if op == "//" else a % b if op == "%" else a / b

    program = trace(lambda: divide(load(A, symbol("q")), load(B, symbol("k"))))
    expected = divide(A[:, None], B)
    env = {"q": torch.arange(7)[:, None], "k": torch.arange(6)}
    found = evaluate(program.outputs[0], env, program.tensors)
    torch.testing.assert_close(found, expected, equal_nan=True)
    name = {"//": "floordiv", "%": "mod", "/": "truediv"}[op]
    for number in (0.0, -0.0, 3.0):
        alone = torch.tensor(OPS[name](-5.0, number))
        torch.testing.assert_close(alone, divide(torch.tensor(-5.0), torch.tensor(number)), equal_nan=True)


def test_casts_to_int_saturate():
    values = torch.tensor([2.9, -2.9, 1e20, -math.inf, math.nan])
    assert to_int(values).tolist() == [2, -2, 2**31 - 1, -(2**31), 0]
    assert [to_int(float(x)) for x in values] == [2, -2, 2**31 - 1, -(2**31), 0]
