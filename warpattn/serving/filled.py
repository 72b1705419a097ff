"""Results that drop-ins write into tensors of their callers."""

from __future__ import annotations

import torch
from torch import Tensor

from warpattn.errors import Rules
from warpattn.problem.memory import overlap, overlaps_itself, overwrite


def require_own(named: dict[str, Tensor], apart: dict[str, Tensor] | None = None) -> None:
    """Raise AttentionError unless each of the tensors can hold a result: no gradient, a place for each element, no
    memory in common with those of `apart`, which are read or written, too."""
    rules = Rules()
    for name, x in named.items():
        what = f"{name} has shape {tuple(x.shape)} and strides {x.stride()}"
        rules.require(not overlaps_itself(x), what, "each of its elements must have its own place in memory")
        grad = x.requires_grad and torch.is_grad_enabled()
        rules.require(not grad, f"{name} requires a gradient", "it is overwritten: use torch.no_grad()")
        for other, read in (apart or {}).items():
            rules.require(not overlap(x, read), f"{name} shares memory with {other}", "it must have memory of its own")
    rules.done()


def fill(x: Tensor, result: Tensor) -> Tensor:
    """Copy a result into a caller's tensor and return it."""
    return x.copy_(result) if torch.compiler.is_compiling() else overwrite(x, result)
