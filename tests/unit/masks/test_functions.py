"""Functions of users that read something beside their arguments: a new mask or score reads it anew."""

from __future__ import annotations

import pytest
import torch

import warpattn as wa

WINDOW, TABLE = 3, {"window": 3}


def by_global(b, h, q, k):
    return k > q - WINDOW


def by_another_function(b, h, q, k):
    return by_global(b, h, q, k)


def by_a_dict(b, h, q, k):
    return k > q - TABLE["window"]


class Holder:
    def __init__(self) -> None:
        self.window = 3

    def keep(self, b, h, q, k):
        return k > q - self.window


def by_closure(holder):
    def keep(b, h, q, k):
        return k > q - window

    window = holder.window
    return keep


def attended(mask):
    x = torch.randn(1, 30, 1, 8, generator=torch.Generator().manual_seed(0))
    return wa.attention(x, x, x, mask=mask)


def is_window(mask, size):
    """Other spans of keys are added in another order."""
    return torch.allclose(attended(mask), attended(wa.SlidingWindow(size, right=None)), atol=1e-5)


@pytest.mark.parametrize("keep", [by_global, by_another_function])
@pytest.mark.parametrize("joined", [False, True])
def test_globals_are_read_anew(keep, joined, monkeypatch):
    """Alone, and as part of another mask."""

    def mask():
        return wa.Full() & wa.CustomMask(keep) if joined else wa.CustomMask(keep)

    assert is_window(mask(), 3)
    monkeypatch.setitem(globals(), "WINDOW", 9)
    assert is_window(mask(), 9)


def test_what_is_not_known_is_read_anew(monkeypatch):
    holder = Holder()
    assert is_window(wa.CustomMask(holder.keep), 3)
    assert is_window(wa.CustomMask(by_a_dict), 3)
    holder.window = 9
    monkeypatch.setitem(TABLE, "window", 9)
    assert is_window(wa.CustomMask(holder.keep), 9)
    assert is_window(wa.CustomMask(by_a_dict), 9)


def test_closures_are_read_anew():
    window = 3

    def keep(b, h, q, k):
        return k > q - window

    assert is_window(wa.CustomMask(keep), 3)
    window = 9
    assert is_window(wa.CustomMask(keep), 9)


@pytest.mark.parametrize(("first", "second"), [(0, 0.0), (3, 3.0), (-0.0, 0.0)])
def test_numbers_that_are_equal_may_mean_different_things(first, second):
    """By 0 an int division gives 0, one of floats an infinity."""

    def keep(b, h, q, k, n):
        return ~(k // n > q)

    def added(s, b, h, q, k, n):
        return s + (k // n > q) * 1.0

    masks = [wa.CustomMask(keep, n=n) for n in (first, second)]
    assert masks[0] != masks[1] and masks[0].program().key != masks[1].program().key
    scores = [wa.CustomScore(added, n=n) for n in (first, second)]
    assert scores[0] != scores[1] and scores[0].program().key != scores[1].program().key


def test_programs_of_equal_functions_are_shared():
    """A mask that is written anew in every call costs no tracing."""
    masks = [wa.CustomMask(by_another_function, **captured) for captured in ({}, {})]
    assert masks[0] == masks[1] and masks[0].program() is masks[1].program()
    lambdas = [wa.CustomScore(f, a=1.5) for f in [lambda s, b, h, q, k, a: s * a + wa.tanh(s)] * 2]
    assert lambdas[0] == lambdas[1] and lambdas[0].program() is lambdas[1].program()
    assert wa.CustomMask(by_closure(Holder())) != wa.CustomMask(by_closure(Holder())), "two functions"
