"""Compile-time parameters and argument tuples of the quantising kernels. Nothing here imports Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

PROGRAMS = 6 * 132  # that share a tensor: six of four warps with 80 registers a thread on each SM of an H200


@dataclass(frozen=True)
class QuantiseConfig:
    """What the kernels are compiled for."""

    dim: int
    rows: int  # of a tile: one head of so many tokens
    run: int  # elements, of which strides are multiples
    stored_run: int  # the same of values
    per: str  # what a scale belongs to: "tensor", "head" or "token"
    sizes: int  # partial maxima that a scale is made of, or more, a power of two; 0: scales are given, or of tokens
    given: bool  # whether scales are read, not made
    largest: float  # finite number of the 8-bit format
    sequences: bool  # whether rows of different sequences are not as far apart as those of one
    transposed: bool = False  # whether tiles are of one sequence each, and are written transposed, too

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return 1 << (self.dim - 1).bit_length()


class QuantiseShape(NamedTuple):
    """Sizes, int32."""

    count: Any  # tokens of all sequences
    tokens: Any  # of a sequence
    heads: Any
    parts: Any  # programs of a head


def programs_of_head(blocks: int, heads: int) -> int:
    """Programs that share the tiles of a head, where their maxima become one scale."""
    return max(1, min(blocks, PROGRAMS // heads))
