"""Gradients of the reference where autograd does not look: within operators, from the call alone.

    call, Along ─ the reference once more, on leaves ─ torch.autograd.grad ─▶ dq, dk, dv, and those of other tensors
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from warpattn.problem import Call
from warpattn.runtime import execute
from warpattn.runtime.training.gradients import Along

__all__ = ["above_autograd", "recomputed"]


def recomputed(call: Call, along: Along, more: list[Tensor]) -> list[Tensor]:
    """Gradients of q, k, v and of `more`: leaves that require gradients and that the call holds."""
    q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))
    with above_autograd(), torch.enable_grad():
        results = execute.attend(replace(call, q=q, k=k, v=v, return_lse=True))
        every = zip(cast("tuple[Tensor, Tensor]", results), along, strict=True)
        pairs = [(x, gradient) for x, gradient in every if gradient is not None and x.requires_grad]
        leaves = [q, k, v, *more]
        found = torch.autograd.grad([x for x, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
    return [torch.zeros_like(x) if g is None else g.contiguous() for x, g in zip(leaves, found, strict=True)]


def above_autograd() -> Any:
    """A context in which autograd sees what happens, as it does not within operators."""
    keys, hidden = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor, keys.ADInplaceOrView):
        hidden = hidden.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), hidden)
