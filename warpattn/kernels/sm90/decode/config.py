"""DecodeConfig: tiles, schedule, overlap and combination of the Hopper decode kernel, as values.

Decode reads every key and value once for a few query rows, so DRAM sets its speed: rings just deep enough keep DRAM
busy, and every CTA works to the end. `choice.py` picks the values for a problem. Nothing in this file imports Triton.
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

GROWTH = 512  # keys: an SM reads them in about the time that a second work item costs it (bench/notes.md)
REGISTERS = Registers(240, 152)  # of one CTA on an SM
LEAST_BOX = 8  # rows: the swizzle of shared memory repeats after 8, and a copy must start where it does
WARPGROUP = 128  # threads

Config = TypeVar("Config")


@dataclass(frozen=True)
class LengthSums:
    """How a CTA adds up the key tiles of all row tiles, in blocks, if lengths differ."""

    width: int = 128  # row tiles of a block
    lane: int = 1  # row tiles of a lane; width / 32: every warp adds up the block by itself
    once: bool = True  # one block has all row tiles


@dataclass(frozen=True)
class Schedule:
    """How the key tiles of a batch are partitioned over CTAs: Stream-K (pieces/stream_k.py) in units of key tiles.

    A CTA's units of one head are one part of that head. With `invariant` every unit is a part, so that a sequence's
    bits depend on its own length only. A head counts `head_overhead` units more than its keys: query, first scores and
    output overlap with nothing, so many short heads take longer than one long head with as many keys.
    """

    unit: int = 1  # key tiles
    invariant: bool = False
    sums: LengthSums | None = LengthSums()  # None: every head has equally many key tiles
    head_overhead: int = 0  # units
    interleave_heads: bool = False  # a CTA takes every n-th head instead of n in a row, see `interleaved`
    has_lengths: bool = False  # the kernel reads lengths from a tensor
    one_token: bool = False  # of every ragged sequence that is decoded
    ragged: bool = False  # and numbers of queries; sequences with more than a tile's are not attended for
    one_row_tile: bool = False  # of a key head: only one CTA reads each key, so keys may leave L2 first


@dataclass(frozen=True)
class Overlap:
    """How a launch overlaps the launches before and after it: programmatic dependent launch (PDL).

    With `pdl` a launch may start before the preceding kernel ends. Its CTAs wait with griddepcontrol.wait before they
    touch memory that the preceding kernel may write; until then they prefetch keys to L2, or read them if those are
    ready before the dependency. A CTA with a short enough range triggers the dependent launch before its own last keys.
    """

    pdl: bool = False
    kv_ready_before_dependency: bool = False  # all keys and values but those of new tokens
    max_inflight_stages: int | None = None  # ring slots with copies in flight at a time; None: all
    prefetch_tiles: int = 0  # key tiles of a CTA whose keys it prefetches to L2; an argument of the kernel if not 0
    trigger_max_units: int = 0  # longest range, in units, that triggers early
    trigger_fraction: int = 32  # 1 / trigger_fraction of the range remains then


@dataclass(frozen=True)
class Combine:
    """How the parts of a split head become one result: the CTA that finishes the head adds them up, or a second kernel.

    For up to `short_parts` parts that CTA has shorter code, because the whole launch waits for it.
    """

    short_parts: int = 16  # 0: none
    separate_kernel: bool = False


@dataclass(frozen=True)
class SwapAB:
    """Swap-AB: keys and values are the left operands of both products, and query rows the columns on the right."""

    columns: int  # of the products, 8 or 16
    query_rows: int  # 4, 8 or 16: at most so many of the columns are queries


@dataclass(frozen=True)
class StreamConfig(WithOperands):
    """What decode and latent attention share: a stream of key tiles, its schedule, and the combination of parts."""

    operands: OperandFormat
    block_n: int  # keys of a tile
    stages: int  # slots of each ring
    page_box: int | None = None  # rows of a page that one copy may read, a power of two; None: keys in one piece
    schedule: Schedule = Schedule()
    combine: Combine = Combine()

    attending_warps: ClassVar[int] = 4  # of a role that attends

    # Whether the queue has the first row tiles of all sequences, then the second ones, and so on, so that CTAs that run
    # at the same time read the same keys.
    tiles_outermost: ClassVar[bool] = False

    @property
    def stored(self) -> Element:
        """Of keys and values in memory."""
        return self.element if self.eight_bit is None else self.eight_bit.element

    @property
    def box(self) -> int:
        """Keys of one copy."""
        return self.block_n if self.page_box is None else min(self.block_n, self.page_box)

    @property
    def boxes(self) -> int:
        """Copies of a key tile."""
        return self.block_n // self.box

    @property
    def gathers(self) -> bool:
        """Whether pages are too odd for TMA, so that rows are copied one by one, without it."""
        return self.box < LEAST_BOX

    @property
    def oldest_first(self) -> bool:
        """Whether key tiles are visited backwards, so that those of new tokens are last."""
        return False

    @property
    def max_growth(self) -> int:
        """Units that a CTA's range may grow by to end at a head."""
        return max(1, GROWTH // (self.block_n * self.schedule.unit))


@dataclass(frozen=True)
class DecodeConfig(KeyTileSizes, StreamConfig):
    """Tiles and resources of one compiled decode kernel.

    One warp loads key tiles into two rings, one warpgroup attends for up to 64 rows (query tokens × the heads of a
    group), or with `swap_ab` for 8 or 16.
    """

    ctas: int = 1  # per SM
    swap_ab: SwapAB | None = None
    registers: Registers = REGISTERS
    overlap: Overlap = Overlap()

    def padded(self, dim: int) -> int:
        """Columns of a tile; those of 8-bit operands fill 64 rows, or four threads with 16 bytes each."""
        return pad_dim(dim) if self.eight_bit is None else max(pad_dim(dim), CONSUMER_ROWS)

    @property
    def loaded(self) -> Element:
        return self.stored

    def scale_blocks(self, operand: str) -> int:
        """Blocks of the columns of a tile of "k" or "v" with scales of their own."""
        columns = self.padded_qk if operand == "k" else self.padded_v
        return 1 if self.eight_bit is None else self.eight_bit.blocks(operand, columns)

    @property
    def scale_bytes(self) -> int:
        """Of the scales of tokens in a slot of keys."""
        return 4 * self.block_n * self.eight_bit.token_scales(self.padded_qk, self.padded_v) if self.eight_bit else 0

    @property
    def rows(self) -> int:
        """Rows of a tile of queries."""
        return CONSUMER_ROWS if self.swap_ab is None else self.swap_ab.columns

    @property
    def kept_rows(self) -> int:
        """Rows of a tile's results in the workspace; with swap-AB a warpgroup writes 4 columns a thread of so many."""
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
        """Tile and rings as text."""
        return f"tile {self.rows} x {self.block_n}, rings K {self.stages} V {self.stages}"

    @property
    def private_bytes(self) -> int:
        """Shared memory beside the rings: queries; with swap-AB also a tile of P for each block of the values' columns,
        O, l and m in fp32 while their rows and columns change places, and scales of tokens."""
        if self.swap_ab is None:
            return self.q_bytes
        p_bytes = self.scale_blocks("v") * self.operand.bytes * self.rows * self.block_n
        return self.q_bytes + p_bytes + 4 * self.rows * (self.padded_v + 5) + self.stages * self.scale_bytes

    @cached_property
    def topology(self) -> Topology:
        """Roles and rings of a block."""
        roles = (Role("attend", 4, self.registers.consumer), Role("load", 1, self.registers.producer))
        edges = (
            Edge("K", "load", ("attend",), self.stages, self.k_bytes),
            Edge("V", "load", ("attend",), self.stages, self.v_bytes),
        )
        return Topology(roles, edges, self.private_bytes)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of tiles and barriers; the compiler adds `SLACK` at most."""
        return self.topology.smem_bytes

    @property
    def max_registers(self) -> int:
        """Registers a thread at launch, so that `ctas` blocks fit on an SM."""
        return 65536 // (self.topology.threads * self.ctas) // 8 * 8

    @property
    def compiled(self) -> DecodeConfig:
        """What the kernel is compiled for: whether any tiles are prefetched, since their number is an argument."""
        return replace(self, overlap=replace(self.overlap, prefetch_tiles=min(1, self.overlap.prefetch_tiles)))


def with_fields(config: Config, fields: Mapping[str, Any]) -> Config:
    """The config with other values of some fields; "schedule.unit" names a field of the value `schedule`."""
    for name, value in fields.items():
        outer, _, inner = name.partition(".")
        value = with_fields(getattr(config, outer), {inner: value}) if inner else value
        config = replace(config, **{outer: value})  # type: ignore[type-var]
    return config
