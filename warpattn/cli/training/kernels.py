"""Backward kernels for the command line: launches for `compile`, values for `simulate` and `run`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.cli import independent
from warpattn.problem import Call, CheckedCall, validate
from warpattn.problem.backward import CheckedBackward, Gradients
from warpattn.problem.launch import Launch
from warpattn.problem.operands import Operands
from warpattn.reference import reference
from warpattn.runtime.training.plan import list_backward_launches
from warpattn.sequences import Dense
from warpattn.sim import Report

NAMES = ("dq", "dk", "dv")


class Taken(NamedTuple):
    """Gradients of sum(dout * out)."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def backward_launches(checked: CheckedCall, x: Operands) -> tuple[Launch, ...]:
    """List the launches of a backward; the memory of the tensors is not used."""
    lse = torch.empty(checked.lse_shape)
    dq, dk, dv = (torch.empty_like(tensor) for tensor in (x.q, x.k, x.v))
    made = Gradients(x.q, x.k, x.v, x.out, lse, torch.empty_like(x.out), None, None, dq, dk, dv, None)
    return list_backward_launches(CheckedBackward.of(checked, False), made, Dense())


def simulated(call: Call, dout: Tensor, options: Any) -> tuple[Report, Taken]:
    """Compute gradients by simulated kernels, from the reference's forward."""
    from warpattn.runtime import simulate  # imports NumPy and Triton

    q, k, v = call.q, call.k, call.v
    out, lse = reference(q, k, v, mask=call.mask, score=call.score)
    made = Taken(*(torch.full_like(tensor, torch.nan) for tensor in (q, k, v)))
    x = Gradients(q, k, v, out.to(q.dtype), lse, dout, None, None, *made, None)
    return simulate.traced_backward(CheckedBackward.of(validate(call), False), x, options), made


def differentiated(attend: Any, tensors: tuple[Tensor, Tensor, Tensor], dout: Tensor) -> Taken:
    """Compute the gradients of a function of q, k and v by autograd."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = attend(*leaves)
    return Taken(*torch.autograd.grad(out, leaves, dout.to(out.dtype)))


def truth(call: Call, dout: Tensor) -> Taken:
    """Compute gradients on the CPU by torch's own functions in fp64, for a call on a card by the reference in fp32."""
    tensors, options = (call.q, call.k, call.v), {"mask": call.mask, "score": call.score}
    if call.q.is_cuda:
        return differentiated(lambda *x: reference(*x, **options)[0], tensors, dout)
    exact = (call.q.double(), call.k.double(), call.v.double())
    return differentiated(lambda *x: independent.attention(*x, **options)[0], exact, dout)
