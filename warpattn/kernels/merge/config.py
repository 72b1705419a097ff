"""Compile-time parameters and argument tuples of the merge kernel. Nothing here imports Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from warpattn.kernels.cache.config import Rows


@dataclass(frozen=True)
class MergeConfig:
    """What the kernel is compiled for."""

    states: int
    dim: int  # of the outputs' heads
    rows: int  # of a program: one head of one token each
    run: int  # elements, of which strides of outputs are multiples
    limited: bool  # whether a number in memory says how many tokens count


class State(NamedTuple):
    """Outputs (sequence, token, head, dim) and their LSE (sequence, token, head)."""

    out: Rows
    lse: Rows  # strides in elements


class MergeShape(NamedTuple):
    """Sizes, int32."""

    count: Any  # rows: sequences * tokens * heads
    tokens: Any  # of a sequence
    heads: Any
