"""TileConfig: what the Blackwell kernels of one tile a CTA have in common, and their choice for a problem.

A tile's rows are tokens × heads of a group. One load warp fills one ring of key tiles, one MMA warp multiplies, one
warpgroup attends (latent attention: mla/, head dims above 128: wide/).

Nothing in this file imports Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from warpattn.errors import many
from warpattn.kernels.topology import Edge, Role, Signal, Topology
from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.element import Element
from warpattn.problem.launch import DEFAULT_OPTIONS, INVARIANT, Choice, PlanOptions
from warpattn.problem.operands import COPY_RULE
from warpattn.problem.scales import EightBit

from .config import STAGED
from .prefill_1q.config import parts_of_keys

# Attend gets the registers that the others leave.
ROLES = (Role("attend", 4, 256), Role("mma", 1, 48), Role("load", 1, 168))
SCALE_SLOTS = 2  # tiles whose scales are in shared memory where keys are values
CONVERT = Role("convert", 2, 168)  # makes 16-bit tiles of 8-bit ones


@dataclass(frozen=True)
class TileConfig:
    """Tiles of one compiled kernel: `BM` rows (tokens × heads of a group) against `BN` keys at a time."""

    element: Element  # of queries, keys and the output
    dim_qk: int
    dim_v: int
    BM: int
    BN: int
    stages: int  # slots of the ring
    page_size: int = 0  # 0: not paged
    splitk_partitions: int = 1
    eight_bit: EightBit | None = None  # keys and values in memory; None: as `element`
    staged: int = STAGED  # tiles of 8 bits in shared memory

    @property
    def stored(self) -> Element:
        """Element of K and V in memory."""
        return self.element if self.eight_bit is None else self.eight_bit.element

    @property
    def staged_bytes(self) -> int:
        """Bytes of an 8-bit tile in shared memory."""
        raise NotImplementedError

    def scale_blocks(self, operand: str) -> int:
        """Scales of a token that its row of "k" or "v" is multiplied by; 0 without."""
        raise NotImplementedError

    @property
    def scale_slots(self) -> int:
        """Tiles whose scales of tokens are in shared memory."""
        return SCALE_SLOTS

    @property
    def query_columns(self) -> int:
        """Columns of queries in shared memory."""
        return self.dim_qk

    @property
    def padded_ov_depth(self) -> int:
        """Columns of the output in tensor memory."""
        return self.dim_v

    @property
    def ring(self) -> Edge:
        """The ring of key tiles, from load warp to MMA warp."""
        raise NotImplementedError

    @property
    def box_rows(self) -> int:
        """Keys of one box: the largest power of two that divides both a tile and a page."""
        return min(self.page_size & -self.page_size, self.BN) if self.page_size else self.BN

    @property
    def topology(self) -> Topology:
        """Roles, ring and signals of a CTA; queries and P are beside the ring."""
        attend, mma = (("attend",),), (("mma",),)
        signals = (Signal("q", attend), Signal("s", mma), Signal("p", attend), Signal("o", mma))
        private = self.element.bytes * self.BM * (self.query_columns + self.BN)
        if self.eight_bit is None:
            return Topology(ROLES, (self.ring,), private, signals)
        private += 4 * self.BN * self.scale_slots * (self.scale_blocks("k") + self.scale_blocks("v"))
        bytes_of_8 = Edge("bytes", "load", ("convert",), self.staged, self.staged_bytes)
        return Topology((*ROLES, CONVERT), (bytes_of_8, replace(self.ring, producer="convert")), private, signals)

    @property
    def smem_used(self) -> int:
        return self.topology.smem_bytes

    @property
    def tmem_used(self) -> int:
        """Columns; an allocation is a power of two of them. 64 rows of two columns take one."""
        return self.padded_ov_depth * self.BM // 128 + self.BN


def choice_of(
    kernel: str, problem: Problem, config: TileConfig, target: Arch, why: str, options: PlanOptions = DEFAULT_OPTIONS
) -> Choice:
    """The choice of `kernel`, with the parts of keys that fill the chip; for ragged batches the grid is that of
    sequences with as many queries as known at most."""
    tiles = row_tiles(problem, problem.longest_q, config)
    ctas = tiles * problem.heads_kv * problem.batch
    whole = options.batch_invariant or problem.kind == "ragged"
    parts = 1 if whole else parts_of_keys(ctas, problem.seq_k, target)
    config = replace(config, splitk_partitions=parts)

    def lines() -> tuple[str, ...]:
        return (
            f"tile {config.BM} x {config.BN}, ring of {many(config.stages, 'slot')}, {config.smem_used} bytes of "
            f"shared memory, {config.tmem_used} columns of tensor memory",
            f"grid {tiles * parts} x {problem.heads_kv} x {problem.batch}, the keys of a tile in {many(parts, 'part')}",
        )

    shared = f"{many(ctas, 'tile')} on {target.processors} SMs, {many(parts, 'CTA')} for each"
    split = INVARIANT if options.batch_invariant else shared
    grid = (tiles * parts, problem.heads_kv, problem.batch)
    return Choice(kernel, config, grid, lines, (why, split, COPY_RULE), partitions=parts)


def row_tiles(problem: Problem, queries: int, config: TileConfig) -> int:
    """Row tiles of a key head with so many queries, at least one."""
    return max(1, -(-queries * (problem.heads_q // problem.heads_kv) // config.BM))
