"""CDNAConfig: the shape of an attention kernel of gfx942 or gfx950, as a value; nothing here imports Triton."""

from dataclasses import dataclass

from warpattn.kernels.amd.kv_config import WAVE, KVBufferConfig
from warpattn.kernels.pieces.combine_config import CombineTile

COMBINE_PARTS = 8  # parts that a workgroup combines at once


def pad_dim(dim: int) -> int:
    """Head dim rounded up to a power of two, at least 32."""
    return max(32, 1 << (dim - 1).bit_length())


@dataclass(frozen=True)
class CDNAConfig:
    """Tiles of one compiled kernel: `block_m` rows against `block_n` keys at a time.

    Rows are tokens of one query head, or, with `pack` > 1, tokens of the `pack` query heads of one key head side by
    side (row r: token r // pack, head r % pack). Waves share the rows (`waves_m`) or the columns of a product
    (`waves_n`).
    """

    arch: str  # "gfx942" | "gfx950"
    dtype: str  # "bf16" | "fp16"
    dim_qk: int
    dim_v: int
    block_m: int
    block_n: int
    instr: int  # rows and columns of an MFMA: 32 | 16
    waves_m: int
    waves_n: int
    kind: str  # of the buffers of K and V, see `kv_config`
    k_strip: int
    v_strip: int
    slots: int
    pack: int = 1

    @property
    def waves(self) -> int:
        return self.waves_m * self.waves_n

    @property
    def padded_qk(self) -> int:
        return pad_dim(self.dim_qk)

    @property
    def padded_v(self) -> int:
        return pad_dim(self.dim_v)

    @property
    def k(self) -> KVBufferConfig:
        return self._buffer("K", self.dim_qk, self.k_strip)

    @property
    def v(self) -> KVBufferConfig:
        return self._buffer("V", self.dim_v, self.v_strip)

    @property
    def lds_bytes(self) -> int:
        """LDS of the buffers of K and V."""
        return self.k.lds_bytes + self.v.lds_bytes

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
        return KVBufferConfig(
            operand, self.kind, self.arch, self.block_n, depth, dim, strip, self.slots, self.waves, self.waves_n
        )


@dataclass(frozen=True)
class Traits:
    """What the code of a kernel depends on beside its tiles."""

    sequence: str  # "dense" | "ragged" | "paged"
    page_size: int  # 0 unless paged
    has_sinks: bool
    has_lse: bool
    partial: bool = False  # writes a share of the keys' results, to be combined
