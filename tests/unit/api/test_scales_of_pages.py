"""Scales of 8-bit pages on the CPU: those of keys in use must be scales; what no sequence has may be anything."""

from __future__ import annotations

import math

import pytest
import torch

import warpattn as wa

PAGES, PAGE, HEADS_KV, DIM = 5, 16, 2, 64
TABLE = torch.tensor([[3, 0], [2, 4]], dtype=torch.int32)
LENGTHS = torch.tensor([20, 5], dtype=torch.int32)
Q = torch.randn(2, 1, 4, DIM, generator=torch.Generator().manual_seed(0))
WRONG = [0.0, -1.0, math.nan, math.inf]


def cache(per: str | int) -> wa.PagedKV:
    generator = torch.Generator().manual_seed(1)
    k, v = (wa.quantize(torch.randn(PAGES, PAGE, HEADS_KV, DIM, generator=generator), per=per) for _ in range(2))
    return wa.PagedKV(k.values, v.values, TABLE, LENGTHS, k_scale=k.scale.clone(), v_scale=v.scale.clone())


def ragged(kv: wa.PagedKV) -> torch.Tensor:
    return wa.attention_paged(Q[:, 0], kv, wa.Ragged(torch.tensor([0, 1, 2], dtype=torch.int32)))


CALLS = {
    "call": lambda kv: wa.attention_paged(Q, kv),
    "ragged": ragged,
    "plan": lambda kv: wa.DecodePlan(Q, kv)(Q, kv),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("per", ["token", 64])
def test_rows_without_a_key_need_no_scale(per, call, wrong):
    """Caches are allocated before anything is in them, and kernels do not read such rows."""
    kv = cache(per)
    expected = CALLS[call](kv)
    for scale in (kv.k_scale, kv.v_scale):
        scale[1], scale[4], scale[0, 4:], scale[2, 5:] = wrong, wrong, wrong, wrong
    assert torch.equal(CALLS[call](kv), expected)


def test_a_cache_of_zeros_that_is_filled():
    new = torch.randn(2, 2, 7, HEADS_KV, DIM)
    k_pages, v_pages = torch.zeros(2, PAGES, PAGE, HEADS_KV, DIM).to(torch.float8_e4m3fn)
    k_scale, v_scale = torch.zeros(2, PAGES, PAGE, HEADS_KV)
    lengths = torch.full((2,), 7, dtype=torch.int32)
    wa.append_paged(k_pages, v_pages, TABLE, lengths, *new, k_scale=k_scale, v_scale=v_scale)
    kv = wa.PagedKV(k_pages, v_pages, TABLE, lengths, k_scale=k_scale, v_scale=v_scale)
    torch.testing.assert_close(wa.attention_paged(Q, kv), wa.attention(Q, *new), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("backend", ["reference", "simulate:sm90"])
def test_scales_of_keys_in_use(backend, wrong):
    if backend != "reference":
        pytest.importorskip("triton")
    kv, q = cache("token"), Q.bfloat16()
    kv.k_scale[0, 3, 1] = wrong  # the last key of the first sequence
    with pytest.raises(wa.AttentionError, match=r"kv\.k_scale\[0, 3, 1\] is .*; a scale must be positive and finite"):
        wa.attention_paged(q, kv, backend=backend)
    kv = cache("head")
    kv.v_scale[1] = wrong
    with pytest.raises(wa.AttentionError, match=r"kv\.v_scale\[1\] is .*; a scale must be positive and finite"):
        wa.attention_paged(q, kv, backend=backend)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_of_latents(shape, wrong):
    """Scales of their tokens are not read: engines warm up over a cache of zeros."""
    latents, rope = torch.zeros(PAGES, PAGE, 1, 512).to(torch.float8_e4m3fn), torch.zeros(PAGES, PAGE, 1, 64)
    q = torch.randn(2, 1, 4, 576)
    with pytest.raises(wa.AttentionError, match=r"^kv\.scale.* is .*; a scale must be positive and finite$"):
        wa.attention_paged(q, wa.LatentPages(latents, rope, TABLE, LENGTHS, scale=torch.full(shape, wrong)))
    unwritten = wa.LatentPages(latents, rope, TABLE, LENGTHS, scale=torch.zeros(PAGES, PAGE, 1, 4))
    assert not wa.attention_paged(q, unwritten).any()
