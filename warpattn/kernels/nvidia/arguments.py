"""What launches of NVIDIA kernels hand to them as named tuples, see `StridedRows`, and the types of such tuples.
Nothing here imports Triton."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from warpattn.problem.argument_types import Int64
from warpattn.problem.operands import run_strides

Fields = TypeVar("Fields", bound=tuple)


class StridedRows(NamedTuple):
    """A tensor (batch or page, token or row, head, dim): its strides, but the last, in runs of 8 elements."""

    pointer: Any
    outer: Int64  # from one batch entry or page to the next
    row: Int64  # from one token or row to the next
    head: Int64


def strided(x: Tensor) -> StridedRows:
    """The argument for a tensor; its last stride is 1. Rows of ragged sequences (row, head, dim) have no outer one."""
    return StridedRows(x, *[0] * (4 - x.ndim), *run_strides(x))


def strided_types(pointer: str) -> StridedRows:
    """The types of such an argument, for a Triton type `pointer`."""
    return StridedRows(pointer, "i64", "i64", "i64")


def int32_fields(fields: type[Fields]) -> Fields:
    """The types of an argument whose fields are all int32."""
    return fields(*["i32"] * len(fields._fields))  # type: ignore[attr-defined]
