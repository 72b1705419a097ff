"""Configuration of a buffer of K or V, from DRAM to the matrix cores of gfx942 and gfx950.

A key tile is split into strips: K along the head dim (each strip adds to the same scores), V along the keys (each strip
adds to the same output). LDS holds whole strips:

      K   [keys, strip] of [keys, dim]     iterator axis 1      kind        strips in LDS   in flight meanwhile
      V   [strip, dim]  of [keys, dim]     iterator axis 0      registers   1               1 strip, in registers
                                                                lds         1               nothing
                                                                ring        slots           1 tile, written by the DMA

Nothing here imports Triton; `kv_buffer` is the device side.
"""

from dataclasses import dataclass

from warpattn.problem.element import Element

KINDS = ("registers", "lds", "ring")
WAVE = 64  # lanes of a wave
VECTOR = 8  # two-byte elements in 16 bytes: a lane reads so many from LDS at once


@dataclass(frozen=True)
class KVBufferConfig:
    """The buffer of K or of V in one kernel."""

    operand: str  # "K" | "V"
    kind: str  # of KINDS
    arch: str  # "gfx942" | "gfx950"
    element: Element  # in LDS
    keys: int  # of a key tile
    depth: int  # columns with padding: to whole strips (K) or a power of two (V)
    dim: int  # columns of the tensor
    strip: int  # columns (K) or keys (V) of a strip
    slots: int  # strips that LDS holds; 0: each wave multiplies the keys that it has loaded, and keeps them
    waves: int
    stored: Element  # in DRAM: `element`, or of 8 bits
    scaled_columns: int = 0  # columns of a row that share a scale of their own (V); 0: none do

    @property
    def iterator_axis(self) -> int:
        """The axis of a key tile [keys, depth] along which strips follow each other."""
        return 1 if self.operand == "K" else 0

    def start(self, strip: int, axis: int) -> int:
        """First key (axis 0) or column (axis 1) of strip number `strip` in its tile."""
        return strip * self.strip if axis == self.iterator_axis else 0

    @property
    def scales(self) -> int:
        """Scales of a row that its elements are multiplied by on their way, one for each block of columns."""
        return self.dim // self.scaled_columns if self.scaled_columns else 0

    @property
    def btile(self) -> tuple[int, int]:
        """Shape of a strip, (keys, depth)."""
        return (self.keys, self.strip) if self.operand == "K" else (self.strip, self.depth)

    @property
    def strips(self) -> int:
        """Strips of a key tile."""
        return (self.depth if self.operand == "K" else self.keys) // self.strip

    @property
    def lane_bytes(self) -> int:
        """Bytes that a lane moves with one instruction; the DMA of gfx942 moves 4, everything else 16."""
        return 4 if self.arch == "gfx942" and self.kind != "registers" else 16

    @property
    def strip_bytes(self) -> int:
        rows, cols = self.btile
        return self.element.bytes * rows * cols

    @property
    def lds_bytes(self) -> int:
        return self.slots * self.strip_bytes

    @property
    def transposed(self) -> bool:
        """Whether LDS has the keys of a column of V side by side, so that a lane reads several of them at once.

        Lanes that hold four keys of a column in registers write them as one vector. gfx950 does not need this: its LDS
        transposes while it reads.
        """
        return self.operand == "V" and self.kind == "registers" and self.arch == "gfx942"

    @property
    def lane_tile(self) -> tuple[int, int]:
        """Keys and columns that a lane holds side by side while it copies."""
        if not self.transposed:
            return (1, self.lane_bytes // self.stored.bytes)
        each = self.strip * self.depth // (self.waves * WAVE)
        return (4, max(1, min(VECTOR, each // 4)))

    @property
    def lanes(self) -> tuple[int, int]:
        """Lanes of a wave along keys and columns: as many as fit into a row of the strip."""
        along = min(WAVE, self.btile[1] // self.lane_tile[1])
        return (WAVE // along, along)

    @property
    def swizzle(self) -> tuple[int, int, int]:
        """(vector, rows per phase, phases) of the layout in LDS: the rows that a wave reads at once start at different
        banks. V that LDS transposes has no swizzle."""
        banks = 256 if self.arch == "gfx950" else 128  # bytes in one cycle: 64 and 32 banks
        if self.operand == "V" and not self.transposed:
            return (1, 1, 1)
        row = self.element.bytes * (self.strip if self.transposed else self.btile[1])
        vector = 4 if self.transposed else VECTOR
        per_phase = max(1, banks // row)
        return (vector, per_phase, banks // (self.element.bytes * vector) // per_phase)
