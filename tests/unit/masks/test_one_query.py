"""Masks of sequences of one query, which is at the last key: what they say less of keys that are never newer."""

import pytest
import torch

from warpattn.language.evaluate import evaluate_all
from warpattn.masks import Causal, Chunked, CustomMask, Full, Mask, Padding, Prefix, SlidingWindow

VALID = torch.tensor([3, 9])
HIDES_NOTHING = [
    Causal(),
    SlidingWindow(None),
    Causal() & SlidingWindow(None),
    Causal() | SlidingWindow(3),
    Prefix(4) | Causal(),
    CustomMask(lambda b, h, q, k: q >= k),
]
OTHERS = [
    SlidingWindow(3),
    SlidingWindow(3, 2),
    Chunked(4) & Causal(),
    Padding(VALID) & Causal(),
    Causal(top_left=True),
    ~Causal(),
    CustomMask(lambda b, h, q, k: k < q),
]


def sees(program, outputs, **symbols: int):
    return evaluate_all(outputs, {"b": 1, "h": 0, "len_q": 1, "len_k": 7, **symbols}, program.tensors)


@pytest.mark.parametrize("mask", HIDES_NOTHING + OTHERS)
def test_the_same_keys_are_visible(mask: Mask) -> None:
    program = mask.program()
    less = program.for_one_query()
    for k in range(7):
        (kept,), (still,) = (sees(program, (each.keep,), q=6, k=k) for each in (program, less))
        assert bool(kept) == bool(still)
    first, full_lo, full_hi, last = map(int, sees(program, less.span, q_lo=6, q_hi=6))
    kept = [bool(*sees(program, (less.keep,), q=6, k=k)) for k in range(7)]
    assert all(kept[full_lo:full_hi]) and not any(kept[:first] + kept[last:])


@pytest.mark.parametrize("mask", HIDES_NOTHING)
def test_masks_that_hide_nothing_have_one_program(mask: Mask) -> None:
    assert mask.program().for_one_query().key == Full().program().key


@pytest.mark.parametrize("mask", OTHERS)
def test_others_keep_their_conditions(mask: Mask) -> None:
    assert not mask.program().for_one_query().keep.is_constant


def test_a_condition_that_is_left_is_alone() -> None:
    window = CustomMask(lambda b, h, q, k: k > q - 3)
    assert SlidingWindow(3).program().for_one_query().keep == window.program().keep
