"""Gradients of the reference inside of operators, where autograd does not record: it runs the reference again.

    recomputed(call, Along)       reference on leaves ─ torch.autograd.grad ─▶ dq, dk, dv, those of other tensors
    shares(call, Saved, Along)    the same where `Saved` has results over more keys ─▶ the part of the call's keys
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from warpattn.problem import Call, CheckedCall
from warpattn.reference import reference
from warpattn.runtime import execute
from warpattn.runtime.training.gradients import Along, Saved
from warpattn.torch_modes import without_autocast


def recomputed(call: Call, along: Along, more: list[Tensor]) -> list[Tensor]:
    """Return gradients of q, k, v and of `more`, leaves in the call and its sequence that require gradients."""
    q, k, v = call.q, call.k, call.v
    with without_autocast(q.device), above_autograd(), torch.enable_grad():
        results = execute.attend(replace(call, return_lse=True))
        every = zip(cast("tuple[Tensor, Tensor]", results), along, strict=True)
        pairs = [(x, gradient) for x, gradient in every if gradient is not None and x.requires_grad]
        leaves = [q, k, v, *more]
        found = torch.autograd.grad([x for x, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
    return _filled(leaves, found)


def shares(call: Call, checked: CheckedCall, saved: Saved, along: Along, more: Many[Tensor]) -> list[Tensor]:
    """Return the call's part of the gradients of q, k, v and `more`; `saved` has results over its keys and others.

    With L the saved LSE, the call contributes w * out to the whole result, w = exp(lse - L). L also depends on the
    scores, so the gradient by a row's w is the sum of dout * out minus `moved`, the part through L.
    """
    leaves = [*(x.detach().requires_grad_() for x in (call.q, call.k, call.v)), *more]
    q, k, v = leaves[:3]
    exact, whole = saved.lse.dtype, saved.lse.masked_fill(saved.lse == -torch.inf, 0.0)
    dout = torch.zeros_like(saved.out, dtype=exact) if along.dout is None else along.dout.to(exact)
    moved = (dout * saved.out.to(exact)).sum(-1)
    if along.dlse is not None:
        moved = moved - along.dlse.mT
    with without_autocast(q.device), above_autograd(), torch.enable_grad():
        options = {"sequence": call.sequence, "mask": call.mask, "score": call.score, "scale": checked.scale}
        out, lse = reference(q, k, v, **options, dtype=exact)
        part = ((dout * out).sum(-1) - moved) * torch.exp(lse - whole).mT
        found = torch.autograd.grad(part.sum(), leaves, allow_unused=True)
    return _filled(leaves, found)


def _filled(leaves: list[Tensor], found: Many[Tensor | None]) -> list[Tensor]:
    return laid_like(leaves, [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)])


def laid_like(tensors: Many[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """Return the gradients of `tensors` with the strides of torch.empty_like; graphs are compiled for these."""
    layouts = [torch.empty_like(x, device="meta").stride() for x in tensors]
    pairs = zip(tensors, gradients, layouts, strict=True)
    return [g if g.stride() == layout else torch.empty_like(x).copy_(g) for x, g, layout in pairs]


def above_autograd() -> Any:
    """Return a context in which autograd records, as it does not inside of operators."""
    keys, hidden = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor, keys.ADInplaceOrView):
        hidden = hidden.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), hidden)
