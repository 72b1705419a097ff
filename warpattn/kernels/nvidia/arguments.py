"""What launches of NVIDIA kernels hand to them as named tuples, see `StridedRows`. Nothing here imports Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from warpattn.problem.argument_types import Int64
from warpattn.problem.operands import run_strides


class StridedRows(NamedTuple):
    """A tensor (batch or page, token or row, head, dim): its strides, but the last, in runs of 8 elements."""

    pointer: Any
    outer: Int64  # from one batch entry or page to the next
    row: Int64  # from one token or row to the next
    head: Int64


class LatentQueryArgs(NamedTuple):
    """Queries of latent attention in two tensors, each as a kernel takes one."""

    latent: Any
    rope: Any


def query_pointers(q: Any) -> tuple[str, ...]:
    """Paths of the pointers of the argument `q`."""
    return ("q.latent.pointer", "q.rope.pointer") if isinstance(q, LatentQueryArgs) else ("q.pointer",)


def strided(x: Tensor) -> StridedRows:
    """The argument for a tensor; its last stride is 1. Rows of ragged sequences (row, head, dim) have no outer one."""
    return StridedRows(x, *[0] * (4 - x.ndim), *run_strides(x))
