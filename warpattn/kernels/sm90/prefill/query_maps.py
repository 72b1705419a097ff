"""Tensor maps of queries and outputs in boxes of tokens and heads, see packed_rows.py and ../partial_rows.py."""

from __future__ import annotations

from torch import Tensor

from warpattn.problem.launch import TensorMap

from ...nvidia.clipped_map import ClippedMap, clipped_maps
from .config import SM90Config


def query_maps(q: Tensor, out: Tensor, config: SM90Config) -> dict[str, tuple[TensorMap, ...]]:
    """The arguments of a dense launch whose heads do not fill the rows of its tiles."""
    return {"q_maps": _dense(q, config, config.qk_parts), "o_maps": _dense(out, config, config.store_parts)}


def _dense(x: Tensor, config: SM90Config, widths: tuple[int, ...]) -> tuple[TensorMap, ...]:
    """The maps of x (batch, rows, heads, dim), one for each of `widths`."""
    row = 8 * -(-x.shape[-1] // 8)  # a stride that maps take, for dimensions of one element
    strides = tuple([stride if size > 1 else row for size, stride in zip(x.shape, x.stride(), strict=True)])
    boxes = [(1, config.wg_tokens, config.packed, cols) for cols in widths]
    return tuple([_in_tile(TensorMap(x, box, tuple(x.shape), strides), config) for box in boxes])


def clipped_query_maps(name: str, x: Tensor, config: SM90Config, widths: tuple[int, ...]) -> ClippedMap:
    """The `ClippedMap` of ragged or equally long sequences, see `clipped_map`."""
    clipped = clipped_maps(name, x, config.wg_tokens, widths, config.packed)
    if config.rows % config.packed:
        clipped = clipped._replace(map=tuple([_in_tile(one, config) for one in clipped.map]))
    return clipped


def _in_tile(one: TensorMap, config: SM90Config) -> TensorMap:
    """The map, for a tile of more rows than its box."""
    *outer, _, _, cols = one.box
    return one._replace(box=(*outer, config.rows, 1, cols), copied=one.box)
