"""Which way a call goes: remembered launch, or rules and then the reference or a kernel.

planned.recall -> examine -> reference | simulated.run | launch.run or dispatch.run -> planned.remember
"""

from __future__ import annotations

import torch
from torch import Tensor

from warpattn.masks import Mask
from warpattn.problem import Call, CheckedCall, validate
from warpattn.problem.operands import Operands
from warpattn.reference import reference
from warpattn.runtime import call_cache, dense_launch, execute
from warpattn.runtime.call_cache import Inputs, Options, Result
from warpattn.scores import Score
from warpattn.sequences import Dense

__all__ = ["dense", "general"]

DENSE = Dense()


def dense(inputs: Inputs, mask: Mask | None, score: Score | None, options: Options) -> Result:
    """Attention of a dense batch: (q, k, v, sinks, out), mask, score, (scale, return_lse, backend)."""
    result = call_cache.recall(inputs, mask, score, options)
    if result is not None:
        return result
    q, k, v, sinks, out = inputs
    scale, return_lse, backend = options
    call = Call(q, k, v, DENSE, mask, score, sinks, scale, return_lse, out, backend)
    checked = validate(call)
    if checked.backend == "reference":
        return _result(call, *_run_reference(call, checked))
    return _run_kernel(call, checked)


def general(call: Call) -> Result:
    """Attention of any sequence kind."""
    inputs, options = (call.q, call.k, call.v, call.sinks, call.out), (call.scale, call.return_lse, call.backend)
    result = call_cache.recall(inputs, call.mask, call.score, options, call.sequence)
    if result is not None:
        return result
    checked = validate(call)
    return (
        _result(call, *_run_reference(call, checked)) if checked.backend == "reference" else _run_kernel(call, checked)
    )


def _result(call: Call, out: Tensor, lse: Tensor | None) -> Result:
    return (out, lse) if call.return_lse and lse is not None else out


def _run_reference(call: Call, checked: CheckedCall) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    out, lse = reference(
        call.q,
        call.k,
        call.v,
        sequence=call.sequence,
        mask=call.mask,
        score=call.score,
        sinks=call.sinks,
        scale=checked.scale,
        dtype=dtype,
    )
    return (out.to(call.q.dtype) if call.out is None else call.out.copy_(out)), lse


def _run_kernel(call: Call, checked: CheckedCall) -> Result:
    q = call.q
    out = q.new_empty((*q.shape[:-1], checked.problem.dim_v)) if call.out is None else call.out
    lse = q.new_empty(checked.lse_shape, dtype=torch.float32) if call.return_lse else None
    operands = Operands(q, call.k, call.v, out, lse, call.sinks)
    if checked.backend.startswith("simulate:"):
        from warpattn.runtime import simulate  # imports NumPy and Triton

        simulate.run(checked, operands, call.sequence)
    elif dense_launch.launches_dense(checked):
        dense_launch.run(checked, operands)
        call_cache.remember(call, checked, out, lse)
    else:
        execute.run(checked, operands, call.sequence)
        call_cache.remember(call, checked, out, lse)
    return _result(call, out, lse)
