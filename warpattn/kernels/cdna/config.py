"""CDNAConfig: the shape of an attention kernel of gfx942 or gfx950, as a value; nothing here imports Triton."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from warpattn.kernels.amd.kv_config import WAVE, KVBufferConfig
from warpattn.kernels.pieces.combine_config import CombineTile
from warpattn.problem.element import Element
from warpattn.problem.scales import EightBit

COMBINE_PARTS = 8  # parts that a workgroup combines at once


def pad_dim(dim: int) -> int:
    """Head dim rounded up to a power of two, at least 32."""
    return max(32, 1 << (dim - 1).bit_length())


@dataclass(frozen=True)
class Buffers:
    """How K and V pass through LDS, see `KVBufferConfig`."""

    kind: str  # one of `KINDS`
    k_strip: int
    v_strip: int
    slots: int = 1


class Products:
    """What follows from the waves and head dims of a kernel's config."""

    dim_qk: int
    dim_v: int
    waves_m: int
    waves_n: int

    @property
    def waves(self) -> int:
        return self.waves_m * self.waves_n

    @property
    def padded_qk(self) -> int:
        return pad_dim(self.dim_qk)

    @property
    def padded_v(self) -> int:
        return pad_dim(self.dim_v)


@dataclass(frozen=True)
class CDNAConfig(Products):
    """Tiles of one compiled kernel: `block_m` rows against `block_n` keys at a time.

    Rows are tokens of one query head, or, with `pack` > 1, tokens of the `pack` query heads of one key head side by
    side (row r: token r // pack, head r % pack). Waves share the rows (`waves_m`) or the columns of a product
    (`waves_n`).
    """

    arch: str  # "gfx942" | "gfx950"
    element: Element  # of the products and the output: BF16 | FP16
    dim_qk: int
    dim_v: int
    block_m: int
    block_n: int
    instr: int  # rows and columns of an MFMA: 32 | 16
    waves_m: int
    waves_n: int
    buffers: Buffers
    pack: int = 1
    eight_bit: EightBit | None = None  # k and v in DRAM; None: as q

    @property
    def tiles_ahead(self) -> int:
        """How many tiles before their use K and V are loaded."""
        return self.buffers.slots - 1 if self.buffers.kind == "ring" else 1

    @property
    def k_in_flight(self) -> int:
        """Copies of a ring, of K and V together, that may be in flight when K of a tile is awaited: its V, and all of
        the tiles ahead but the last, which is requested after the wait."""
        return 2 * self.tiles_ahead - 1

    @property
    def v_in_flight(self) -> int:
        """The same when V is awaited: K and V of the tiles ahead."""
        return 2 * self.tiles_ahead

    @property
    def stored(self) -> Element:
        """Of k and v in DRAM."""
        return self.element if self.eight_bit is None else self.eight_bit.element

    def scaled_columns(self, operand: str) -> int:
        """Columns of a row of "k" or "v" that share a scale of their own; 0: none do."""
        return 0 if self.eight_bit is None else self.eight_bit.columns(operand)

    @property
    def key_blocks(self) -> int:
        """Blocks of a key's columns that have scales of their own."""
        columns = self.scaled_columns("k")
        return self.dim_qk // columns if columns else 0

    @property
    def rope(self) -> KVBufferConfig | None:
        """The buffer of the last strip of keys where it is in a tensor of its own."""
        if self.eight_bit is None or self.eight_bit.rope is None:
            return None
        columns = self.dim_qk - self.dim_v
        buffer = replace(self._buffer("K", columns, columns), stored=self.eight_bit.rope, slots=self.buffers.slots)
        return replace(buffer, slots=0) if self._loads_own(buffer) else buffer

    @property
    def k(self) -> KVBufferConfig:
        return self._buffer("K", self.dim_qk, self.buffers.k_strip)

    @property
    def v(self) -> KVBufferConfig:
        return self._buffer("V", self.dim_v, self.buffers.v_strip)

    @property
    def lds_bytes(self) -> int:
        """LDS of the buffers of K and V."""
        return self.k.lds_bytes + self.v.lds_bytes + (self.rope.lds_bytes if self.rope else 0)

    @property
    def combine_tile(self) -> CombineTile:
        """What a workgroup of the combination takes at once."""
        return CombineTile(self.padded_v, COMBINE_PARTS, self.waves, WAVE)

    @property
    def combine_rows(self) -> int:
        """Rows of a tile that it takes at once."""
        return min(self.block_m, self.combine_tile.rows)

    def _buffer(self, operand: str, dim: int, strip: int) -> KVBufferConfig:
        depth = -(-dim // strip) * strip if operand == "K" else pad_dim(dim)
        kind, slots = self.buffers.kind, self.buffers.slots
        scaled = self.scaled_columns("v") if operand == "V" else 0
        buffer = KVBufferConfig(
            operand, kind, self.arch, self.element, self.block_n, depth, dim, strip, slots, self.waves, self.stored,
            scaled,
        )  # fmt: skip
        return replace(buffer, slots=0) if self._loads_own(buffer) else buffer

    def _loads_own(self, buffer: KVBufferConfig) -> bool:
        """Whether each wave loads the keys that it multiplies: waves are along the keys, and one load has all of a
        wave's. Of values every wave multiplies all."""
        rows = buffer.lanes[0] * buffer.lane_tile[0]
        keys = self.instr if self.waves_n == self.waves else 0
        return buffer.operand == "K" and buffer.kind == "registers" and rows == keys == self.block_n // self.waves


@dataclass(frozen=True)
class Traits:
    """Compile-time parameters of a kernel beside its tiles."""

    sequence: str  # "dense" | "ragged" | "paged" | "paged-ragged"
    page_size: int  # 0 unless paged
    has_sinks: bool
    has_lse: bool
    partial: bool = False  # writes the results of one partition of the keys, to be combined
    own_rope: bool = False  # rotary columns of queries are in a tensor of their own

    @property
    def ragged_queries(self) -> bool:
        """Whether queries of sequences are laid end to end."""
        return self.sequence in ("ragged", "paged-ragged")

    @property
    def paged(self) -> bool:
        """Whether keys and values are in pages."""
        return self.page_size > 0


class Shape(NamedTuple):
    """The integers of a launch: the host fills in values, kernels read fields by name."""

    seq_q: Any  # dense: queries, else the most that a sequence has
    seq_k: Any  # dense: keys; paged: entries in a row of the block table
    heads_kv: Any
    group: Any  # query heads per key head
    m_tiles: Any  # query tiles of the longest sequence
    tiles: Any  # workgroups of a partition
    partitions: Any


class RowStrides(NamedTuple):
    """Strides of q, k, v or the output in runs of 16 bytes, int32; 0 along an axis of one element."""

    outer: Any  # from one batch entry, or page, to the next
    row: Any
    head: Any


class LatentArgs(NamedTuple):
    """Queries or keys of latent attention in two tensors; the strides of the first are in `Strides`."""

    latent: Any
    rope: Any
    rope_strides: Any  # RowStrides


class LseStrides(NamedTuple):
    """Strides of the LSE in elements, int32."""

    batch: Any
    head: Any


class Strides(NamedTuple):
    """Strides of every tensor of a launch."""

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any


class RaggedIndices(NamedTuple):
    """Row offsets of sequences that lie end to end, int32 (batch + 1,)."""

    cu_q: Any
    cu_k: Any


class PagedIndices(NamedTuple):
    """Pages (batch, entries) and lengths (batch,) of paged sequences, int32."""

    block_table: Any
    lengths: Any


class PagedRaggedIndices(NamedTuple):
    """So many sequences, fewer than a launch has room for; row offsets of their queries, which lie end to end, int32
    (batch + 1,); and pages of keys."""

    batch: Any
    cu_q: Any
    block_table: Any
    lengths: Any


class Again(NamedTuple):
    """Arguments of the attention kernel once more, for what attends again (`recompute`). The compiler does not know
    that they are the same, so it keeps none in registers throughout the loop over key tiles."""

    shape: Any
    strides: Any
    q: Any
    k: Any
    v: Any
    indices: Any
    sinks: Any
    o: Any
    lse: Any
