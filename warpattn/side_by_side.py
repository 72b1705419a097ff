"""Gradients of tensors that are views of one, such as q, k and v of qkv (batch, seq, 3, heads, head_dim): they are
allocated as views of one tensor, too, so that no copy has to join them.

    qkv ─ unbound ─▶ q, k, v ─ attention ─▶ …        beside(q, k, v) ─▶ dq, dk, dv ─ unbound's backward ─▶ dqkv
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor


def beside(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Return uninitialised tensors like q, k and v; views of one new tensor where all three, or k and v, are views."""
    if whole_of((q, k, v)) is not None:
        return _parts(q, 3)
    keys = (torch.empty_like(k), torch.empty_like(v)) if whole_of((k, v)) is None else _parts(k, 2)
    return torch.empty_like(q), *keys


def _parts(like: Tensor, count: int) -> tuple[Tensor, ...]:
    *rows, heads, dim = like.shape
    return like.new_empty((*rows, count, heads, dim)).unbind(-3)


def unbound(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Return x.unbind(dim); its backward copies nothing if the gradients are views of one tensor."""
    plain = torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad)
    return x.unbind(dim) if plain or torch._C._len_torch_dispatch_stack() else _Unbound.apply(x, dim)


class _Unbound(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        ctx.dim = dim
        return x.unbind(dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        whole = whole_of(gradients) if gradients[0].ndim == ctx.dim + 2 else None
        return torch.stack(gradients, ctx.dim) if whole is None else whole, None


def whole_of(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the contiguous (…, parts, heads, head_dim) that `parts` (…, heads, head_dim) are views of, or None."""
    first = parts[0]
    *rows, heads, dim = first.shape
    step = heads * dim * first.itemsize
    if parts[-1].data_ptr() != first.data_ptr() + (len(parts) - 1) * step:  # first: every backward call runs this
        return None
    if any(x.shape != first.shape or x.data_ptr() != first.data_ptr() + i * step for i, x in enumerate(parts)):
        return None
    shape, storage = (*rows, len(parts), heads, dim), first.untyped_storage().data_ptr()
    strides = tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1]
    own = (*strides[:-3], *strides[-2:])
    if any(x.stride() != own or x.untyped_storage().data_ptr() != storage for x in parts):
        return None
    return first.as_strided(shape, strides)
