"""Host side of `clipped_rows`: makes the tensor map for sequences that TMA clips at their own ends."""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.problem.launch import TensorMap

ROWS = 1 << 30  # extent of the row dimension, as in `clipped_rows`
EXTENT = (1 << 31) - (1 << 16)  # extent of the outer dimensions
WRAP = 1 << 34  # elements; times ROWS it is a multiple of 2**64 bytes


class ClippedMap(NamedTuple):
    """The kernel argument for a `ClippedRows` or `ClippedColumns`."""

    map: Any  # a tuple of maps for a `ClippedColumns`
    step: Any  # offsets from one start to the next, int32
    unit: Any  # offsets from one row to the next, int32


def clipped_map(name: str, x: Tensor, rows: int, cols: int, heads: int = 1) -> ClippedMap:
    """The argument for x (rows, heads, dim) or (starts, rows, heads, dim); a box has `rows` x `heads` x `cols`.

    Every stride but the last must be a multiple of 8 elements, the last one 1. AttentionError if the rows are so
    far apart that 31 bits cannot count them.
    """
    start, row, head = _strides(x)
    offset = gcd(start, row)
    starts = x.shape[0] if x.ndim == 4 else x.shape[0] + 1
    last = (starts - 1) * (start // offset) + (x.shape[1] if x.ndim == 4 else 0) * (row // offset)
    if last >= EXTENT:
        what = f"{name} has shape {tuple(x.shape)} and strides {x.stride()}, which is {last} steps of {offset} elements"
        raise AttentionError(f"{what}; tensor maps count fewer than {EXTENT}, so its strides must fit better")
    shape = (EXTENT, EXTENT, ROWS, x.shape[-2], x.shape[-1])
    strides = (WRAP - row, offset, row, head, 1)
    return ClippedMap(TensorMap(x, (1, 1, rows, heads, cols), shape, strides), start // offset, row // offset)


def clipped_maps(name: str, x: Tensor, rows: int, widths: tuple[int, ...], heads: int = 1) -> ClippedMap:
    """The argument for a `ClippedColumns`: as `clipped_map`, with a map for each of `widths`."""
    every = [clipped_map(name, x, rows, cols, heads) for cols in widths]
    return every[0]._replace(map=tuple(one.map for one in every))


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of starts, rows and heads in elements; for a dimension of size 1, a number that suits the others."""
    packed = 8 * -(-x.shape[-1] // 8)
    head = x.stride(-2) if x.shape[-2] > 1 else packed
    if x.ndim == 3:
        row = x.stride(0) if x.shape[0] > 1 else packed
        return row, row, head
    row = x.stride(1) if x.shape[1] > 1 else (x.stride(0) if x.shape[0] > 1 else packed)
    return x.stride(0) if x.shape[0] > 1 else row, row, head
