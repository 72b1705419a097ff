"""flash-attn's and FlexAttention's functions by the simulated kernels: what the drop-ins ask for is what kernels take.

A backend cannot be named in those signatures, so the three functions of this package are given one here.
"""

from functools import partial

import pytest
import torch

import warpattn as wa
from tests.drawn import drawn
from tests.oracle import Inputs, check
from warpattn.integrations import flex
from warpattn.integrations.flash_attn import cache, packed, version2, version3
from warpattn.integrations.flex import call as flex_call

pytest.importorskip("warpattn.kernels.pieces.codegen", exc_type=ImportError)

pytestmark = pytest.mark.slow

H, HKV, D = 4, 2, 64


@pytest.fixture(params=drawn(["sm90", "sm100", "gfx942", "gfx950"], ["sm90", "gfx950"]), autouse=True)
def _simulated(request, monkeypatch):
    backend = f"simulate:{request.param}"
    for module in (version2, cache, flex_call):
        monkeypatch.setattr(module, "attention", partial(wa.attention, backend=backend))
    monkeypatch.setattr(packed, "attention_varlen", partial(wa.attention_varlen, backend=backend))
    for module in (packed, cache):
        monkeypatch.setattr(module, "attention_paged", partial(wa.attention_paged, backend=backend))


def normal(*shape):
    return torch.randn(shape, dtype=torch.bfloat16)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_dense():
    q, k, v = normal(1, 50, H, D), normal(1, 70, HKV, D), normal(1, 70, HKV, D)
    out, lse, _ = version2.flash_attn_func(q, k, v, causal=True, window_size=(20, 0), return_attn_probs=True)
    check(Inputs(q, k, v, mask=wa.SlidingWindow(21)), out, lse)


def test_ragged():
    cu_q, cu_k = ints(0, 20, 20, 50), ints(0, 30, 40, 90)
    q, k, v = normal(50, H, D), normal(90, HKV, D), normal(90, HKV, D)
    out, lse, _ = version2.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 30, 50, causal=True, return_attn_probs=True)
    check(Inputs(q, k, v, wa.Ragged(cu_q, cu_k), mask=wa.Causal()), out, lse)


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_cache_of_one_tensor_per_sequence(tokens):
    """One page of 104 keys per sequence, new tokens, rotation, keys that start later."""
    caches, lengths, first = (normal(4, 104, HKV, D), normal(4, 104, HKV, D)), ints(70, 0, 33), ints(5, 0, 20)
    rows = ints(3, 0, 2)
    angle = torch.rand(104, D // 2)
    q, k, v = normal(3, tokens, H, D), normal(3, tokens, HKV, D), normal(3, tokens, HKV, D)
    out, lse = version3.flash_attn_with_kvcache(
        q, *caches, k, v, None, torch.ones_like(angle), torch.zeros_like(angle), cache_seqlens=lengths,
        cache_batch_idx=rows, cache_leftpad=first, causal=True, return_softmax_lse=True,
    )  # fmt: skip
    assert torch.equal(caches[0][3, 70 : 70 + tokens], k[0])  # an angle of 0 turns nothing
    kv = wa.PagedKV(*caches, rows[:, None], lengths + tokens)
    mask = wa.Causal() & wa.CustomMask(lambda b, h, q, k, first: k >= first[b], first=first)
    check(Inputs(q, *caches, kv, mask=mask), out, lse)


def test_pages_with_ragged_queries():
    pages, table, lengths = (
        (normal(12, 16, HKV, D), normal(12, 16, HKV, D)),
        torch.randperm(12).view(3, 4),
        ints(50, 7, 64),
    )
    table, cu_q = table.to(torch.int32), ints(0, 2, 3, 9)
    q = normal(9, H, D)
    out, lse = version3.flash_attn_with_kvcache(
        q, *pages, cache_seqlens=lengths, page_table=table, cu_seqlens_q=cu_q, max_seqlen_q=6, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    k, v = (torch.cat([x[table[b].long()].flatten(0, 1)[:n] for b, n in enumerate(lengths.tolist())]) for x in pages)
    cu_k = ints(0, *lengths.cumsum(0).tolist())
    check(Inputs(q, k, v, wa.Ragged(cu_q, cu_k), mask=wa.Causal()), out, lse)


def test_functions_and_a_block_mask_of_flex_attention():
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    document, table = torch.tensor([[0] * 10 + [1] * 30, [0] * 25 + [1] * 15]), torch.randn(H, 80)
    cap = torch.tensor(20.0)
    mask = create_block_mask(
        and_masks(lambda b, h, i, j: i >= j, lambda b, h, i, j: document[b, i] == document[b][j]), 2, H, 40, 40,
        device="cpu", BLOCK_SIZE=16,
    )  # fmt: skip

    def score(s, b, h, q_idx, kv_idx):
        return cap * torch.tanh((s + table[h, q_idx - kv_idx - 1]) / cap)  # from the end of the table for kv > q

    q, k, v = (normal(2, 40, heads, D) for heads in (H, HKV, HKV))
    transposed = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = flex.flex_attention(*transposed, score, mask, enable_gqa=True, return_lse=True)
    inputs = Inputs(q, k, v, mask=flex.mask_of(mask), score=flex.score_of(score), soft_cap=True)
    check(inputs, out.transpose(1, 2), lse)


def test_functions_that_the_language_composes():
    """Sines, rounding and activation functions, beside the same torch functions of a score matrix."""

    def score(s, b, h, q_idx, kv_idx):
        turned = torch.sin(s * 9.0) + torch.cos((q_idx - kv_idx) * 0.3)
        grown = torch.nn.functional.gelu(s) + torch.nn.functional.softplus(s) + torch.special.expit(s * 40.0)
        return turned + grown + torch.erf(s) * torch.round(s) + (torch.abs(s) + 0.1) ** 0.3

    q, k, v = (normal(1, H, 40, D) for _ in range(3))
    out = flex.flex_attention(q, k, v, score)
    places = torch.arange(40)
    scores = score(q.float() @ k.float().mT * D**-0.5, 0, None, places[:, None], places)
    torch.testing.assert_close(out.float(), scores.softmax(-1) @ v.float(), atol=2e-2, rtol=2e-2)


def test_narrow_integers_bools_and_angles_of_flex_attention():
    """What the language composes: arithmetic that wraps around, sums of bools, isin, powers, atan2."""
    table, few = torch.randint(0, 256, (40,), dtype=torch.uint8), torch.tensor([3, 17])

    def score(s, b, h, q_idx, kv_idx):
        apart = (table[q_idx] - table[kv_idx]) * 0.01
        near = ((q_idx > kv_idx) + (kv_idx > 20)) * 0.5
        angle = torch.atan2(s, kv_idx - 9.5) + torch.atan(s)
        return s + apart + near + angle + torch.where(torch.isin(kv_idx, few), 1.0, 0.9 ** (q_idx - kv_idx).abs())

    q, k, v = (normal(1, H, 40, D) for _ in range(3))
    out = flex.flex_attention(q, k, v, score)
    rows, keys = torch.arange(40)[:, None], torch.arange(40)
    scores = score(q.float() @ k.float().mT * D**-0.5, 0, None, rows, keys)
    torch.testing.assert_close(out.float(), scores.softmax(-1) @ v.float(), atol=2e-2, rtol=2e-2)


def test_flex_attention_writes_the_querys_layout():
    """Kernels write heads before rows, without an LSE; with gradients the result is copied."""
    q, k, v = (normal(2, H, 40, D) for _ in range(3))
    out = flex.flex_attention(q, k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
    torch.testing.assert_close(out.view(2 * H, 40, D).float(), expected.flatten(0, 1), atol=2e-2, rtol=2e-2)
    trained = flex.flex_attention(q.requires_grad_(), k, v)
    assert trained.view(2 * H, 40, D).requires_grad
    torch.testing.assert_close(trained, out, atol=1e-2, rtol=1e-2)
