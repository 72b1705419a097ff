"""What a span is computed from: the one analysis against evaluating spans, and the plans that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import warpattn as wa
from warpattn.language.evaluate import evaluate_all
from warpattn.language.expr import Table, maximum, symbol, trace, where
from warpattn.language.nodes import SPAN, Program, reads
from warpattn.problem import Call, Problem, validate
from warpattn.runtime.plan import plan
from warpattn.sequences import Dense

SYMBOLS = ("b", "h", "q_lo", "q_hi", "len_q", "len_k")
HERE = {"b": 1, "h": 2, "q_lo": 5, "q_hi": 9, "len_q": 20, "len_k": 31, "q": 7, "k": 3}
TENSORS = (torch.tensor([3, 14, 15]), torch.tensor([9, 26, 53, 5]), torch.tensor([[8, 97], [9, 32], [3, 84], [6, 26]]))
TERMS = st.lists(st.tuples(st.integers(0, len(SYMBOLS) + len(TENSORS) - 1), st.integers(1, 5)), max_size=4)


def leaf(number: int) -> Any:
    """Symbol or load `number`."""
    if number < len(SYMBOLS):
        return symbol(SYMBOLS[number])
    table = Table(TENSORS[number - len(SYMBOLS)])
    index = (("b",), ("h",), ("h", "b"))[number - len(SYMBOLS)]
    return table[tuple(symbol(name) for name in index)]


def total(terms: Sequence[tuple[int, int]]) -> Any:
    """The sum of leaves with positive weights: it changes with every symbol and element that it reads."""
    value: Any = 0
    for number, weight in terms:
        value = value + leaf(number) * weight
    return value


def values(program: Program, env: dict[str, int], tensors: Sequence[Tensor]) -> list[int]:
    return [int(value) for value in evaluate_all(program.outputs[SPAN], env, tensors)]


def changed_by(program: Program) -> tuple[set[str], set[int]]:
    """Symbols and load slots whose change changes an output of the span, by trying each."""
    before = values(program, HERE, program.tensors)
    others = {name: HERE[name] - 1 for name in SYMBOLS}
    symbols = {name for name in SYMBOLS if values(program, HERE | {name: others[name]}, program.tensors) != before}
    slots = set()
    for slot, tensor in enumerate(program.tensors):
        tensors = [*program.tensors[:slot], tensor + 1000, *program.tensors[slot + 1 :]]
        if values(program, HERE, tensors) != before:
            slots.add(slot)
    return symbols, slots


@settings(max_examples=150, deadline=None)
@given(TERMS, st.lists(TERMS, min_size=4, max_size=4))
def test_the_analysis_finds_what_changes_a_span(hidden: list[Any], bounds: list[list[Any]]) -> None:
    """The condition of the mask shares tensors and nodes with the span but counts for nothing."""
    program = trace(lambda: (total(hidden) + symbol("k") * 3 > symbol("q"), *(total(terms) for terms in bounds)))
    found = reads(program.key, SPAN)
    assert (set(found.symbols), set(found.tensors)) == changed_by(program)


@settings(max_examples=100, deadline=None)
@given(TERMS, TERMS, TERMS)
def test_nothing_that_may_change_a_span_is_missed(x: list[Any], y: list[Any], z: list[Any]) -> None:
    """Operations that may hide an operand: the analysis may name more than changes the result here, never less."""

    def run() -> tuple[Any, ...]:
        a, b, c = total(x), total(y), total(z)
        return symbol("k") > 0, where(a > b, c, a // 3), maximum(a, b) % 64, -a, abs(b)

    program = trace(run)
    symbols, slots = changed_by(program)
    found = reads(program.key, SPAN)
    assert symbols <= found.symbols and slots <= found.tensors


def decode_problem(mask: wa.Mask) -> Problem:
    q, k = torch.empty(2, 1, 8, 128, dtype=torch.bfloat16), torch.empty(2, 4096, 2, 128, dtype=torch.bfloat16)
    return validate(Call(q, k, k, Dense(), mask, backend="reference"), read_values=False).problem


LENGTHS = torch.tensor([4000, 9])
PADDED = {
    "heads": wa.CustomMask(lambda b, h, q, k: (h % 2 == 0) | (k < 9)),
    "batch": wa.CustomMask(lambda b, h, q, k: (b + q) % 2 == k % 2),
}


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", PADDED)
def test_a_condition_on_heads_beside_a_padded_span_keeps_the_heads_of_a_group_together(name: str, arch: str) -> None:
    """Only the span decides whether the heads of a key head share its keys; here it is that of the padding."""
    problem = decode_problem(PADDED[name] & wa.Padding(LENGTHS))
    choice = plan(problem, arch).choice
    assert choice.config == plan(decode_problem(wa.Padding(LENGTHS)), arch).choice.config
    assert choice.config.pack == problem.heads_q // problem.heads_kv == 4
