"""Calls that neither kernels nor the reference compute here: those on DTensors, and those that torch records."""

from __future__ import annotations

import torch
from torch import Tensor

from warpattn.problem import Call
from warpattn.problem.backends import Backend
from warpattn.sequences import Dense
from warpattn.torch_modes import is_fake, is_recorded

DENSE = Dense()  # without scales

Result = Tensor | tuple[Tensor, Tensor]


def attend_otherwise(call: Call, backend: str | Backend) -> Result | None:
    """Return the result of a dense call on DTensors, or of one that torch records: an operator; None for others.

    backend: that of the call, as the user gave it.
    """
    if type(call.q).__module__ == "torch.distributed.tensor" and call.sequence is DENSE:
        from warpattn.distributed import tensors  # imports torch.distributed

        return tensors.attend(call, backend)
    if not is_recorded() and not is_fake(call.q):
        return None
    if torch.compiler.is_compiling():
        from warpattn.runtime.torch_op import tracing  # imports torch._dynamo

        return tracing.attend(call)
    from warpattn.runtime.torch_op import operators  # registers them, which takes milliseconds

    return operators.attend(call)
