"""The short way of repeated calls: taken when nothing a check has read differs, and never otherwise."""

from __future__ import annotations

import gc

import pytest
import torch

import warpattn as wa
from tests.unit.runtime.card import B, D, H, S, make_card, misaligned, normal, written  # noqa: F401 (a fixture)
from warpattn.runtime import execute

pytestmark = pytest.mark.usefixtures("card")


def test_the_second_call_goes_the_short_way(card):
    q, k, v = normal(), normal(), normal()
    for _ in range(5):
        assert written(wa.attention(q, k, v, mask=wa.Causal()))
    assert card.examined == 1 and card.encoded == 4 and len(card.launches) == 5 and len(card.keys) == 1


def test_addresses_follow_the_tensors(card):
    for _ in range(4):
        q, k, v = normal(), normal(), normal()
        out = wa.attention(q, k, v)
        assert card.launches[-1]["maps"] == [x.data_ptr() for x in (q, k, v, out)]
    before = card.replaced
    wa.attention(q, k, v, out=out)
    replaced = card.replaced
    wa.attention(q, k, v, out=out)
    assert replaced <= before + 4 and card.replaced == replaced, "the maps hold these addresses already"


CHANGES = {
    "length": lambda a: a | {"q": normal(B, S + 1, H, D)},
    "keys": lambda a: a | {"k": normal(B, 7, H, D), "v": normal(B, 7, H, D)},
    "heads": lambda a: a | {"k": normal(B, S, 1, D), "v": normal(B, S, 1, D)},
    "head dim of v": lambda a: a | {"v": normal(B, S, H, 32)},
    "strides": lambda a: a | {"q": normal(B, H, S, D).transpose(1, 2)},
    "dtype": lambda a: a | {name: a[name].half() for name in "qkv"},
    "mask": lambda a: a | {"mask": wa.Causal()},
    "score": lambda a: a | {"score": wa.SoftCap(3.0)},
    "sinks": lambda a: a | {"sinks": torch.randn(H)},
    "scale": lambda a: a | {"scale": 0.3},
    "lse": lambda a: a | {"return_lse": True},
    "backend": lambda a: a | {"backend": "sm90"},
    "out": lambda a: a | {"out": torch.empty(B, S, H, D, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_check_has_read_is_checked_again(name, card):
    arguments = {"q": normal(), "k": normal(), "v": normal()}
    wa.attention(**arguments)
    changed = CHANGES[name](arguments)
    for examined in (2, 2):
        wa.attention(**changed)
        assert card.examined == examined
    wa.attention(**arguments)
    assert card.examined == 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"scale": True}, "scale is True"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"scale": "1"}, "scale is '1'"),
        ({"return_lse": 0}, "return_lse is 0"),
        ({"mask": "causal"}, "mask is a str"),
        ({"mask": wa.Causal}, "mask is the class Causal"),
        ({"score": 3}, "score is an int"),
        ({"q": torch.zeros(B, S, H, D)}, "must have the dtype of q"),
        ({"q": [[1.0]]}, "q is a list"),
        ({"out": torch.zeros(1)}, "out has shape"),
        ({"sinks": torch.zeros(H + 1)}, "sinks"),
    ],
)
def test_a_bad_call_after_a_good_one_is_refused(change, text, card):
    arguments = {"q": normal(), "k": normal(), "v": normal(), "scale": 1.0}
    for _ in range(2):
        wa.attention(**arguments)
    with pytest.raises(wa.AttentionError) as caught:
        wa.attention(**(arguments | change))
    assert text in str(caught.value)
    assert len(card.launches) == 2


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks", "out", "bias"])
def test_gradients_are_seen_in_every_call(name, card):
    tensors = {"q": normal(), "k": normal(), "v": normal(), "sinks": torch.randn(H), "out": normal()}
    bias = torch.zeros(S, S)
    score = wa.Bias(bias)
    for _ in range(2):
        wa.attention(**tensors, score=score)
    assert card.examined == 1
    (bias if name == "bias" else tensors[name]).requires_grad_()
    what = "a tensor captured by the score" if name == "bias" else name
    with pytest.raises(wa.AttentionError, match=f"{what} requires a gradient"):
        wa.attention(**tensors, score=score)
    with torch.no_grad():
        wa.attention(**tensors, score=score)
    assert len(card.launches) == 3


def test_a_misaligned_tensor_after_aligned_ones(card):
    q = normal()
    for _ in range(2):
        wa.attention(q, q, q)
    bad = misaligned(q)
    assert bad.stride() == q.stride()
    wa.attention(bad, q, q)
    out = misaligned(q)
    wa.attention(q, q, q, out=out)
    assert written(out)
    assert all(address % 16 == 0 for note in card.launches for address in note["maps"])


def test_captured_tensors_are_read_at_every_launch(card):
    q, lengths, bias = normal(), torch.tensor([3, 4]), torch.randn(S, S, 2).permute(2, 0, 1)[:1]
    mask, score = wa.Padding(lengths), wa.Bias(bias)
    for _ in range(2):
        wa.attention(q, q, q, mask=mask, score=score)
        expected = [lengths.data_ptr(), 2, 1, bias.data_ptr(), *bias.shape, *bias.stride()]
        found = card.launches[-1]["captured"]
        assert [x & 0xFFFFFFFF if 1 <= i <= 1 or 4 <= i <= 6 else x for i, x in enumerate(found)] == expected
    assert card.examined == 1


def test_masks_with_tensors_are_not_kept_alive(card):
    q = normal()
    for _ in range(10):
        mask = wa.Padding(torch.tensor([3, 4]))
        for _ in range(2):
            wa.attention(q, q, q, mask=mask)
    assert card.examined == 10 and len(execute._known) == 1
    del mask
    gc.collect()
    assert not execute._known
    assert len(card.keys) == 1, "one kernel serves them all"


def test_additive_masks_work_without_the_short_way(card):
    q, mask = normal(), wa.Materialized(torch.zeros(B, S, S))
    for _ in range(3):
        wa.attention(q, q, q, mask=mask)
    assert len(card.launches) == 3 and len(card.keys) == 1 and not execute._known


def test_memories_are_bounded(card, monkeypatch):
    monkeypatch.setattr(execute, "AT_MOST", 8)
    for length in range(1, 40):
        wa.attention(normal(1, length, 1, 8), normal(1, 3, 1, 8), normal(1, 3, 1, 8))
        assert len(execute._known) <= 8


def test_an_output_over_an_operand_is_never_recalled(card):
    q, k, v, memory = normal(), normal(), normal(), normal(2 * B, S, H, D)
    wa.attention(q, k, v, out=memory[:B])
    wa.attention(q, k, v, out=memory[B:])
    assert card.examined == 1, "remembered"
    for name in "qkv":
        call = {"q": q, "k": k, "v": v} | {name: memory[:B]}
        with pytest.raises(wa.AttentionError, match=f"share memory with {name}"):
            wa.attention(**call, out=memory[:B])
    assert card.examined == 4 and len(card.launches) == 2


def test_numbers_that_change_in_place_are_read_again(card):
    q, scale = normal(), torch.tensor(0.5)
    for _ in range(2):
        wa.attention(q, normal(), normal(), scale=scale)
    assert card.examined == 2, "the key would hold the tensor, not its number"
    wa.attention(q, normal(), normal(), scale=torch.tensor(0.25))
    wa.attention(q, normal(), normal(), scale=0.25)
    assert card.examined == 4
    wa.attention(q, normal(), normal(), scale=0.25)
    assert card.examined == 4
