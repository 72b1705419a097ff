"""Masks and scores of users' own classes that do not what they must: one sentence with the line or the class."""

from __future__ import annotations

from functools import reduce
from operator import and_, or_

import pytest
import torch

import warpattn as wa


def mask(keep=None, span=None, additive=None):
    class Own(wa.Mask):
        def keep(self, b, h, q, k, lens=None):
            return q >= k if keep is None else keep(b, h, q, k)

        def kv_span(self, b, h, q_lo, q_hi, lens):
            return wa.Span(0, 0, 0, lens.k) if span is None else span(q_lo, lens)

        def additive(self):
            return additive

    return Own()


def score(apply):
    class Own(wa.Score):
        def apply(self, s, b, h, q, k, lens=None):
            return apply(s, q, k)

    return Own()


class FewArguments(wa.Mask):
    def keep(self, q, k):
        return q >= k


class Endless(wa.Mask):
    def keep(self, b, h, q, k, lens=None):
        return self.keep(b, h, q, k, lens)


def chain(join, count: int) -> wa.Mask:
    return reduce(join, [wa.SlidingWindow(1000 + i) for i in range(count)])


@pytest.mark.parametrize("join", [and_, or_])
@pytest.mark.parametrize("count", [400, 2000])
@pytest.mark.parametrize("backend", ["reference", "simulate:sm90"])
def test_a_chain_too_long_for_pythons_stack_is_one_sentence(join, count, backend):
    q = torch.zeros(1, 8, 2, 16).bfloat16()
    with pytest.raises(wa.AttentionError, match=rf"^{count} levels of .*; combine many in pairs, [^;]*$"):
        wa.attention(q, q, q, mask=chain(join, count), backend=backend)


def test_many_masks_in_pairs_and_other_uses_of_a_long_chain():
    masks: list[wa.Mask] = [wa.SlidingWindow(1000 + i) for i in range(1024)]
    while len(masks) > 1:
        masks = [a & b for a, b in zip(masks[::2], masks[1::2], strict=True)]
    q = torch.zeros(1, 8, 2, 16)
    assert wa.attention(q, q, q, mask=masks[0]).shape == q.shape
    deep = chain(and_, 2000)
    for use in (lambda: deep | wa.Causal(), lambda: ~deep, lambda: deep.picture(4, 4)):
        with pytest.raises(wa.AttentionError, match="2000 levels of masks"):
            use()


HERE = r"^/.*test_wrong_classes\.py:\d+: "
WRONG = {
    "raises": (mask(lambda b, h, q, k: {}[3]), HERE + "KeyError: 3; masks and scores use"),
    "an int": (mask(lambda b, h, q, k: (q >= k) * 1), "keep of an Own returned an int; it must return a bool"),
    "a float": (mask(lambda b, h, q, k: q * 0.5), "keep of an Own returned a float; it must return a bool"),
    "nothing": (mask(lambda b, h, q, k: ()), "a tuple meets a symbol"),
    "a branch": (mask(lambda b, h, q, k: q > 1 and k > 1), HERE + "a symbol has no truth value"),
    "few arguments": (FewArguments(), r"^a FewArguments: TypeError: .*keep\(\) takes 3 positional arguments"),
    "endless": (Endless(), HERE + "RecursionError: maximum recursion depth exceeded"),
    "an int for a span": (mask(span=lambda q, lens: 3), "kv_span of an Own returned 3; it must return Span"),
    "a tuple for a span": (mask(span=lambda q, lens: (0, 0, 0, lens.k)), "kv_span of an Own returned .0, 0, 0, Expr"),
    "a bound of half a key": (mask(span=lambda q, lens: wa.Span(0.5, 0, 0, lens.k)), "returned a float; its bounds"),
    "adds a number": (mask(additive=3), "additive of an Own returned 3; it must return None or a score"),
    "a text": (score(lambda s, q, k: "a"), "^an Own: ValueError: could not convert string to float: 'a'; masks and"),
    "divides by 0": (score(lambda s, q, k: s * (1 / 0)), HERE + "ZeroDivisionError: division by zero; masks and"),
    "torch": (score(lambda s, q, k: torch.relu(s)), HERE + "the torch function relu got a symbol"),
}


def refusal(own):
    x = torch.randn(1, 5, 1, 8)
    with pytest.raises(wa.AttentionError) as refused:
        wa.attention(x, x, x, **{"mask" if isinstance(own, wa.Mask) else "score": own})
    return refused


@pytest.mark.parametrize("name", WRONG)
def test_one_sentence(name):
    """Alone, and as a part of another one, which may be what is named then."""
    own, words = WRONG[name]
    refused = refusal(own)
    refused.match(words)
    joined = refusal(own & wa.Causal() if isinstance(own, wa.Mask) else own | wa.SoftCap(3.0))
    assert not [found for found in (refused, joined) if "\n" in str(found.value)]


def test_mistakes_of_this_package_are_not_said_to_be_users(monkeypatch):
    monkeypatch.setattr(wa.Causal, "keep", lambda self, b, h, q, k, lens=None: None.keep)
    monkeypatch.setattr(wa.Mask, "shared", {})
    monkeypatch.setattr("warpattn.language.traced.raised_at", lambda error: None)
    with pytest.raises(AttributeError):
        wa.Causal(top_left=True).program()
