"""Calls whose inputs require gradients: an autograd function around the kernels of forward and backward.

    train ─┬▶ _Attention.forward    execute.attend, with the LSE; saves q, k, v, out, lse, sinks, captured tensors
           └▶ _Attention.backward   take_gradients: dq, dk, dv, dsinks, gradients of captured tensors

Calls under torch's dispatch modes, such as that of selective checkpointing, do not come here: they run as the operator
`warpattn::attention`, which has the same gradients (`api.otherwise`).
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any, NamedTuple
from typing import cast as typed

import torch
from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.problem import Call, CheckedCall
from warpattn.problem.backward import CheckedBackward
from warpattn.runtime import execute
from warpattn.runtime.execute import Result
from warpattn.runtime.training.gradients import NOTHING, Along, Saved, Wanted, checked_backward, take_gradients
from warpattn.runtime.training.unchanged import Versions, check_unchanged, versions
from warpattn.sequences import Sequence


class _Job(NamedTuple):
    """What the backward needs of a call, except for the tensors that autograd saves."""

    checked: CheckedCall
    sequence: Sequence
    deterministic: bool | None
    seen: Versions  # of tensors that autograd does not save


def train(call: Call, checked: CheckedCall) -> Result:
    """Return out, or (out, lse), with gradients; `checked` is what `execute.attend` returned for the call."""
    captured = () if checked.score is None else checked.score.tensors
    out, lse = _Attention.apply(call, checked, call.q, call.k, call.v, call.sinks, *captured)
    return (out, lse) if call.return_lse else out


class _Attention(torch.autograd.Function):
    """Out and LSE of a call. Its tensors are separate arguments, so that autograd sees them."""

    @staticmethod
    def forward(ctx: Any, call: Call, checked: CheckedCall, *tensors: Tensor | None) -> Any:
        q, k, v, sinks, *captured = tensors
        out, lse = typed("tuple[Tensor, Tensor]", execute.attend(replace(call, return_lse=True)))
        ctx.save_for_backward(q, k, v, out, lse, sinks, *captured)
        ctx.set_materialize_grads(False)
        seen = versions(checked.mask.tensors, call.sequence.indices())
        ctx.job = _Job(checked, call.sequence, call.deterministic, seen)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        job: _Job = ctx.job
        _, _, *needed = ctx.needs_input_grad
        _, _, _, need_sinks, *need_captured = needed
        check_unchanged(job.seen)
        checked: CheckedBackward = checked_backward(job.checked, job.deterministic)
        q, k, v, out, lse, sinks, *captured = ctx.saved_tensors
        saved, wanted = Saved(q, k, v, out, lse, sinks), Wanted(need_sinks, tuple(need_captured))
        with torch.no_grad() if torch.is_grad_enabled() else NOTHING:  # create_graph=True turns gradients on
            found = take_gradients(checked, job.sequence, saved, Along(*gradients), wanted)
        given = (found.q, found.k, found.v, found.sinks, *found.captured)
        given = tuple(x if need else None for x, need in zip(given, needed, strict=True))
        return None, None, *taken_once(given, (*saved, *captured, *gradients))


def taken_once(gradients: Many[Tensor | None], of: Many[Tensor | None]) -> Many[Tensor | None]:
    """Make the gradients that a backward returns raise one clear error if they are differentiated again.

    of: the tensors that they depend on; else torch would leave them out where it differentiates by these alone.
    """
    if not torch.is_grad_enabled():
        return gradients
    return _Once.apply(len(gradients), *gradients, *of)


class _Once(torch.autograd.Function):
    """Passes gradients through; its backward raises, because kernels have no second derivative.

    torch's `once_differentiable` would treat them as constants if dout requires no gradient.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> Any:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        rule = 'take them once, or call `attention` with backend="reference"'
        raise AttentionError(f"the gradients of attention kernels are differentiated again; {rule}")
