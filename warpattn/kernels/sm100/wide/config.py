"""WideConfig: the shape of the Blackwell kernel for head dims above 128, as a value, and its choice for a problem.

The output of 128 rows and 256 columns takes half of tensor memory, that of 512 columns all of it: then tiles have 64
rows, which take 16 lanes of every 32, and two blocks of 256 columns. Tiles of keys and of values take the slots of one
ring in the order in which the tensor core reads them:

      head dims   rows × keys   queries   slots of K or V   P        tensor memory: O + S
      to 256      128 × 64      64 KiB    4 of 32 KiB       16 KiB   256 + 64 columns
      to 512       64 × 32      64 KiB    4 of 32 KiB        4 KiB   256 + 32 columns

Keys and values of 8 bits become tiles of 16 (convert.py): two tiles of 8 bits take the place of a slot.

Nothing in this file imports Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from warpattn.kernels.topology import Edge
from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.launch import DEFAULT_OPTIONS, Choice, PlanOptions
from warpattn.problem.scales import eight_bit_of

from ..prefill_2q.config import CONVERTED, SCALED
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
        """Bytes of a block of a key tile in memory."""
        return self.stored.bytes * self.BN * BLOCK

    @property
    def staged_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def scale_slots(self) -> int:
        """One: a tile's scales have the time of a tile of the other operand."""
        return 1

    def scale_blocks(self, operand: str) -> int:
        if self.eight_bit is None or not self.eight_bit.of_token(operand):
            return 0
        return self.eight_bit.blocks(operand, self.dim_qk if operand == "k" else self.dim_v)

    def shared_columns(self, operand: str) -> int:
        """Columns of a token of "k" or "v" with one scale, beside those that fill its last block up."""
        per = self.eight_bit.columns(operand) if self.eight_bit is not None else 0
        return per or self.blocks * BLOCK

    @property
    def ring(self) -> Edge:
        return Edge("K and V", "load", ("mma",), self.stages, self.blocks * self.element.bytes * self.BN * BLOCK)


def is_wide(problem: Problem) -> bool:
    """Whether head dims are above those of the prefill kernels."""
    return max(problem.dim_qk, problem.dim_v) > NARROW


def wide_config(problem: Problem) -> WideConfig:
    """The configuration for a problem's head dims and pages."""
    rows, keys = (128, 64) if max(problem.dim_qk, problem.dim_v) <= BLOCK else (64, 32)
    config = WideConfig(problem.element, problem.dim_qk, problem.dim_v, rows, keys, page_size=problem.page_size)
    bits = eight_bit_of(problem)
    return config if bits is None else replace(config, eight_bit=bits, stages=config.stages - 1)


def choose_wide(problem: Problem, target: Arch, options: PlanOptions = DEFAULT_OPTIONS) -> Choice:
    """Chooses for head dims above 128."""
    config = wide_config(problem)
    why = f"head dims above {NARROW}: one tile of {config.BM} rows, heads of a group side by side; its output of"
    why = f"{why} {align_up(config.dim_v, BLOCK)} columns takes half of tensor memory"
    choice = choice_of("wide", problem, config, target, why, options)
    bits = config.eight_bit
    changes = () if bits is None else (CONVERTED, SCALED) if bits.by_token else (CONVERTED,)
    return replace(choice, reasons=(*choice.reasons, *changes))
