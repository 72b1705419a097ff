"""What torch's own attention does in a torch.autocast region, for the functions that stand in for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def autocast(x: Any) -> Any:
    """Return x in the dtype of the autocast region, if there is one and x is a floating-point tensor below fp64."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64 or x.device.type == "meta":
        return x
    kind = x.device.type
    inside = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # not for "meta"
    return x.to(torch.get_autocast_dtype(kind)) if inside else x
