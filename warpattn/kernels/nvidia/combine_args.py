"""Runtime arguments of the kernel that combines parts, by name; the defaults are their types in a signature."""

from typing import Any, NamedTuple


class CombineShape(NamedTuple):
    """Rows of the workspace's parts, and the problem that they belong to; the defaults are Triton's types."""

    rows: Any = "i32"
    seq_q: Any = "i32"
    heads_q: Any = "i32"
    dim_v: Any = "i32"
    parts: Any = "i32"


class ListedArgs(NamedTuple):
    """The tile list of `scheduler_varlen`, of whose row tiles alone parts are combined; the defaults are Triton's
    types."""

    pointer: Any = "*i32"
    tokens: Any = "i32"  # of a row tile
    row_unit: Any = "i32"  # tokens of a start: 1 where sequences lie end to end, else those of a sequence


class UsedRows(NamedTuple):
    """Offsets of sequences laid end to end, and how many there are; rows after the last one are padding."""

    batch: Any = "i32"
    cu_q: Any = "*i32"


class StridedArgs(NamedTuple):
    """A (batch, token, head) array in global memory, and its strides; the defaults are Triton's types."""

    pointer: Any
    batch: Any = "i64"
    token: Any = "i64"
    head: Any = "i64"
