"""Absorbed queries in two tensors: what they mean, wherever q is accepted, and what is refused."""

import re

import pytest
import torch

import warpattn as wa
from warpattn.errors import AttentionError
from warpattn.quantized import saturated

L, R, HEADS = 32, 8, 4
TABLE = torch.tensor([[3, 0], [2, 4]], dtype=torch.int32)
LENGTHS = torch.tensor([30, 17], dtype=torch.int32)
CU = torch.tensor([0, 3, 4], dtype=torch.int32)
E4M3 = torch.float8_e4m3fn


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def query(*axes: int, seed: int = 1) -> wa.LatentQuery:
    """Views of wider tensors, as a model's projections leave them."""
    heads_first = drawn(HEADS, *axes, L, seed=seed)
    return wa.LatentQuery(heads_first.movedim(0, -2), drawn(*axes, HEADS, 24, seed=seed + 1)[..., 16:])


def pages() -> wa.PagedKV:
    cache = drawn(5, 16, 1, L + R)
    return wa.PagedKV(cache, cache[..., :L], TABLE, LENGTHS)


def latent_pages() -> wa.LatentPages:
    latents, rope = saturated(drawn(5, 16, 1, L), E4M3), drawn(5, 16, 1, R)
    return wa.LatentPages(latents, rope, TABLE, LENGTHS, scale=torch.tensor(0.5))


def dense(q):
    k = drawn(2, 9, 1, L + R)
    return wa.attention(q, k, k[..., :L], mask=wa.Causal(), return_lse=True)


def varlen(q):
    k = drawn(9, 1, L + R)
    return wa.attention_varlen(q, k, k[..., :L], wa.Ragged(CU, torch.tensor([0, 5, 9], dtype=torch.int32)))


CALLS = {
    "dense": (dense, (2, 3)),
    "varlen": (varlen, (4,)),
    "pages": (lambda q: wa.attention_paged(q, pages(), mask=wa.Causal(), return_lse=True), (2, 3)),
    "ragged pages": (lambda q: wa.attention_paged(q, pages(), wa.Ragged(CU), mask=wa.Causal()), (4,)),
    "latents of 8 bits": (lambda q: wa.attention_paged(q, latent_pages(), mask=wa.Causal()), (2, 3)),
    "8 bits, ragged": (lambda q: wa.attention_paged(q, latent_pages(), wa.Ragged(CU)), (4,)),
    "plan": (lambda q: wa.DecodePlan(q, pages(), mask=wa.Causal())(q, pages()), (2, 3)),
    "plan of latents": (lambda q: wa.DecodePlan(q, latent_pages())(q, latent_pages()), (2, 3)),
    "step": (lambda q: wa.StepPlan(q, pages(), wa.Ragged(CU))(q, pages(), wa.Ragged(CU)), (4,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_result_is_that_of_joined_queries(name):
    call, axes = CALLS[name]
    q = query(*axes)
    torch.testing.assert_close(call(q), call(q.joined()), atol=0, rtol=0)


def test_a_plan_takes_other_queries_of_the_same_form():
    first, other = query(2, 1), query(2, 1, seed=7)
    plan = wa.DecodePlan(first, pages(), mask=wa.Causal())
    torch.testing.assert_close(plan(other, pages()), wa.attention_paged(other.joined(), pages(), mask=wa.Causal()))
    with pytest.raises(AttentionError, match=r"q.rope has shape .* strides .*; the plan was made for"):
        plan(wa.LatentQuery(other.nope, other.rope.contiguous()), pages())
    with pytest.raises(AttentionError, match=r"the plan was made for q, .*q\.rope"):
        plan(other.joined(), pages())
    out = drawn(2, 1, HEADS, L)
    inside = wa.LatentQuery(first.nope, out[..., :R])
    shared = wa.DecodePlan(inside, pages())
    with pytest.raises(AttentionError, match=r"out shares memory with q\.rope"):
        shared(inside, pages(), out)


def test_gradients_reach_both_parts():
    q = query(2, 3)
    parts = [x.clone().requires_grad_() for x in (q.nope, q.rope)]
    whole = q.joined().requires_grad_()
    dense(wa.LatentQuery(*parts))[0].sum().backward()
    dense(whole)[0].sum().backward()
    torch.testing.assert_close(torch.cat([x.grad for x in parts], -1), whole.grad)


def test_an_empty_batch_has_gradients_of_both_parts():
    parts = [torch.zeros(0, 3, HEADS, n, requires_grad=True) for n in (L, R)]
    k = torch.zeros(0, 9, 1, L + R)
    wa.attention(wa.LatentQuery(*parts), k, k[..., :L]).sum().backward()
    assert all(x.grad is not None for x in parts)


def of(nope=None, rope=None, **tail):
    q, k = query(2, 3), drawn(2, 9, 1, L + R)
    given = wa.LatentQuery(q.nope if nope is None else nope, q.rope if rope is None else rope)
    return wa.attention(given, k, k[..., :L], **tail)


OUT = drawn(2, 3, HEADS, L)
BAD = {
    "rope is 3; rope must be a torch.Tensor": lambda: wa.LatentQuery(query(1).nope, 3),
    "nope is a sparse": lambda: wa.LatentQuery(torch.eye(4).to_sparse(), query(1).rope),
    "q.rope has shape (2, 2, 4, 8); it must have those of q but for the columns": lambda: of(rope=query(2, 2).rope),
    "q.rope has shape (3, 4, 8); q.rope must be rank 4": lambda: of(rope=query(3).rope),
    "q.rope has dtype torch.float16; it must have the dtype of q": lambda: of(rope=query(2, 3).rope.half()),
    "q.rope has shape (2, 3, 4, 0); it must have at least one column": lambda: of(rope=query(2, 3).rope[..., :0]),
    "k has head_dim 40; it must have the head_dim of q, 39": lambda: of(rope=query(2, 3).rope[..., 1:]),
    "out must not share memory with q.rope": lambda: of(rope=OUT[..., :R], out=OUT),
    "q has dtype torch.float8_e4m3fn and a rotary part": lambda: of(
        query(2, 3).nope.to(E4M3), query(2, 3).rope.to(E4M3)
    ),
    "seq.q_rope is given; over pages it belongs to kv.q_rope": lambda: wa.attention_paged(
        query(4).nope, pages(), wa.Ragged(CU, q_rope=query(4).rope)
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_wrong_calls(message):
    with pytest.raises(AttentionError, match=re.escape(message) if "sparse" not in message else "nope is a"):
        BAD[message]()


@pytest.mark.parametrize("arch", ["sm90", "sm100", "gfx942", "gfx950"])
def test_kernels_have_no_gradients_of_it(arch):
    nope, rope = torch.zeros(1, 1, 16, 512).bfloat16(), torch.zeros(1, 1, 16, 64).bfloat16().requires_grad_()
    k = torch.zeros(1, 30, 1, 576).bfloat16()
    with pytest.raises(AttentionError, match=r"q\.rope requires a gradient"):
        wa.attention(wa.LatentQuery(nope, rope), k, k[..., :512], backend=f"simulate:{arch}")
