"""What torch does around a call: records it (then a launch would be lost, and tensors may have no values), or casts
its tensors, in regions of torch.autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

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


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which products have the dtype of their operands, also within a region of torch.autocast. There
    `torch.cat` and its like fail, too, for 16-bit tensors of another type than the region's."""
    region = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if region else nullcontext()


def autocast(x: Any) -> Any:
    """Return x in the dtype of the autocast region, if there is one and x is a floating-point tensor below fp64."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64 or x.device.type == "meta":
        return x
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
