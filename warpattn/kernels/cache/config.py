"""Compile-time parameters and argument tuples of the append kernels. Nothing here imports Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from warpattn.problem.argument_types import Int64

TILE_BYTES = 8192  # bytes of K, and of V, that a program copies: four 16-byte loads a thread
ROWS = (4, 64)  # least and most rows of a program
VECTOR = 16  # bytes of a load where all rows start at multiples of it


@dataclass(frozen=True)
class Rotation:
    """Rotation of keys: of the first `dim` elements, in pairs next to each other or half a rotation apart."""

    dim: int
    interleaved: bool


@dataclass(frozen=True)
class EightBitPages:
    """Pages of 8-bit values: their largest one, and what the scales of keys and values belong to. Those of tokens and
    of blocks of their columns are computed and written."""

    largest: float
    scales: tuple[str | int | None, ...]


@dataclass(frozen=True)
class AppendConfig:
    """What both append kernels are compiled for."""

    dims: tuple[int, ...]  # head dims of keys and values; of keys alone
    rows: int  # rows of a program: one head of one token each
    run: int  # elements, of which strides are multiples
    rotation: Rotation | None
    eight_bit: EightBitPages | None = None


class Rows(NamedTuple):
    """Pages (page, row, head, dim) or new tokens (sequence, token, head, dim): strides in runs of elements."""

    pointer: Any
    outer: Int64  # from one page or sequence to the next
    row: Int64
    head: Int64


class BlockScales(NamedTuple):
    """Scales (page, row, head, block of columns) with their strides."""

    pointer: Any  # float*
    outer: Int64
    row: Int64
    head: Int64
    block: Int64


class ScaledRows(NamedTuple):
    """Pages of 8-bit values: as `Rows`, then their scales, `Rows` of floats (a stride is 0 where they have no such
    dimension) or `BlockScales`."""

    pointer: Any
    outer: Int64
    row: Int64
    head: Int64
    scale: Rows | BlockScales


class Table(NamedTuple):
    """A matrix of page numbers, cosines or sines: its row stride in elements."""

    pointer: Any
    stride: Int64


class TableArgs(NamedTuple):
    """What gives new tokens their places: the block table, and lengths that include them."""

    table: Table
    lengths: Any  # int32*


class SlotArgs(NamedTuple):
    """Places by slots; positions, which rotation reads, may be None."""

    slots: Any  # int32* or int64*
    positions: Any  # int32* or int64*


class AppendShape(NamedTuple):
    """Sizes, int32."""

    count: Any  # rows of all new tokens: sequences * tokens * heads
    tokens: Any  # new tokens of a sequence
    heads: Any
    pages: Any  # of the cache
    page_size: Any
    table_pages: Any  # pages of a table row; unused with slots


def rows_of_program(dims: tuple[int, ...], size: int) -> int:
    """Rows that a program copies, for elements of `size` bytes."""
    width = 1 << (max(dims) - 1).bit_length()
    least, most = ROWS
    return max(least, min(most, TILE_BYTES // (width * size)))
