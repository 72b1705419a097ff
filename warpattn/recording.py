"""Whether torch records what a call does: then a launch would be lost, and tensors may have no values."""

from __future__ import annotations

import torch

_MODE = torch._C._TorchDispatchModeKey
_RECORDERS = (_MODE.PROXY, _MODE.FAKE, _MODE.FUNCTIONAL)


def is_recorded() -> bool:
    """Whether torch records operations: torch.compile, torch.export, `make_fx`, `FakeTensorMode`."""
    if torch.compiler.is_compiling():
        return True
    some = torch._C._len_torch_dispatch_stack() > 0  # also of modes that only look on, such as `FlopCounterMode`
    return some and any(torch._C._get_dispatch_mode(key) is not None for key in _RECORDERS)


def is_fake(value: object) -> bool:
    """Whether `value` is one of torch's tensors without values, which need no mode around them."""
    return type(value).__module__.startswith("torch._subclasses.")
