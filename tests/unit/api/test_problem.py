"""A problem is a cache key: equal for calls that can run the same kernel, different for the others."""

from __future__ import annotations

import pickle

import pytest
import torch

from warpattn.masks import Causal, CustomMask, Materialized, Padding, SlidingWindow
from warpattn.problem import Call, parts, validate
from warpattn.scores import ALiBi, Bias, SoftCap
from warpattn.sequences import Dense, PagedKV, Ragged


def call(**changes: object) -> Call:
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 16)
    return Call(**({"q": q, "k": k, "v": v, "sequence": Dense()} | changes))


def test_the_sizes_are_read():
    p = validate(call()).problem
    assert (p.kind, p.device_type, p.dtype, p.batch, p.seq_q, p.seq_k) == ("dense", "cpu", torch.float32, 2, 6, 9)
    assert (p.heads_q, p.heads_kv, p.dim_qk, p.dim_v, p.page_size) == (4, 2, 8, 16, 0)
    assert not p.has_sinks and not p.has_lse and p.score is None


def test_ragged_and_paged_sizes():
    cu = torch.tensor([0, 4, 6], dtype=torch.int32)
    q, k = torch.randn(6, 4, 8), torch.randn(6, 2, 8)
    p = validate(Call(q, k, k, Ragged(cu))).problem
    assert (p.kind, p.batch, p.seq_q, p.seq_k) == ("ragged", 2, 6, 6)
    pages = torch.randn(5, 3, 2, 8)
    kv = PagedKV(pages, pages, torch.zeros(2, 4, dtype=torch.int32), torch.tensor([5, 0], dtype=torch.int32))
    p = validate(Call(torch.randn(2, 1, 4, 8), pages, pages, kv)).problem
    assert (p.kind, p.batch, p.seq_q, p.seq_k, p.page_size) == ("paged", 2, 1, 12, 3)


def test_equal_calls_have_equal_problems():
    lengths = [torch.tensor([3, 4]), torch.tensor([9, 0])]
    one, two = (
        validate(call(mask=SlidingWindow(3) & Causal() & Padding(x), score=SoftCap(2.0), sinks=torch.randn(4))).problem
        for x in lengths
    )
    assert one == two and hash(one) == hash(two)


CHANGES = {
    "mask": {"mask": Causal()},
    "window": {"mask": SlidingWindow(3)},
    "wider window": {"mask": SlidingWindow(4)},
    "custom": {"mask": CustomMask(lambda b, h, q, k: k < q)},
    "materialized": {"mask": Materialized(torch.ones(1, 6, 9, dtype=torch.bool))},
    "added": {"mask": Materialized(torch.ones(1, 6, 9))},
    "score": {"score": SoftCap(3.0)},
    "scores": {"score": SoftCap(3.0) | ALiBi(4)},
    "bias": {"score": Bias(torch.zeros(6, 9))},
    "bias rank": {"score": Bias(torch.zeros(1, 6, 9))},
    "sinks": {"sinks": torch.zeros(4)},
    "lse": {"return_lse": True},
    "rows": {"q": torch.randn(2, 7, 4, 8)},
    "heads": {"q": torch.randn(2, 6, 2, 8)},
}


def test_different_calls_have_different_problems():
    problems = {name: validate(call(**change)).problem for name, change in CHANGES.items()} | {
        "": validate(call()).problem
    }
    assert len(set(problems.values())) == len(problems)


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_problem_can_be_stored(name):
    problem = validate(call(**CHANGES[name])).problem
    assert pickle.loads(pickle.dumps(problem)) == problem


def test_an_additive_mask_becomes_part_of_the_score():
    ready = validate(call(mask=Materialized(torch.ones(1, 6, 9)) & Causal(), score=SoftCap(2.0)))
    assert ready.score is not None and len(ready.score.tensors) == 1


def test_parts_of_a_combination():
    a, b, c = Causal(), SlidingWindow(2), Padding(torch.tensor([1]))
    assert list(parts(a & ~(b | c))) == [a, b, c]
    assert list(parts(SoftCap(1.0) | ALiBi(4) | SoftCap(2.0))) == [SoftCap(1.0), ALiBi(4), SoftCap(2.0)]
    assert list(parts(None)) == []


def test_scale_has_a_default():
    assert validate(call()).scale == 8**-0.5
    assert validate(call(scale=2)).scale == 2.0
