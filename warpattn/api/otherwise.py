"""Calls that neither kernels nor the reference compute here: on DTensors, or recorded or seen by torch's modes."""

from __future__ import annotations

import torch
from torch import Tensor

from warpattn.errors import Rules
from warpattn.problem import Call, rules
from warpattn.problem.backends import Backend
from warpattn.sequences import Dense
from warpattn.torch_modes import is_fake, is_recorded

DENSE = Dense()  # without scales

Result = Tensor | tuple[Tensor, Tensor]


def attend_otherwise(call: Call, backend: str | Backend) -> Result | None:
    """Return the result of a dense call on DTensors, or of one that torch records: an operator; None for others.
    Modes that only look on, such as FLOP counters, would not see kernels, so these are operators, too.

    backend: that of the call, as the user gave it.
    """
    if type(call.q).__module__ == "torch.distributed.tensor" and call.sequence is DENSE:
        from warpattn.distributed import tensors  # imports torch.distributed

        return tensors.attend(call, backend)
    if not (is_recorded() or is_fake(call.q) or _hides_kernels(call)):
        return None
    if torch.compiler.is_compiling():
        from warpattn.runtime.torch_op import tracing  # imports torch._dynamo

        return tracing.attend(call)
    from warpattn.runtime.torch_op import operators  # registers them, which takes 0.3 s

    return operators.attend(call)


def _hides_kernels(call: Call) -> bool:
    if not torch._C._len_torch_dispatch_stack():
        return False
    return rules.choose_backend(Rules(), call.backend, call.q) not in (None, "reference")
