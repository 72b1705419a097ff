"""A double for the kernels of a forward and a backward: computes with the reference what they would, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from warpattn.problem import CheckedCall
from warpattn.problem.backends import LIMITS, BackwardLimits
from warpattn.problem.backward import CheckedBackward, Gradients
from warpattn.problem.operands import Operands
from warpattn.reference import Job
from warpattn.runtime import simulate
from warpattn.runtime.training import captured
from warpattn.runtime.training.recomputed import above_autograd
from warpattn.sequences import Sequence


class Double:
    """Counts, and keeps the last backward that was run."""

    backwards = 0
    checked: CheckedBackward
    last: Gradients


def install(monkeypatch: pytest.MonkeyPatch) -> Double:
    """Replace the simulator's runs of kernels; every kind of sequence has a backward."""
    double = Double()

    def run(checked: CheckedCall, x: Operands, sequence: Sequence) -> None:
        out, lse = attended(checked, x, sequence)
        x.out.copy_(out)
        if x.lse is not None:
            x.lse.copy_(lse)

    def run_backward(checked: CheckedBackward, x: Gradients, sequence: Sequence) -> None:
        double.backwards, double.checked, double.last = double.backwards + 1, checked, x
        differentiate(checked, x, sequence)

    monkeypatch.setattr(simulate, "run", run)
    monkeypatch.setattr(simulate, "run_backward", run_backward)
    monkeypatch.setattr(captured, "_add_by_kernel", captured._add_in_order)
    limits = BackwardLimits(("dense", "ragged"), 128, deterministic=True)
    monkeypatch.setitem(LIMITS, "sm90", replace(LIMITS["sm90"], backward=limits))
    return double


def attended(checked: CheckedCall, x: Any, sequence: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
    sinks = None if x.sinks is None else x.sinks.double()
    job = Job(checked.mask, checked.score, sinks, checked.scale, torch.float64)
    results = [job.attend(b, *tensors) for b, tensors in enumerate(sequence.walk(x.q, x.k, x.v))]
    return sequence.join([out for out, _ in results], [lse for _, lse in results])


def differentiate(checked: CheckedBackward, x: Gradients, sequence: Sequence) -> None:
    """Write the gradients of `x`; everything that is not wanted stays as it is."""
    wanted = [t.detach().double().requires_grad_() for t in (x.q, x.k, x.v)]
    sinks = None if x.sinks is None else x.sinks.detach().double().requires_grad_()
    q, k, v = wanted
    with above_autograd(), torch.enable_grad():
        out, lse = attended(checked.forward, x._replace(q=q, k=k, v=v, sinks=sinks), sequence)
        results, along = [out], [x.dout.double()]
        if x.dlse is not None:
            results, along = [out, lse], [*along, x.dlse.double()]
        leaves = [*wanted, *([] if sinks is None else [sinks])]
        found = torch.autograd.grad(results, leaves, along, allow_unused=True)
    for place, gradient in zip((x.dq, x.dk, x.dv), found, strict=False):
        place.zero_() if gradient is None else place.copy_(gradient)
    if x.dsinks is not None and found[-1] is not None:
        x.dsinks.copy_(found[-1])
