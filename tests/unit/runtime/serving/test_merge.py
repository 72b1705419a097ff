"""merge_states with torch: against attention over all keys, numbers at the borders, gradients, bad input."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import warpattn as wa
from warpattn.errors import AttentionError

INF, NAN = math.inf, math.nan


def parts(kind: str, cuts: tuple[int, ...], dtype: torch.dtype = torch.float64):
    """(whole result, results over keys between the cuts) for dense or ragged queries; sinks in the first part."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 8, dtype=dtype) for n, h in ((3, 4), (11, 2), (11, 2)))
    sinks = torch.randn(4, dtype=dtype)
    bounds = (0, *cuts, 11)

    def over(lo: int, hi: int, sinks):
        if kind == "dense":
            return wa.attention(q, k[:, lo:hi], v[:, lo:hi], sinks=sinks, return_lse=True)
        keys = [x[:, lo:hi].flatten(0, 1) for x in (k, v)]
        seq = wa.Ragged(torch.tensor([0, 3, 6]).int(), torch.tensor([0, hi - lo, 2 * (hi - lo)]).int())
        return wa.attention_varlen(q.flatten(0, 1), *keys, seq, sinks=sinks, return_lse=True)

    cut = [over(lo, hi, sinks if i == 0 else None) for i, (lo, hi) in enumerate(itertools.pairwise(bounds))]
    return over(0, 11, sinks), cut


@pytest.mark.parametrize("kind", ["dense", "ragged"])
@pytest.mark.parametrize("cuts", [(), (4,), (0,), (11,), (3, 3, 7)], ids=str)
def test_parts_of_the_keys_give_the_whole(kind, cuts):
    whole, cut = parts(kind, cuts)
    for merged in (wa.merge_states(cut), wa.merge_states(*[x for pair in cut for x in pair])):
        torch.testing.assert_close(merged, whole)


# LSEs of two parts, whose outputs are 2 and 6 (or NaN where unseen), and the merged output and LSE.
NUMBERS = {
    "equal": ((0.0, 0.0), (4.0, math.log(2))),
    "one saw nothing": ((-INF, 1.0), (6.0, 1.0)),
    "neither saw anything": ((-INF, -INF), (0.0, -INF)),
    "NaN stays": ((NAN, 0.0), (NAN, NAN)),
    "NaN beside nothing stays": ((-INF, NAN), (NAN, NAN)),
    "infinite": ((INF, 0.0), (NAN, NAN)),
    "large": ((3e38, -3e38), (2.0, 3e38)),
    "low": ((-3e38, -3e38), (4.0, -3e38)),
    "far below fp32's exponents": ((-2000.0, -2000.0 + math.log(3)), (5.0, -2000.0 + math.log(4))),
}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name, order):
    lses, (out, lse) = NUMBERS[name]
    pairs = [
        (torch.full((1, 1, 4), NAN if x == -INF else value), torch.full((1, 1), x))
        for x, value in zip(lses, (2.0, 6.0), strict=True)
    ]
    merged = wa.merge_states(pairs[::order])
    torch.testing.assert_close(merged[0], torch.full((1, 1, 4), out), equal_nan=True)
    torch.testing.assert_close(merged[1], torch.full((1, 1), lse), equal_nan=True)


def test_gradients():
    whole, cut = parts("dense", (4, 7))
    tensors = [x.detach().requires_grad_() for pair in cut for x in pair]
    assert torch.autograd.gradcheck(lambda *x: wa.merge_states(*x), tensors)
    with torch.no_grad():
        tensors[1][0, 0] = -INF
    out, lse = wa.merge_states(*tensors[:2], tensors[0].detach(), torch.full_like(whole[1], -INF))
    (out.sum() + lse[:, 1:].sum()).backward()
    assert tensors[0].grad is not None and tensors[1].grad is not None
    assert tensors[0].grad.isfinite().all() and tensors[1].grad.isfinite().all()
    assert (tensors[0].grad[0, :, 0] == 0).all()


def test_compiled_into_one_graph():
    whole, cut = parts("dense", (4,), torch.float32)
    compiled = torch.compile(lambda *x: wa.merge_states(*x), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*[x for pair in cut for x in pair]), whole)


OUT, LSE = torch.zeros(2, 3, 4, 8), torch.zeros(2, 4, 3)
SHAPED = "by out_a it must be a torch.float32 tensor of shape"
TRACED = {
    "backend is 'simulate:sm90'; a graph of torch.compile merges with torch's": {"backend": "simulate:sm90"},
    "backend is 'fast'": {"backend": wa.Backend("fast")},
    f"lse_a is a torch.float32 tensor of rank 3 on cpu; {SHAPED} (batch, heads, seq)": {"lse": torch.zeros(2, 3, 4)},
    f"lse_a is a torch.float16 tensor of rank 3 on cpu; {SHAPED}": {"lse": LSE.half()},
    f"lse_a is a float; {SHAPED}": {"lse": 1.0},
    f"out is a torch.float32 tensor of rank 3 on cpu; {SHAPED} (batch, seq, heads, head_dim)": {"out": OUT[0].clone()},
    f"out is a torch.float16 tensor of rank 4 on cpu; {SHAPED}": {"out": OUT.half()},
    "out_a is a torch.float32 tensor of rank 5 on cpu; it must be a tensor of rank 3 or 4": {"first": OUT[None]},
    "out_a is a torch.int32 tensor of rank 4": {"first": OUT.int()},
    "out is given; there is no gradient": {"first": OUT.clone().requires_grad_(), "out": OUT.clone()},
}


@pytest.mark.parametrize("sentence", TRACED)
def test_a_graph_is_refused_what_calls_are_refused(sentence):
    """With fullgraph=True torch quotes the sentence in an error of its own."""
    named = dict(TRACED[sentence])
    first, lse = named.pop("first", OUT), named.pop("lse", LSE)
    compiled = torch.compile(lambda *x: wa.merge_states(*x, **named), fullgraph=True, backend="eager", dynamic=True)
    with pytest.raises(torch._dynamo.exc.Unsupported) as found:
        compiled(first, lse, OUT, LSE)
    assert sentence in str(found.value).replace("\\", ""), found.value


def test_graphs_take_other_sizes_and_the_names_of_torchs_operations():
    compiles = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda *x: wa.merge_states(*x, backend=wa.Backend("reference")), backend=compiles,
                             fullgraph=True, dynamic=True)  # fmt: skip
    for rows in (3, 5, 7):
        made = [torch.randn(shape) for shape in ((2, rows, 4, 8), (2, 4, rows)) * 2]
        torch.testing.assert_close(compiled(*made), wa.merge_states(*made, backend=wa.Backend()))
    assert compiles.frame_count == 1


def test_a_given_output_is_written():
    whole, cut = parts("dense", (4,), torch.float32)
    out = torch.empty(2, 3, 4, 16)[..., :8]
    merged, _ = wa.merge_states(cut, out=out)
    assert merged is out
    torch.testing.assert_close(out, whole[0])


BAD = {
    "the call has 3 tensors": ((OUT, LSE, OUT), {}),
    "there are 0 pairs": (([],), {}),
    "there are 17 pairs": (([(OUT, LSE)] * 17,), {}),
    "states is a list of something else": (([OUT, LSE],), {}),
    "out_b has shape": ((OUT, LSE, OUT[:1], LSE), {}),
    "lse_a has shape": ((OUT, LSE.transpose(1, 2), OUT, LSE), {}),
    "lse_b has shape": ((OUT, LSE, OUT, LSE[0]), {}),
    "lse_b has dtype": ((OUT, LSE, OUT, LSE.half()), {}),
    "out_b has dtype": ((OUT, LSE, OUT.half(), LSE), {}),
    "out_a has dtype": ((OUT.int(), LSE, OUT.int(), LSE), {}),
    "lse_a is a float": ((OUT, 1.0, OUT, LSE), {}),
    "out has shape": ((OUT, LSE), {"out": OUT[:1].clone()}),
    "out has shape (2, 3, 4, 8) and strides": ((OUT, LSE), {"out": OUT[:1].clone().expand(2, 3, 4, 8)}),
    "out is given; there is no gradient": ((OUT, LSE), {"out": OUT.clone().requires_grad_()}),
    "out shares memory with out_b": ((OUT, LSE, OUT + 1, LSE), {"out": "out_b"}),
    "backend is 'fast'": ((OUT, LSE), {"backend": "fast"}),
    "its merge has no backward": ((OUT.clone().requires_grad_(), LSE), {"backend": "simulate:sm90"}),
    "kernels merge fp16": ((OUT.double(), LSE.double()), {"backend": "simulate:sm90"}),
    "there is no gradient through it": ((OUT.clone().requires_grad_(), LSE), {"out": OUT.clone()}),
}


@pytest.mark.parametrize("sentence", BAD)
def test_bad_input_is_one_sentence(sentence):
    arguments, named = BAD[sentence]
    if named.get("out") == "out_b":
        named = {"out": arguments[2]}
    with pytest.raises(AttentionError) as found:
        wa.merge_states(*arguments, **named)
    assert any(sentence in reason for reason in found.value.reasons), found.value


def cache(shared: object, table: list[list[int]], lengths: list[int]) -> wa.PagedKV:
    pages = torch.randn(6, 4, 2, 8)
    return wa.PagedKV(pages, pages, torch.tensor(table).int(), torch.tensor(lengths).int(), shared)  # type: ignore


PROMISES = {
    "kv.shared_pages is True; kv.shared_pages must be an int": (True, [[0, 1, 2]], [9]),
    "kv.shared_pages is -1": (-1, [[0, 1, 2]], [9]),
    "kv.shared_pages is 3": (3, [[0, 1, 2]], [9]),
    "kv.shared_pages is 2; sequences 0 and 1 begin with other pages": (2, [[0, 1, 2], [0, 3, 4]], [10, 11]),
    "the 2 newest of 9 keys of sequence 1 must come after those 8": (2, [[0, 1, 2], [0, 1, 4]], [10, 9]),
}


@pytest.mark.parametrize("sentence", PROMISES)
def test_a_broken_promise_of_shared_pages_is_one_sentence(sentence):
    kv = cache(*PROMISES[sentence])
    with pytest.raises(AttentionError) as found:
        wa.attention_paged(torch.randn(len(kv.lengths), 2, 4, 8), kv)
    (reason,) = found.value.reasons
    assert sentence in reason


@pytest.mark.parametrize("shared", [np.int64(2), torch.tensor(2)])
def test_shared_pages_may_be_a_number_of_numpy_or_torch(shared):
    kv = cache(shared, [[0, 1, 2], [0, 1, 4]], [10, 11])
    assert type(kv.shared_pages) is int and type(kv.with_fields(lengths=kv.lengths).shared_pages) is int
    q = torch.randn(2, 2, 4, 8)
    assert torch.equal(wa.attention_paged(q, kv), wa.attention_paged(q, kv.with_fields(shared_pages=0)))


def test_sequences_without_queries_promise_nothing():
    kv = cache(2, [[5, 5, 5], [0, 1, 2], [0, 1, 3]], [0, 9, 12])
    out = wa.attention_paged(torch.randn(3, 4, 8), kv, wa.Ragged(torch.tensor([0, 0, 1, 3]).int()))
    assert out.shape == (3, 4, 8)
