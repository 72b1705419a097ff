"""Tensor maps of queries and outputs, which are copied in boxes of tokens and heads (packed_rows.py)."""

from __future__ import annotations

from torch import Tensor

from warpattn.problem.launch import TensorMap

from ...nvidia.clipped_map import ClippedMap, clipped_maps
from .config import SM90Config


def query_maps(x: Tensor, config: SM90Config, widths: tuple[int, ...]) -> tuple[Tensor | TensorMap, ...]:
    """The maps of a dense x (batch, rows, heads, dim), one for each of `widths`."""
    if config.fills_rows:
        return (x,) * len(widths)
    row = 8 * -(-x.shape[-1] // 8)  # a stride that maps take, for dimensions of one element
    strides = tuple([stride if size > 1 else row for size, stride in zip(x.shape, x.stride(), strict=True)])
    boxes = [(1, config.wg_tokens, config.packed, cols) for cols in widths]
    return tuple([_in_tile(TensorMap(x, box, tuple(x.shape), strides), config) for box in boxes])


def clipped_query_maps(name: str, x: Tensor, config: SM90Config, widths: tuple[int, ...]) -> ClippedMap:
    """The `ClippedMap` of ragged or equally long sequences, see `clipped_map`."""
    clipped = clipped_maps(name, x, config.wg_tokens, widths, config.packed)
    return clipped if config.fills_rows else clipped._replace(map=tuple([_in_tile(one, config) for one in clipped.map]))


def _in_tile(one: TensorMap, config: SM90Config) -> TensorMap:
    """The map, for a tile of more rows than its box."""
    *outer, _, _, cols = one.box
    return one._replace(box=(*outer, config.rows, config.box_heads, cols), copied=one.box)
