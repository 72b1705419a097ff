"""Runtime arguments of the kernel that combines parts, by name."""

from typing import Any, NamedTuple

from warpattn.problem.argument_types import Int64


class CombineShape(NamedTuple):
    """Rows of the workspace's parts, and the problem that they belong to, int32."""

    rows: Any
    seq_q: Any
    heads_q: Any
    dim_v: Any
    parts: Any


class ListedArgs(NamedTuple):
    """The tile list of `scheduler_varlen`, of whose row tiles alone parts are combined."""

    pointer: Any
    tokens: Any  # of a row tile, int32
    row_unit: Any  # tokens of a start, int32: 1 where sequences lie end to end, else those of a sequence


class CombinedArgs(NamedTuple):
    """The output (batch, token, head, dim), and its strides, int32."""

    pointer: Any
    batch: Any
    token: Any
    head: Any


class UsedRows(NamedTuple):
    """Offsets of sequences laid end to end, and how many there are; rows after the last one are padding."""

    batch: Any  # int32
    cu_q: Any


class StridedArgs(NamedTuple):
    """A (batch, token, head) array in global memory, and its strides."""

    pointer: Any
    batch: Int64
    token: Int64
    head: Int64
