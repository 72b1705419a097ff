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

from dataclasses import dataclass, replace

from warpattn.kernels.topology import Edge, Signal, Topology
from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.element import Element
from warpattn.problem.launch import DEFAULT_OPTIONS, Choice, PlanOptions
from warpattn.problem.operands import COPY_RULE

from ..config import align_up
from ..mla.config import INVARIANT, ROLES
from ..prefill_1q.config import KEYS_PER_PART, SPLITS

NARROW = 128  # columns of heads that the prefill kernels take
BLOCK = 256  # columns of a box, and of an accumulator
STAGES = 4


@dataclass(frozen=True)
class WideConfig:
    """Tiles of one compiled kernel: `BM` rows (tokens × heads of a group) against `BN` keys at a time."""

    element: Element  # of queries, keys and the output
    dim_qk: int
    dim_v: int
    BM: int
    BN: int
    page_size: int = 0  # 0: not paged
    splitk_partitions: int = 1
    stages: int = STAGES

    @property
    def eight_bit(self) -> None:
        """Of keys and values: they have 16."""

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
    def padded_ov_depth(self) -> int:
        return self.v_blocks * BLOCK

    @property
    def box_rows(self) -> int:
        """Keys of one box: the largest power of two that divides both a tile and a page."""
        return min(self.page_size & -self.page_size, self.BN) if self.page_size else self.BN

    @property
    def block_bytes(self) -> int:
        """Of a block of a key tile."""
        return self.element.bytes * self.BN * BLOCK

    @property
    def topology(self) -> Topology:
        """Roles, ring and signals of a CTA; queries and P are beside the ring."""
        ring = Edge("K and V", "load", ("mma",), self.stages, self.blocks * self.block_bytes)
        attend, mma = (("attend",),), (("mma",),)
        signals = (Signal("q", attend), Signal("s", mma), Signal("p", attend), Signal("o", mma))
        private = self.element.bytes * self.BM * (self.k_blocks * BLOCK + self.BN)
        return Topology(ROLES, (ring,), private, signals)

    @property
    def smem_used(self) -> int:
        return self.topology.smem_bytes

    @property
    def tmem_used(self) -> int:
        """Columns; an allocation is a power of two of them. 64 rows of two columns take one."""
        return self.padded_ov_depth * self.BM // 128 + self.BN


def is_wide(problem: Problem) -> bool:
    """Whether head dims are above those of the prefill kernels."""
    return max(problem.dim_qk, problem.dim_v) > NARROW


def wide_config(problem: Problem) -> WideConfig:
    """The configuration for a problem's head dims and pages."""
    rows, keys = (128, 64) if max(problem.dim_qk, problem.dim_v) <= BLOCK else (64, 32)
    return WideConfig(problem.element, problem.dim_qk, problem.dim_v, rows, keys, problem.page_size)


def choose_wide(problem: Problem, target: Arch, options: PlanOptions = DEFAULT_OPTIONS) -> Choice:
    """The choice for head dims above 128; for ragged batches the grid is that of one sequence with all queries."""
    config = wide_config(problem)
    tiles = max(1, row_tiles(problem, problem.seq_q, config))
    ctas = tiles * problem.heads_kv * problem.batch
    fits = (p for p in SPLITS if ctas * p <= target.processors and problem.seq_k >= KEYS_PER_PART * p)
    parts = 1 if options.batch_invariant or problem.kind == "ragged" else next(fits, 1)
    config = replace(config, splitk_partitions=parts)

    def lines() -> tuple[str, ...]:
        return (
            f"tile {config.BM} x {config.BN}, ring of {config.stages} slots, {config.smem_used} bytes of shared "
            f"memory, {config.tmem_used} columns of tensor memory",
            f"grid {tiles * parts} x {problem.heads_kv} x {problem.batch}, the keys of a tile in {parts} parts",
        )

    why = f"head dims above {NARROW}: one tile of {config.BM} rows, heads of a group side by side; its output of"
    why = f"{why} {align_up(config.dim_v, BLOCK)} columns takes half of tensor memory"
    split = INVARIANT if options.batch_invariant else f"{ctas} tiles on {target.processors} SMs, {parts} CTAs for each"
    grid = (tiles * parts, problem.heads_kv, problem.batch)
    return Choice("wide", config, grid, lines, (why, split, COPY_RULE), partitions=parts)


def row_tiles(problem: Problem, queries: int, config: WideConfig) -> int:
    """Row tiles of a key head with so many queries."""
    return -(-queries * (problem.heads_q // problem.heads_kv) // config.BM)
