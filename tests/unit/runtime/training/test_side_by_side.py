"""Gradients of packed tensors: written where the gradient of the whole is, and right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import warpattn as wa
from tests.unit.runtime.training.gradient_double import install
from warpattn.side_by_side import unbound, whole_of

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


def parts(rows: int = 3) -> tuple[Tensor, ...]:
    return torch.randn(rows, 3, 4, 4).unbind(1)


def of_two_memories() -> tuple[Tensor, ...]:
    """Parts whose addresses are those of one tensor, but whose memory is not one storage."""
    memory = bytearray(4 * 2 * 16)
    return tuple(torch.frombuffer(memory, dtype=torch.float32, offset=64 * i, count=16).view(4, 4) for i in range(2))


APART = {
    "turned": lambda: tuple(x.transpose(1, 2) for x in parts()),
    "one of them turned": lambda: (*parts(1)[:1], *(x.mT for x in parts(1)[1:])),
    "the last turned": lambda: (lambda a, b, c: (a, b, c.mT))(*parts()),
    "another order": lambda: parts()[::-1],
    "one is missing": lambda: parts()[::2],
    "the second twice": lambda: (lambda a, b, c: (a, a, c))(*parts()),
    "fewer rows": lambda: (lambda a, b, c: (a, b[:2], c))(*parts()),
    "copies": lambda: tuple(x.clone() for x in parts()),
    "two memories": of_two_memories,
}


@pytest.mark.parametrize("name", APART)
def test_what_is_no_part_of_one_tensor(name):
    assert whole_of(APART[name]()) is None


@pytest.mark.parametrize("rows", [1, 3])
def test_parts_of_one_tensor_are_the_whole(rows):
    found = whole_of(parts(rows))
    assert found is not None and found.shape == (rows, 3, 4, 4) and found.is_contiguous()
    together = parts(rows)
    assert torch.equal(whole_of(together), torch.stack(together, 1))
