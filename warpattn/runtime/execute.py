"""Runs a call: by cached launches, or it checks the rules and runs the reference, the simulator or a card's kernels.

    attend(call) ─ call_cache.recall ─▶ launch                                                        a repeated call
                 ─ validate ─▶ CheckedCall ─┬─▶ reference                                             on the CPU
                                            ├─▶ simulate.run                                          "simulate:…"
                                            ├─▶ list_launches, launch_all ─▶ call_cache.remember      on a card
                                            └─▶ returned: training.autograd runs it                   with gradients
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from warpattn.problem import Call, CheckedCall, validate
from warpattn.problem.operands import Operands, fitted, hand_over, without_keys
from warpattn.reference import reference
from warpattn.runtime import call_cache, cuda
from warpattn.runtime.bound_launches import launch_all
from warpattn.runtime.call_cache import Result
from warpattn.runtime.launches import list_launches


def attend(call: Call) -> Result | CheckedCall:
    """Return out, or (out, lse), of a call of any sequence kind; if kernels would run and an input requires gradients,
    the checked call, for `training.autograd`. Raises AttentionError listing every broken rule."""
    result = call_cache.recall(call)
    if result is not None:
        return result
    checked = validate(call)
    if checked.backend == "reference":
        out, lse = _refer(call, checked)
    elif checked.differentiated:
        return checked
    else:
        out, lse = _run_kernels(call, checked)
    return (out, lse) if call.return_lse and lse is not None else out


def _refer(call: Call, checked: CheckedCall) -> tuple[Tensor, Tensor | None]:
    """Compute the result by the reference, in fp32 (fp64 for fp64), rounded once."""
    out, lse = reference(
        call.q,
        call.k,
        call.v,
        sequence=call.sequence,
        mask=call.mask,
        score=call.score,
        sinks=call.sinks,
        scale=checked.scale,
        dtype=torch.float64 if call.q.dtype == torch.float64 else torch.float32,
    )
    return (out.to(checked.problem.dtype) if call.out is None else call.out.copy_(out)), lse


def _run_kernels(call: Call, checked: CheckedCall) -> tuple[Tensor, Tensor | None]:
    """Compute the result by kernels, simulated or on torch's current stream of the operands' device."""
    q = call.q
    shape, kind = (*q.shape[:-1], checked.problem.dim_v), checked.problem.dtype
    out = q.new_empty(shape, dtype=kind) if call.out is None else call.out
    lse = q.new_empty(checked.lse_shape, dtype=torch.float32) if call.return_lse else None
    operands = Operands(q, call.k, call.v, out, lse, call.sinks)
    if checked.problem.seq_k == 0 or out.numel() == 0:
        without_keys(operands)
    elif checked.backend.startswith("simulate:"):
        from warpattn.runtime import simulate  # imports NumPy and Triton

        simulate.run(checked, operands, call.sequence)
    else:
        _run_on_card(call, checked, operands)
    return out, lse


def _run_on_card(call: Call, checked: CheckedCall, operands: Operands) -> None:
    """Launch, and keep the launches for the next call like this one."""
    device = operands.q.get_device()
    with contextlib.nullcontext() if cuda.current_device() == device else torch.cuda.device(device):
        fitting = fitted(operands)
        bound = launch_all(list_launches(checked, fitting, call.sequence), device)
        hand_over(fitting, operands)
        call_cache.remember(call, checked, fitting, bound)
