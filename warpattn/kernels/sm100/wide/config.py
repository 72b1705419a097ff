"""WideConfig: the shape of the Blackwell kernel for head dims above 128, as a value, and its choice for a problem.

The output of 128 rows and 256 columns takes half of tensor memory, that of 512 columns all of it: then tiles have 64
rows, which take 16 lanes of every 32, and two blocks of 256 columns. Tiles of keys and of values take the slots of one
ring in the order in which the tensor core reads them:

      head dims   rows × keys   queries   slots of K or V   P        tensor memory: O + S
      to 256      128 × 64      64 KiB    4 of 32 KiB       16 KiB   256 + 64 columns
      to 512       64 × 32      64 KiB    4 of 32 KiB        4 KiB   256 + 32 columns

Nothing in this file imports Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

from warpattn.kernels.topology import Edge
from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.launch import DEFAULT_OPTIONS, Choice, PlanOptions

from ..rounding import align_up
from ..tile import TileConfig, choice_of

NARROW = 128  # columns of heads that the prefill kernels take
BLOCK = 256  # columns of a box, and of an accumulator


@dataclass(frozen=True)
class WideConfig(TileConfig):
    """Queries, keys and values in blocks of 256 columns."""

    stages: int = 4

    @property
    def half(self) -> int:
        """Columns of a block."""
        return BLOCK

    @property
    def k_blocks(self) -> int:
        """Blocks of queries and keys."""
        return -(-self.dim_qk // BLOCK)

    @property
    def v_blocks(self) -> int:
        """Blocks of values."""
        return -(-self.dim_v // BLOCK)

    @property
    def blocks(self) -> int:
        """Blocks of a slot."""
        return max(self.k_blocks, self.v_blocks)

    @property
    def query_columns(self) -> int:
        return self.k_blocks * BLOCK

    @property
    def padded_ov_depth(self) -> int:
        return self.v_blocks * BLOCK

    @property
    def block_bytes(self) -> int:
        """Of a block of a key tile."""
        return self.element.bytes * self.BN * BLOCK

    @property
    def ring(self) -> Edge:
        return Edge("K and V", "load", ("mma",), self.stages, self.blocks * self.block_bytes)


def is_wide(problem: Problem) -> bool:
    """Whether head dims are above those of the prefill kernels."""
    return max(problem.dim_qk, problem.dim_v) > NARROW


def wide_config(problem: Problem) -> WideConfig:
    """The configuration for a problem's head dims and pages."""
    rows, keys = (128, 64) if max(problem.dim_qk, problem.dim_v) <= BLOCK else (64, 32)
    return WideConfig(problem.element, problem.dim_qk, problem.dim_v, rows, keys, page_size=problem.page_size)


def choose_wide(problem: Problem, target: Arch, options: PlanOptions = DEFAULT_OPTIONS) -> Choice:
    """The choice for head dims above 128."""
    config = wide_config(problem)
    why = f"head dims above {NARROW}: one tile of {config.BM} rows, heads of a group side by side; its output of"
    why = f"{why} {align_up(config.dim_v, BLOCK)} columns takes half of tensor memory"
    return choice_of("wide", problem, config, target, why, options)
