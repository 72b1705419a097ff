"""Compile-time parameters and argument tuples of the append kernel. Nothing here imports Triton."""

from dataclasses import dataclass
from typing import Any, NamedTuple

HEADS = 8  # of a program


@dataclass(frozen=True)
class Rotation:
    """Rotation of keys: of the first `dim` elements, in pairs next to each other or half a rotation apart."""

    dim: int
    interleaved: bool


class Rows(NamedTuple):
    """Pages (page, row, head, dim) or new tokens (sequence, token, head, dim): strides in elements, int64."""

    pointer: Any
    outer: Any  # from one page or sequence to the next
    row: Any
    head: Any


class Table(NamedTuple):
    """A matrix of page numbers, cosines or sines: its row stride in elements, int64."""

    pointer: Any
    stride: Any


class AppendShape(NamedTuple):
    """Sizes, int32."""

    tokens: Any  # new tokens of a sequence
    heads: Any
    pages: Any  # of the cache
    page_size: Any
    table_pages: Any  # pages of a table row
