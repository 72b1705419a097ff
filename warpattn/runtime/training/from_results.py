"""Gradients from the results of a forward, for callers with their own autograd.

The results may cover more keys than the call has: with out and LSE over all keys, the gradients are the part of the
call's own keys, and parts of disjoint sets of keys add up. Ring attention relies on it (`distributed.ring`, torch's).
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from warpattn.errors import Rules
from warpattn.inputs import is_tensor, kind_of
from warpattn.problem import Call, CheckedCall, validate
from warpattn.problem.gradients import check_backward
from warpattn.runtime.training.gradients import Along, Saved, Wanted, checked_backward, take_gradients
from warpattn.runtime.training.recomputed import shares
from warpattn.torch_modes import is_fake, is_recorded


def differentiate(call: Call, saved: Saved, along: Along, captured: Many[Tensor] = ()) -> list[Tensor]:
    """Return dq, dk, dv and gradients of `captured`, tensors of the score; AttentionError lists all broken rules."""
    hidden = not torch.compiler.is_compiling() and (is_recorded() or is_fake(saved.q))  # torch would not see kernels
    with torch.no_grad():
        checked = validate(call, read_values=not hidden)
        _check_results(checked, saved, along)
        if checked.backend == "reference":
            return shares(call, checked, saved, along, captured)
        if hidden and not captured:
            from warpattn.runtime.torch_op import operators  # registers them, which takes 0.3 s

            return operators.differentiate(call, checked, saved, along)
        rules, arch = Rules(), checked.backend.removeprefix("simulate:")
        check_backward(rules, arch, ("q", "k", "v"), checked.problem, checked.problem.kind)
        rules.done()
        held = () if checked.score is None else checked.score.tensors
        backward = checked_backward(checked, call.deterministic)
        wanted = Wanted(False, tuple(any(x is each for each in captured) for x in held), apart=True)
        found = take_gradients(backward, call.sequence, saved, along, wanted)
    of = {id(x): gradient for x, gradient in zip(held, found.captured, strict=True)}
    more = [(x, of.get(id(x))) for x in captured]
    return [found.q, found.k, found.v, *(torch.zeros_like(x) if g is None else g for x, g in more)]


def _check_results(checked: CheckedCall, saved: Saved, along: Along) -> None:
    """Check shapes, dtypes and devices of out, dout and lse."""
    rules, q = Rules(), saved.q
    shape = (*q.shape[:-1], checked.problem.dim_v)
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    wanted = {"out": (saved.out, shape, q.dtype), "dout": (along.dout, shape, q.dtype),
              "lse": (saved.lse, checked.lse_shape, exact)}  # fmt: skip
    for name, (x, size, dtype) in wanted.items():
        fits = is_tensor(x) and tuple(x.shape) == tuple(size) and x.dtype == dtype and x.device == q.device
        kind = f"a {x.dtype} tensor {tuple(x.shape)} on {x.device}" if is_tensor(x) else kind_of(x)
        rules.require(fits, f"{name} is {kind}", f"it must be a {dtype} tensor {tuple(size)} on {q.device}")
    rules.done()
