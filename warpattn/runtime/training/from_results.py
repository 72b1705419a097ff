"""Gradients from the results of a forward, for callers with an autograd of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from warpattn.errors import Rules
from warpattn.problem import Call, CheckedCall, validate
from warpattn.problem.gradients import check_backward
from warpattn.runtime.training.gradients import Along, Saved, Wanted, checked_backward, take_gradients
from warpattn.runtime.training.recomputed import recomputed

__all__ = ["differentiate"]


def differentiate(call: Call, saved: Saved, along: Along) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; AttentionError listing every broken rule."""
    with torch.no_grad():
        checked = validate(call)
        _check_results(checked, saved, along)
        if checked.backend == "reference":
            dq, dk, dv = recomputed(call, along, [])
            return dq, dk, dv
        rules, arch = Rules(), checked.backend.removeprefix("simulate:")
        check_backward(rules, arch, ("q", "k", "v"), checked.problem, checked.problem.kind)
        rules.done()
        captured = () if checked.score is None else checked.score.tensors
        backward = checked_backward(checked, call.deterministic)
        found = take_gradients(backward, call.sequence, saved, along, Wanted(False, (False,) * len(captured)))
    return found.q, found.k, found.v


def _check_results(checked: CheckedCall, saved: Saved, along: Along) -> None:
    """Shapes, dtypes and devices of out, dout and lse."""
    rules, q = Rules(), saved.q
    shape = (*q.shape[:-1], checked.problem.dim_v)
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    wanted = {"out": (saved.out, shape, q.dtype), "dout": (along.dout, shape, q.dtype),
              "lse": (saved.lse, checked.lse_shape, exact)}  # fmt: skip
    for name, (x, size, dtype) in wanted.items():
        fits = isinstance(x, Tensor) and tuple(x.shape) == tuple(size) and x.dtype == dtype and x.device == q.device
        kind = f"a {x.dtype} tensor {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
        rules.require(fits, f"{name} is {kind}", f"it must be a {dtype} tensor {tuple(size)} on {q.device}")
    rules.done()
