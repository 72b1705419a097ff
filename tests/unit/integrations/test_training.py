"""Gradients through the drop-ins: flash-attn's packed forms, sinks and LSE, swapped SDPA, nested tensors."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import warpattn as wa
from tests.unit.runtime.training.gradient_double import install
from warpattn.integrations import torch_sdpa
from warpattn.integrations.flash_attn import modifiers, version2, version3, version4

CU = torch.tensor([0, 3, 3, 9], dtype=torch.int32)


def compare(out, expected, leaves):
    """Gradients of random combinations of the results."""
    outs, truths = (x if isinstance(x, tuple) else (x,) for x in (out, expected))
    along = [torch.randn_like(x) for x in truths]
    found = torch.autograd.grad(outs, leaves, along, retain_graph=True)
    for mine, theirs in zip(found, torch.autograd.grad(truths, leaves, along, retain_graph=True), strict=True):
        assert (theirs != 0).any()
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_packed_forms():
    qkv = torch.randn(2, 7, 3, 4, 16, requires_grad=True)
    expected = wa.attention(*qkv.unbind(2), mask=wa.Causal())
    compare(version2.flash_attn_qkvpacked_func(qkv, causal=True), expected, [qkv])
    compare(version3.flash_attn_qkvpacked_func(qkv, causal=True), expected, [qkv])
    rows = torch.randn(9, 3, 4, 16, requires_grad=True)
    expected = wa.attention_varlen(*rows.unbind(1), wa.Ragged(CU), mask=wa.Causal())
    compare(version2.flash_attn_varlen_qkvpacked_func(rows, CU, 6, causal=True), expected, [rows])


def test_key_value_packed_forms():
    q, kv = torch.randn(2, 7, 4, 16, requires_grad=True), torch.randn(2, 9, 2, 2, 16, requires_grad=True)
    compare(version2.flash_attn_kvpacked_func(q, kv), wa.attention(q, *kv.unbind(2)), [q, kv])
    q, kv = torch.randn(9, 4, 16, requires_grad=True), torch.randn(9, 2, 2, 16, requires_grad=True)
    out = version2.flash_attn_varlen_kvpacked_func(q, kv, CU, CU, 6, 6, window_size=(2, 1))
    compare(out, wa.attention_varlen(q, *kv.unbind(1), wa.Ragged(CU), mask=wa.SlidingWindow(3, 1)), [q, kv])


def test_learnable_sinks_and_the_lse():
    q, k, v = (torch.randn(2, 7, h, 16, requires_grad=True) for h in (4, 2, 2))
    sink = torch.randn(4, requires_grad=True)
    results = version4.flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True)
    compare(results, wa.attention(q, k, v, mask=wa.Causal(), sinks=sink, return_lse=True), [q, k, v, sink])
    half = sink.detach().bfloat16().requires_grad_()
    out, _ = version4.flash_attn_func(q, k, v, learnable_sink=half)
    (gradient,) = torch.autograd.grad(out.square().sum(), half)
    assert gradient.dtype == torch.bfloat16 and (gradient != 0).any()


def test_used_rows_of_version_3():
    q, k, v = (torch.randn(9, h, 16, requires_grad=True) for h in (4, 2, 2))
    used = torch.tensor([2, 0, 4], dtype=torch.int32)
    out = version3.flash_attn_varlen_func(q, k, v, CU, CU, 6, 6, seqused_q=used, seqused_k=used, causal=True)
    dq, dk, _ = torch.autograd.grad(out.square().sum(), (q, k, v))
    unused = torch.tensor([False, False, True, False, False, False, False, True, True])
    assert (dq[unused] == 0).all() and (dk[unused] == 0).all() and (dq[~unused] != 0).any()


def test_a_function_of_version_4():
    q, k, v = (torch.randn(1, 7, 2, 16, requires_grad=True) for _ in range(3))
    gain = torch.rand(2, requires_grad=True)
    out, _ = version4.flash_attn_func(q, k, v, score_mod=lambda s, b, h, i, j, aux: s * aux[0][h], aux_tensors=[gain])
    score = wa.CustomScore(lambda s, b, h, q, k, gain: s * gain[h], gain=gain)
    compare(out, wa.attention(q, k, v, score=score), [q, k, v, gain])


@pytest.mark.parametrize("module", [version2, version3, version4], ids=lambda module: module.VERSION[0])
def test_deterministic_reaches_the_backward(module, monkeypatch):
    double = install(monkeypatch)
    backend = lambda wanted: wa.Backend("simulate:sm90", deterministic=wanted or None)  # noqa: E731
    monkeypatch.setattr(modifiers, "backend_for", backend)
    monkeypatch.setattr(module, "backend_for", modifiers.backend_for)
    q, k, v = (torch.randn(1, 7, 2, 16).bfloat16().requires_grad_() for _ in range(3))
    for wanted in (True, False):
        out = module.flash_attn_func(q, k, v, deterministic=wanted)
        (out[0] if isinstance(out, tuple) else out).float().sum().backward()
        assert double.checked.deterministic is wanted


def test_swapped_sdpa():
    q, k, v = (torch.randn(2, 4, 7, 16, requires_grad=True) for _ in range(3))
    mask = torch.randn(7, 7, requires_grad=True)
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with torch_sdpa.swapped():
        compare(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask), expected, [q, k, v, mask])


def test_nested_tensors():
    parts = [torch.randn(n, 32) for n in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    q = nested.unflatten(-1, (2, 16)).transpose(1, 2)
    torch_sdpa.scaled_dot_product_attention(q, q, q, is_causal=True).values().square().sum().backward()
    assert nested.grad is not None
    for part, gradient in zip(parts, nested.grad.unbind(), strict=True):
        leaf = part[None].clone().requires_grad_()
        x = leaf.unflatten(-1, (2, 16))
        wa.attention(x, x, x, mask=wa.Causal()).square().sum().backward()
        torch.testing.assert_close(gradient, leaf.grad[0])
