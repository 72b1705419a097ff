"""Functions of users that read something beside their arguments: a new mask or score reads it anew."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch

import warpattn as wa
from warpattn.integrations.flex import mask_of

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


def by_default(b, h, q, k, window=3):
    return k > q - window


def by_a_tuple(b, h, q, k):
    return k > q - SIZES[0][1]


SIZES = [(2, 3)]


@dataclass(frozen=True)
class ByClass(wa.Mask):
    """A user's class whose method reads a global."""

    def keep(self, b, h, q, k, lens=None):
        return by_another_function(b, h, q, k)


REBOUND = {
    "global": (wa.CustomMask(by_global), "WINDOW", 9),
    "function": (wa.CustomMask(by_another_function), "WINDOW", 9),
    "class": (ByClass(), "WINDOW", 9),
    "list": (wa.CustomMask(by_a_tuple), "SIZES", [(2, 9)]),
    "dict": (wa.CustomMask(by_a_dict), "TABLE", {"window": 9}),
    "mask_mod": (mask_of(by_global), "WINDOW", 9),
}


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("name", REBOUND)
def test_what_a_function_reads_cannot_change_after_a_call_has_read_it(name, joined, monkeypatch):
    """The same mask is refused then, served again once it reads what it did before, and a copy reads anew."""
    mask, name, value = REBOUND[name]
    mask = wa.Full() & copy.deepcopy(mask) if joined else copy.deepcopy(mask)
    before = attended(mask)
    with monkeypatch.context() as changed:
        changed.setitem(globals(), name, value)
        with pytest.raises(wa.AttentionError, match="reads or holds has changed after a call has read it"):
            attended(mask)
        assert not torch.equal(attended(copy.deepcopy(mask)), before)
    assert torch.equal(attended(mask), before)


def test_a_closure_cannot_change_after_a_call_has_read_it():
    window = 3
    mask = wa.CustomMask(lambda b, h, q, k: k > q - window)
    score = wa.CustomScore(lambda s, b, h, q, k: s * window)
    x = torch.randn(1, 12, 1, 8)
    before = wa.attention(x, x, x, mask=mask, score=score)
    window = 3
    assert torch.equal(wa.attention(x, x, x, mask=mask, score=score), before)
    window = 9
    for changed in ({"mask": mask}, {"score": score}):
        with pytest.raises(wa.AttentionError, match="has changed after a call has read it"):
            wa.attention(x, x, x, **changed)


def test_defaults_cannot_change_after_a_call_has_read_them(monkeypatch):
    mask = wa.CustomMask(by_default)
    attended(mask)
    monkeypatch.setattr(by_default, "__defaults__", (9,))
    with pytest.raises(wa.AttentionError, match="has changed after a call has read it"):
        attended(mask)


def test_names_that_a_function_does_not_read_may_change(monkeypatch):
    """An attribute of another object with the name of a global; what an object holds beside what is read."""
    holder = Holder()
    mask = wa.CustomMask(lambda b, h, q, k: k > q - holder.window)
    before = attended(mask)
    monkeypatch.setitem(globals(), "window", 9)
    holder.steps = 1
    assert torch.equal(attended(mask), before)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_masks_that_a_call_has_read(again):
    """One that reads an object, one of a class with slots."""
    for mask in (wa.CustomMask(by_a_holder), Slotted(3)):
        before = attended(mask)
        assert torch.equal(attended(again(mask)), before)


HOLDER = Holder()


def by_a_holder(b, h, q, k):
    return k > q - HOLDER.window


class Slotted(wa.Mask):
    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size

    def keep(self, b, h, q, k, lens=None):
        return k > q - self.size
