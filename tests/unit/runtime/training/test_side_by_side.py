"""Gradients of packed tensors: written where the gradient of the whole is, and right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import warpattn as wa
from tests.unit.runtime.training.gradient_double import install
from warpattn.side_by_side import unbound

S, H, D = 6, 2, 8
OFFSETS = torch.tensor([0, 4, S], dtype=torch.int32)
SHAPES = {"qkv": (2, S, 3, H, D), "kv": (2, S, 2, H, D), "ends": (S, 3, H, D)}


def attended(kind: str, x: Tensor, backend: str, unbind: Callable[[Tensor, int], tuple[Tensor, ...]]) -> Tensor:
    parts = unbind(x, x.ndim - 3)
    if kind == "ends":
        return wa.attention_varlen(*parts, wa.Ragged(OFFSETS), mask=wa.Causal(), backend=backend)
    q = torch.ones(2, S, H, D, dtype=x.dtype)
    return wa.attention(*(parts if kind == "qkv" else (q, *parts)), mask=wa.Causal(), backend=backend)


@pytest.mark.parametrize("kind", SHAPES)
def test_gradients_of_parts_are_the_gradient_of_the_whole(kind, monkeypatch):
    double = install(monkeypatch)
    x = torch.randn(SHAPES[kind]).bfloat16().requires_grad_()
    along = torch.randn((*SHAPES[kind][:-3], H, D)).bfloat16()
    expected = torch.autograd.grad(attended(kind, x, "reference", torch.unbind), x, along)[0]
    found = torch.autograd.grad(attended(kind, x, "simulate:sm90", unbound), x, along)[0]
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert found.abs().max() > 0.1
    # where the kernels wrote it
    assert double.last.dk.data_ptr() == found.select(-3, -2 if kind == "kv" else 1).data_ptr()


def test_other_gradients_are_put_together():
    x = torch.randn(2, S, 3, H, D, requires_grad=True)
    q, k, v = unbound(x, 2)
    (found,) = torch.autograd.grad((q * 2 + k * 3).sum() + v[:, :1].sum(), x)
    assert (found[:, :, 0] == 2).all() and (found[:, :, 1] == 3).all() and found[:, :, 2].sum() == 2 * H * D
    heads_last = torch.randn(2, S, H, D, 3, requires_grad=True)
    (found,) = torch.autograd.grad(sum((i * t).sum() for i, t in enumerate(unbound(heads_last, 4))), heads_last)
    assert torch.equal(found[..., 2], torch.full((2, S, H, D), 2.0))
