"""DecodeConfig: tiles, schedule, overlap and combination of Hopper's decode kernel, as values.

Decode reads every key and value once for a few query rows, so DRAM sets its speed: rings are just deep enough to keep
DRAM busy, and every CTA works to the end. `choice.py` picks the values for a problem. This file imports no Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from warpattn.kernels.topology import Edge, Registers, Role, Topology
from warpattn.problem.element import Element

from ..operand_format import OperandFormat, WithOperands
from ..prefill.config import CONSUMER_ROWS, KeyTileSizes, pad_dim

GROWTH = 512  # keys that an SM reads in about the time that a second work item costs it (bench/notes.md)
REGISTERS = Registers(240, 152)  # registers a thread with one CTA an SM
LEAST_BOX = 8  # rows: the swizzle of shared memory repeats after 8, and a box must start where it does
WARPGROUP = 128  # threads

Config = TypeVar("Config")


@dataclass(frozen=True)
class LengthSums:
    """How a CTA sums the key tiles of all row tiles, block by block, if lengths differ."""

    width: int = 128  # row tiles of a block
    lane: int = 1  # row tiles of a lane; if width / 32, every warp sums the whole block by itself
    once: bool = True  # one block holds all row tiles


@dataclass(frozen=True)
class Schedule:
    """How the key tiles of a batch are partitioned over CTAs: Stream-K (pieces/stream_k.py) in units of key tiles.

    A CTA's units of one head form one part of that head. With `invariant` every unit is a part, so that the bits of a
    sequence's result depend on its own length only. A head counts `head_overhead` units beside its keys: loading
    queries, first scores and output overlap with nothing, so many short heads take longer than one long one.
    """

    unit: int = 1  # key tiles
    invariant: bool = False
    sums: LengthSums | None = LengthSums()  # None: every head has the same number of key tiles
    head_overhead: int = 0  # units
    interleave_heads: bool = False  # a CTA takes every n-th head instead of n in a row, see `interleaved`
    has_lengths: bool = False  # the kernel reads lengths from a tensor
    one_token: bool = False  # every ragged sequence that decode takes has one query token
    ragged: bool = False  # the kernel reads numbers of queries, too, and skips sequences with more than `tokens`
    one_row_tile: bool = False  # a key head has one row tile: only one CTA reads each key, so L2 may evict keys first


@dataclass(frozen=True)
class Overlap:
    """How a launch overlaps the launches before and after it: programmatic dependent launch (PDL).

    With `pdl` a launch may start before the preceding kernel ends. Its CTAs wait with griddepcontrol.wait before they
    touch memory that the preceding kernel may write. Until then they prefetch keys to L2, or load keys that are ready
    before the dependency. A CTA with a short enough range triggers the next launch before its own last keys.
    """

    pdl: bool = False
    kv_ready_before_dependency: bool = False  # the preceding kernel writes K and V of new tokens only
    max_inflight_stages: int | None = None  # ring slots with copies in flight at a time; None: all
    prefetch_tiles: int = 0  # key tiles that a CTA prefetches to L2; if not 0, the number is a kernel argument
    trigger_max_units: int = 0  # longest range, in units, that triggers early
    trigger_fraction: int = 32  # it triggers when 1 / trigger_fraction of the range remains


@dataclass(frozen=True)
class Combine:
    """Who combines the parts of a split head: the CTA that finishes the head, or a second kernel.

    For up to `short_parts` parts that CTA has shorter code, because the whole launch waits for it.
    """

    short_parts: int = 16  # 0: none
    separate_kernel: bool = False


@dataclass(frozen=True)
class SwapAB:
    """Swap-AB: K and V are the left operands of the products, and query rows are columns of the right ones."""

    columns: int  # columns of the products: 8 or 16, with 8-bit keys also 32
    query_rows: int  # 4, 8, 16 or `columns`: upper bound of the columns that are queries


@dataclass(frozen=True)
class StreamConfig(WithOperands):
    """What configurations of decode and latent attention share: key tiles, schedule, and combination of parts."""

    operands: OperandFormat
    block_n: int  # keys of a tile
    stages: int  # slots of each ring
    page_box: int | None = None  # most rows of a page that one TMA box may have, a power of two; None: no pages
    schedule: Schedule = Schedule()
    combine: Combine = Combine()

    attending_warps: ClassVar[int] = 4  # warps of the consumer role

    # Whether the work queue holds the first row tiles of all sequences, then all second ones, and so on, so that CTAs
    # that run at once read the same keys.
    tiles_outermost: ClassVar[bool] = False

    @property
    def stored(self) -> Element:
        """Element of K and V in memory."""
        return self.element if self.eight_bit is None else self.eight_bit.element

    @property
    def box(self) -> int:
        """Keys of one TMA box."""
        return self.block_n if self.page_box is None else min(self.block_n, self.page_box)

    @property
    def boxes(self) -> int:
        """TMA boxes of a key tile."""
        return self.block_n // self.box

    @property
    def gathers(self) -> bool:
        """Whether no TMA box of 8 rows divides a page, so that ordinary copies fetch rows one by one."""
        return self.box < LEAST_BOX

    @property
    def oldest_first(self) -> bool:
        """Whether key tiles are visited in reverse, so that those of new tokens are last."""
        return False

    @property
    def max_growth(self) -> int:
        """Most units by which a range may grow to end where a head ends."""
        return max(1, GROWTH // (self.block_n * self.schedule.unit))


@dataclass(frozen=True)
class DecodeConfig(KeyTileSizes, StreamConfig):
    """Tiles and resources of one compiled decode kernel.

    One producer warp loads K and V tiles into two rings; one consumer warpgroup computes up to 64 query rows (tokens ×
    heads of a group), or with `swap_ab` 8, 16 or (8-bit keys) 32.
    """

    ctas: int = 1  # CTAs an SM
    swap_ab: SwapAB | None = None
    registers: Registers = REGISTERS
    overlap: Overlap = Overlap()
    keeps_scores = False  # see prefill; loads bound decode

    def padded(self, dim: int) -> int:
        """Columns of a tile; at least 64 with 8 bits, to fill 64 rows of Vᵀ, or four threads with 16 bytes each."""
        return pad_dim(dim) if self.eight_bit is None else max(pad_dim(dim), CONSUMER_ROWS)

    @cached_property
    def padded_qk(self) -> int:
        return self.padded(self.dim_qk)

    @cached_property
    def padded_v(self) -> int:
        return self.padded(self.dim_v)

    @property
    def overlaps(self) -> bool:
        return True  # P·V of a key tile runs beside the softmax of the next one

    @property
    def loaded(self) -> Element:
        return self.stored

    def scale_blocks(self, operand: str) -> int:
        """Blocks of columns of a tile of "k" or "v" that have scales of their own."""
        columns = self.padded_qk if operand == "k" else self.padded_v
        return 1 if self.eight_bit is None else self.eight_bit.blocks(operand, columns)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of tokens in one slot."""
        return 4 * self.block_n * self.eight_bit.token_scales(self.padded_qk, self.padded_v) if self.eight_bit else 0

    @property
    def rows(self) -> int:
        """Rows of a query tile."""
        return CONSUMER_ROWS if self.swap_ab is None else self.swap_ab.columns

    @property
    def kept_rows(self) -> int:
        """Rows of a partial output in the workspace; with swap-AB at least as many as a warpgroup stores at once."""
        if self.swap_ab is None:
            return CONSUMER_ROWS
        return max(self.swap_ab.query_rows, 4 * max(1, WARPGROUP // self.padded_v))

    @property
    def oldest_first(self) -> bool:
        return self.overlap.kv_ready_before_dependency

    @property
    def q_bytes(self) -> int:
        return self.operand.bytes * self.rows * self.padded_qk

    @property
    def words(self) -> str:
        """Tile and rings in words, for a plan."""
        return f"tile {self.rows} x {self.block_n}, rings K {self.stages} V {self.stages}"

    @property
    def private_bytes(self) -> int:
        """Bytes beside the rings: queries; with swap-AB also a P tile for each block of V's columns
        that has scales, O, l and m in fp32 for their transposition, and scales of tokens."""
        if self.swap_ab is None:
            return self.q_bytes
        p_bytes = self.scale_blocks("v") * self.operand.bytes * self.rows * self.block_n
        return self.q_bytes + p_bytes + 4 * self.rows * (self.padded_v + 5) + self.stages * self.scale_bytes

    @cached_property
    def topology(self) -> Topology:
        """Roles and rings of a CTA."""
        roles = (Role("attend", 4, self.registers.consumer), Role("load", 1, self.registers.producer))
        edges = (
            Edge("K", "load", ("attend",), self.stages, self.k_bytes),
            Edge("V", "load", ("attend",), self.stages, self.v_bytes),
        )
        return Topology(roles, edges, self.private_bytes)

    @property
    def smem_bytes(self) -> int:
        """Bytes of tiles and barriers; the compiler adds `SLACK` at most."""
        return self.topology.smem_bytes

    @property
    def max_registers(self) -> int:
        """Registers a thread at launch, so that `ctas` CTAs fit on an SM."""
        return 65536 // (self.topology.threads * self.ctas) // 8 * 8

    @property
    def compiled(self) -> DecodeConfig:
        """The configuration that the kernel is compiled for, without the number of prefetched tiles (an argument)."""
        return replace(self, overlap=replace(self.overlap, prefetch_tiles=min(1, self.overlap.prefetch_tiles)))


def with_fields(config: Config, fields: Mapping[str, Any]) -> Config:
    """The config with other values of some fields; "schedule.unit" names a field of its `schedule`."""
    for name, value in fields.items():
        outer, _, inner = name.partition(".")
        value = with_fields(getattr(config, outer), {inner: value}) if inner else value
        config = replace(config, **{outer: value})  # type: ignore[type-var]
    return config
