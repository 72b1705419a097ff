"""The conditions that the CDNA kernels test are the mask: all of them together, and what is said of whole tiles."""

from dataclasses import replace

import pytest
import torch

from tests.cases import MASKS, Case, Maker
from warpattn.kernels.cdna.mask_conditions import Condition, conditions, margin, spread
from warpattn.language.evaluate import evaluate
from warpattn.language.nodes import Node, build, make
from warpattn.masks import Chunked, Prefix
from warpattn.problem import Call, validate
from warpattn.problem.operands import programs

CASE = Case(batch=2, seq_q=70, seq_k=90, heads_q=2, heads_kv=1, dim=16, dtype=torch.bfloat16)
MORE = {
    "chunks or prefix": lambda make: Chunked(7) | Prefix(11),
    "not chunks": lambda make: ~Chunked(7),
    "documents or prefix": lambda make: MASKS["causal-documents"](make) | Prefix(11),
    "neither": lambda make: ~(MASKS["causal-documents"](make) | Prefix(11)),
}
EXTREMES = (0, 1, -1, 2**31 - 1, -(2**31), 2**31 - 2, 1 - 2**31)


def traced(name: str) -> tuple[Node, tuple[torch.Tensor, ...]]:
    """(the mask's node, its tensors) of a dense problem."""
    x = replace(CASE, mask=name if name in MASKS else "full").build()
    mask = MORE[name](Maker(CASE, "cpu")) if name in MORE else x.mask
    program, _ = programs(validate(Call(x.q, x.k, x.v, x.sequence, mask, backend="reference")))
    return program.outputs[0], program.tensors


@pytest.mark.parametrize("name", [*MASKS, *MORE])
def test_conditions_together_are_the_mask(name):
    node, tensors = traced(name)
    env = positions(range(20, 90), range(90))
    whole = evaluate(node, env, tensors).expand(2, 2, 70, 90)
    met = torch.ones_like(whole)
    for condition in conditions(node):
        met &= meets(condition, env, tensors)
    assert torch.equal(met, whole)


@pytest.mark.parametrize("name", [*MASKS, *MORE])
def test_a_tile_that_meets_a_condition_meets_it_everywhere(name):
    node, tensors = traced(name)
    for condition in conditions(node):
        for q, k in ((range(20, 36), range(16)), (range(60, 76), range(32, 48)), (range(74, 90), range(74, 90))):
            if condition.always is not None:
                ends = {"q_lo": q[0], "q_hi": q[-1], "k_lo": k[0], "k_hi": k[-1], "len_q": 70, "len_k": 90, "b": 1}
                if bool(evaluate(condition.always, ends, tensors)):
                    assert meets(condition, positions(q, k), tensors).expand(2, 2, 16, 16)[1].all()


def meets(condition: Condition, env: dict, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    value = evaluate(condition.keep, env, tensors)
    return value >= 0 if condition.keep[1] == "int" else value


def positions(q: range, k: range) -> dict:
    return {
        "b": torch.arange(2)[:, None, None, None], "h": torch.arange(2)[None, :, None, None],
        "q": torch.tensor(list(q))[:, None], "k": torch.tensor(list(k)), "len_q": 70, "len_k": 90,
    }  # fmt: skip


@pytest.mark.parametrize("op", ["eq", "ne"])
def test_equality_of_any_two_numbers_is_a_difference(op):
    """Modulo 2^32, as the kernel computes: also where the difference does not fit."""
    number = margin(make(op, "bool", make("load", "int", 0), make("load", "int", 1)))
    for a in EXTREMES:
        for b in EXTREMES:
            assert (wrapped(number, {0: a, 1: b}) >= 0) == (a == b if op == "eq" else a != b), (a, b)


def wrapped(node: Node, loaded: dict[int, int]) -> int:
    """The value of an int node in 32 bits."""
    if node.op == "load":
        return loaded[node.value]
    if node.op == "const":
        return node.value
    a, b = (wrapped(arg, loaded) for arg in node.operands)
    value = {"sub": a - b, "add": a + b, "minimum": min(a, b), "maximum": max(a, b)}[node.op]
    return (value + 2**31) % 2**32 - 2**31


def test_chunks_divide_rows_alone():
    k = make("sym", "int", "k")
    size = make("const", "int", 7)
    chunk = make(
        "eq", "bool", build("floordiv", "int", make("sym", "int", "q"), size), build("floordiv", "int", k, size)
    )
    for node in (chunk, make("eq", "bool", *chunk.operands[::-1])):
        spread_out = spread(node)
        assert "('floordiv', 'int', ('sym', 'int', 'q')" in repr(spread_out)
        assert "('floordiv', 'int', ('sym', 'int', 'k')" not in repr(spread_out)
