"""LatentConfig: the shape of the Blackwell decode kernel for latent attention (MLA, absorbed), as a value.

A token's key is [latent 512 | rotary 64] and its value the latent again. With 128 rows the output would fill tensor
memory; 64 rows take 16 lanes of every 32, so that the output's 512 columns take 256 and scores fit:

      shared memory   queries 64 × 576: 72 KiB, P 8 KiB, key tiles 64 × 576: 72 KiB a slot, two slots: 224 of 227 KiB
      tensor memory   O 64 × 512: 256 columns, S 64 × 64: 64 columns, of 512

Nothing in this file imports Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from warpattn.kernels.topology import Edge, Role, Signal, Topology
from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.element import Element
from warpattn.problem.launch import DEFAULT_OPTIONS, Choice, PlanOptions
from warpattn.problem.operands import COPY_RULE

from ..prefill_1q.config import KEYS_PER_PART, SPLITS

INVARIANT = "one part, so that a sequence's sums are in the same order whatever else is in the batch"
# Attend has the registers that the others leave over.
ROLES = (Role("attend", 4, 256), Role("mma", 1, 48), Role("load", 1, 168))


@dataclass(frozen=True)
class LatentConfig:
    """Tiles of one compiled kernel: `BM` rows (tokens × heads of a group) against `BN` keys at a time."""

    element: Element  # of queries, keys and the output
    dim_qk: int
    dim_v: int
    page_size: int = 0  # 0: not paged
    splitk_partitions: int = 1
    BM: int = 64
    BN: int = 64
    stages: int = 2

    @property
    def eight_bit(self) -> None:
        """Of keys in memory: latents have 16 bits."""
        return None

    @property
    def half(self) -> int:
        """Columns of a block of latents: no box has more than 256."""
        return self.dim_v // 2

    @property
    def rope(self) -> int:
        """Columns of the rotary part."""
        return self.dim_qk - self.dim_v

    @property
    def padded_ov_depth(self) -> int:
        return self.dim_v

    @property
    def box_rows(self) -> int:
        """Keys of one box: the largest power of two that divides both a tile and a page."""
        return min(self.page_size & -self.page_size, self.BN) if self.page_size else self.BN

    @property
    def tile_bytes(self) -> int:
        """Of a key tile."""
        return self.element.bytes * self.BN * self.dim_qk

    @property
    def topology(self) -> Topology:
        """Roles, ring and signals of a CTA; queries and P are beside the ring."""
        ring = Edge("keys", "load", ("mma",), self.stages, self.tile_bytes)
        attend, mma = (("attend",),), (("mma",),)
        signals = (Signal("q", attend), Signal("s", mma), Signal("p", attend), Signal("o", mma))
        return Topology(ROLES, (ring,), self.element.bytes * self.BM * (self.dim_qk + self.BN), signals)

    @property
    def smem_used(self) -> int:
        return self.topology.smem_bytes

    @property
    def tmem_used(self) -> int:
        """Columns; an allocation is a power of two of them."""
        return self.dim_v // 2 + self.BN


def choose_latent(problem: Problem, target: Arch, options: PlanOptions = DEFAULT_OPTIONS) -> Choice:
    """The choice for latent attention of a few tokens over dense or paged keys."""
    config = LatentConfig(problem.element, problem.dim_qk, problem.dim_v, problem.page_size)
    tiles = -(-problem.seq_q * problem.heads_q // problem.heads_kv // config.BM)
    ctas = tiles * problem.heads_kv * problem.batch
    fits = (p for p in SPLITS if ctas * p <= target.processors and problem.seq_k >= KEYS_PER_PART * p)
    parts = 1 if options.batch_invariant else next(fits, 1)
    config = replace(config, splitk_partitions=parts)

    def lines() -> tuple[str, ...]:
        return (
            f"tile {config.BM} x {config.BN}, ring of {config.stages} slots, {config.smem_used} bytes of shared "
            f"memory, {config.tmem_used} columns of tensor memory",
            f"grid {tiles * parts} x {problem.heads_kv} x {problem.batch}, the keys of a tile in {parts} parts",
        )

    once = "64 rows, of 16 lanes in 32: the output's 512 columns take half of tensor memory, so scores fit"
    split = INVARIANT if options.batch_invariant else f"{ctas} tiles on {target.processors} SMs, {parts} CTAs for each"
    grid = (tiles * parts, problem.heads_kv, problem.batch)
    return Choice("mla", config, grid, lines, (once, split, COPY_RULE), partitions=parts)
