"""Masks and scores of users' own classes: equal in Python is not equal in meaning, and each gets its own program."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import pytest
import torch

import warpattn as wa
from warpattn.distributed.blocks import Whole, blocks_of
from warpattn.distributed.placement import Placement
from warpattn.integrations.flex.modifiers import MaskMod
from warpattn.language.traced import Traced
from warpattn.problem import Call
from warpattn.runtime import execute
from warpattn.sequences import Dense

LIMIT = 3


class Side(IntEnum):
    LEFT = 1
    RIGHT = 2


class Word(Enum):
    ONE = 1
    TWO = 2


@dataclass(frozen=True)
class Holder:
    n: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    n: Any


def _number(n: Any) -> Any:
    """A plain number of a field, whatever holds it: its type and sign are what programs differ by."""
    while isinstance(n, Holder | Slotted | tuple | list | Enum) and not isinstance(n, int):
        n = n.value if isinstance(n, Enum) else n.n if isinstance(n, Holder | Slotted) else n[-1]
    return n.item() if isinstance(n, np.generic) else n


@dataclass(frozen=True)
class Steps(wa.Score):
    """By 0 an int division gives 0, one of floats an infinity, whose sign is that of the 0."""

    n: Any

    def apply(self, s, b, h, q, k, lens=None):
        return wa.where((k + 1) / 2 // _number(self.n) > 0, s, -s) + k // _number(self.n)


@dataclass(frozen=True)
class Marked(wa.Mask):
    n: Any

    def keep(self, b, h, q, k, lens=None):
        return ((k - q) // _number(self.n) <= 0) & (k + 0.5 > self.shift(q))

    def shift(self, q):
        return q - 2 * _number(self.n)


PAIRS = [
    (2, 2.0), (1, True), (True, 1.0), (0, False), (0, 0.0), (0.0, -0.0), (-0.0, 0), (3, np.float32(3)),
    (2, np.int64(2)),
    (np.float32(0.0), np.float32(-0.0)), (2.0, Side.RIGHT), (Word.ONE, Word.TWO), (Holder(2), Holder(2.0)),
    (Holder(0.0), Holder(-0.0)), (Slotted(1), Slotted(True)), ((1, 2), (1, 2.0)), ((0.0,), (-0.0,)),
    (Holder((2,)), (2,)),
    ((Holder((0.0, 0.0)),), (Holder((0.0, -0.0)),)), ([2], [2.0]), (float("nan"), 2),
]  # fmt: skip


@pytest.mark.parametrize("kind", [Steps, Marked])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=repr)
def test_equal_fields_of_other_types_get_programs_of_their_own(first, second, joined, kind):
    """Whichever is traced first, and as a part of another mask or score, too."""
    for pair in ((first, second), (second, first)):
        Traced.shared.clear()
        values = [kind(n) for n in pair]
        if joined:
            values = [wa.Causal() & x if kind is Marked else x | wa.SoftCap(3.0) for x in values]
        assert [x.program().key for x in values] == [x.record().key for x in values]


@pytest.mark.parametrize("n", [2, 2.5, -0.0, True, "word", np.int64(2), Side.LEFT, Holder((1, 2.0)), Slotted(3), None])
def test_values_of_one_meaning_share_a_program(n):
    @dataclass(frozen=True)
    class Plain(wa.Mask):
        n: Any

        def keep(self, b, h, q, k, lens=None):
            return super().keep is None or (k <= q)

    assert Plain(n).program() is Plain(n).program()
    assert (wa.Full() & Plain(n)).program() is (wa.Full() & Plain(n)).program()


def test_attributes_that_are_no_fields_count():
    class Later(wa.SlidingWindow):
        def __init__(self, window: int, after: int) -> None:
            super().__init__(window)
            object.__setattr__(self, "after", after)

        def keep(self, b, h, q, k, lens=None):
            return super().keep(b, h, q, k, lens) & (k > self.after)

    assert Later(5, 0) == Later(5, 3), "dataclass compares fields alone"
    assert Later(5, 0).program().key != Later(5, 3).program().key
    assert Later(5, 3).program() is Later(5, 3).program()


@dataclass(frozen=True)
class Limited(wa.Mask):
    """Reads a global and an attribute of its class, through a property."""

    step = 1

    @property
    def limit(self) -> int:
        return LIMIT

    def keep(self, b, h, q, k, lens=None):
        return k < q + self.limit * self.step


def test_what_methods_read_is_read_anew(monkeypatch):
    three = Limited().program()
    assert Limited().program() is three
    monkeypatch.setitem(globals(), "LIMIT", 9)
    nine = Limited().program()
    assert nine.key != three.key
    monkeypatch.setattr(Limited, "step", 2)
    assert Limited().program().key not in (three.key, nine.key)


class Loose(wa.Mask):
    """No dataclass, and not frozen."""

    def __init__(self, window: int) -> None:
        self.window = window

    def keep(self, b, h, q, k, lens=None):
        return k > q - self.window


@dataclass
class Changing(wa.Mask):
    window: int

    def keep(self, b, h, q, k, lens=None):
        return k > q - self.window


@pytest.mark.parametrize("kind", [Loose, Changing])
@pytest.mark.parametrize("joined", [lambda x: x, lambda x: wa.Causal() & x, lambda x: ~(x | (x & wa.Chunked(4)))])
def test_a_value_that_a_call_has_read_cannot_be_changed(kind, joined):
    mask, x = kind(3), torch.randn(1, 12, 1, 8)
    mask.window = 5
    before = wa.attention(x, x, x, mask=joined(mask))
    assert torch.equal(before, wa.attention(x, x, x, mask=joined(kind(5))))
    with pytest.raises(wa.AttentionError, match=f"window of a {kind.__name__} is set after a call has read it"):
        mask.window = 3


class Box:
    """An object that may change; no attribute of a mask is set when it does."""

    def __init__(self, n: int) -> None:
        self.n = n


class SlottedBox:
    __slots__ = ("n",)

    def __init__(self, n: int) -> None:
        self.n = n


class Windowed:
    """A function with a state of its own."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, b, h, q, k):
        return k > q - self.n


@dataclass(frozen=True)
class Held(wa.Mask):
    """A window whose size an object holds."""

    n: Any

    def keep(self, b, h, q, k, lens=None):
        n = self.n["n"] if isinstance(self.n, dict) else self.n
        n = n[0] if isinstance(n, tuple) else n
        return k > q - int(n.n if isinstance(n, Box | SlottedBox | Holder) else n[0] if isinstance(n, list) else n)


MAY_CHANGE = {
    "list": (Held([3]), lambda mask, n: mask.n.__setitem__(0, n)),
    "dict": (Held({"n": 3}), lambda mask, n: mask.n.__setitem__("n", n)),
    "array": (Held(np.array(3)), lambda mask, n: mask.n.__setitem__((), n)),
    "object": (Held(Box(3)), lambda mask, n: setattr(mask.n, "n", n)),
    "slots": (Held(SlottedBox(3)), lambda mask, n: setattr(mask.n, "n", n)),
    "inner": (Held((Box(3),)), lambda mask, n: setattr(mask.n[0], "n", n)),
    "callable": (wa.CustomMask(Windowed(3)), lambda mask, n: setattr(mask.fn, "n", n)),
    "method": (wa.CustomMask(Windowed(3).__call__), lambda mask, n: setattr(mask.fn.__self__, "n", n)),
    "mask_mod": (MaskMod(Windowed(3)), lambda mask, n: setattr(mask.fn, "n", n)),
}


@pytest.mark.parametrize("joined", [lambda x: x, lambda x: wa.Causal() & x, lambda x: ~(x | (x & wa.Chunked(4)))])
@pytest.mark.parametrize("name", MAY_CHANGE)
def test_what_a_mask_holds_cannot_change_after_a_call_has_read_it(name, joined):
    """The same mask after an object within it has changed; with what it held before it is served again, and a mask made
    anew means what the object says then."""
    mask, change = copy.deepcopy(MAY_CHANGE[name][0]), MAY_CHANGE[name][1]
    whole, x = joined(mask), torch.randn(1, 12, 1, 8)
    before = wa.attention(x, x, x, mask=whole)
    change(mask, 5)
    with pytest.raises(wa.AttentionError, match="holds has changed after a call has read it"):
        wa.attention(x, x, x, mask=whole)
    change(mask, 3)
    assert torch.equal(before, wa.attention(x, x, x, mask=whole))
    other = copy.deepcopy(MAY_CHANGE[name][0])
    change(other, 5)
    assert not torch.equal(before, wa.attention(x, x, x, mask=joined(other)))


def attribute(b, h, q, k):
    return k < attribute.n


def imported(b, h, q, k):
    from tests import drawn

    return k < drawn.window


def looked_up(b, h, q, k):
    return k < globals()["NUMBER"]


NUMBER = 3


@pytest.mark.parametrize("fn", [attribute, imported, looked_up])
def test_what_a_function_finds_on_its_way_is_read_anew(fn, monkeypatch):
    """Attributes of its own, imports within it, names that it looks up."""
    for n in (3, 5):
        monkeypatch.setattr(attribute, "n", n, raising=False)
        monkeypatch.setattr("tests.drawn.window", n, raising=False)
        monkeypatch.setattr(sys.modules[__name__], "NUMBER", n)
        assert str(wa.CustomMask(fn).picture(1, 8)) == "■" * n + "·" * (8 - n)


def test_remembered_launches_are_those_of_one_meaning():
    """The key of repeated calls."""
    x = torch.randn(1, 8, 1, 8)
    calls = [Call(x, x, x, Dense(), score=Steps(n)) for n in (2, 2.0, 2)]
    with pytest.raises(LookupError):
        execute._identify(calls[0])
    for call in calls:
        assert call.score is not None
        call.score.program()
    keys = [execute._identify(replace(call, score=Steps(call.score.n)))[0] for call in calls]
    assert keys[0] == keys[2] != keys[1]


def test_blocks_of_ranks_are_those_of_one_meaning():
    def blocks(n):
        whole = Whole(Marked(n), Steps(n), wa.Lengths(8, 8), None, torch.device("cpu"))
        return blocks_of(whole, Placement("zigzag", 2))

    assert blocks(2) is blocks(2)
    assert blocks(2) is not blocks(2.0)
    assert blocks(2.0).whole.score == Steps(2.0) and type(blocks(2.0).whole.score.n) is float
