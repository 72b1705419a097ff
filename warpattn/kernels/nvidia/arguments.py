"""Named tuples that launches of NVIDIA kernels pass to them as arguments. This file imports no Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from warpattn.problem.argument_types import Int64
from warpattn.problem.operands import run_strides


class StridedRows(NamedTuple):
    """A tensor (batch or page, token or row, head, dim); strides, except the last, are in runs of 8 elements."""

    pointer: Any
    outer: Int64  # from one batch entry or page to the next
    row: Int64  # from one token or row to the next
    head: Int64


class LatentQueryArgs(NamedTuple):
    """Queries of latent attention in two tensors: latent and rotary columns."""

    latent: Any
    rope: Any


class CombineShape(NamedTuple):
    """Rows of the workspace's parts, and the problem that they belong to, int32."""

    rows: Any
    seq_q: Any
    heads_q: Any
    dim_v: Any
    parts: Any


class ListedArgs(NamedTuple):
    """The tile list of `scheduler_varlen`: only parts of its row tiles are combined."""

    pointer: Any
    tokens: Any  # tokens of a row tile, int32
    row_unit: Any  # tokens per unit of a record's start, int32: 1 for packed sequences, else those of a sequence


class CombinedArgs(NamedTuple):
    """The output (batch, token, head, dim), and its strides, int32."""

    pointer: Any
    batch: Any
    token: Any
    head: Any


class UsedRows(NamedTuple):
    """Offsets of sequences packed end to end, and their number; rows after the last sequence are padding."""

    batch: Any  # int32
    cu_q: Any


class StridedArgs(NamedTuple):
    """A (batch, token, head) array in memory, and its strides."""

    pointer: Any
    batch: Int64
    token: Int64
    head: Int64


def query_pointers(q: Any) -> tuple[str, ...]:
    """Paths of the pointers of the argument `q`."""
    return ("q.latent.pointer", "q.rope.pointer") if isinstance(q, LatentQueryArgs) else ("q.pointer",)


def strided(x: Tensor) -> StridedRows:
    """The argument for a tensor; its last stride is 1. Rows of ragged sequences (row, head, dim) have no outer one."""
    return StridedRows(x, *[0] * (4 - x.ndim), *run_strides(x))
