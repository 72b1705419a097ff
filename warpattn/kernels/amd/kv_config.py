"""How keys and values come from DRAM to the matrix cores of gfx942 and gfx950: one buffer of K or of V, as a value.

A key tile is walked in strips: K along the head dim (each strip adds to the same scores), V along the keys (each strip
adds to the same output). A strip is what lies in LDS at once:

      K   [keys, strip] of [keys, dim]     iterator axis 1      kind        strips in LDS   on the way meanwhile
      V   [strip, dim]  of [keys, dim]     iterator axis 0      registers   1               1 strip, in registers
                                                                lds         1               nothing
                                                                ring        slots           1 tile, written by the DMA

Nothing here imports Triton; `kv_buffer` is the device side. Source: section 5.1-5.3 of the specification.
"""

from dataclasses import dataclass

KINDS = ("registers", "lds", "ring")
WAVE = 64  # lanes
VECTOR = 8  # two-byte elements in 16 bytes, what a lane loads into registers or reads from LDS at once
MOST_OUTSTANDING = 63  # the vmcnt of s_waitcnt has 6 bits


@dataclass(frozen=True)
class KVBufferConfig:
    """The buffer of K or of V in one kernel; elements have two bytes."""

    operand: str  # "K" | "V"
    kind: str  # of KINDS
    arch: str  # "gfx942" | "gfx950"
    keys: int  # of a key tile
    depth: int  # columns, with those that fill the last strip (K) or a power of two (V)
    dim: int  # columns that exist
    strip: int  # columns (K) or keys (V) of a strip
    slots: int  # strips that LDS holds
    waves: int
    waves_n: int = 1  # waves that share the columns of the product: keys for K, depth for V

    @property
    def iterator_axis(self) -> int:
        """The axis along which strips follow each other."""
        return 1 if self.operand == "K" else 0

    @property
    def btile(self) -> tuple[int, int]:
        """Shape of a strip, (keys, depth)."""
        return (self.keys, self.strip) if self.operand == "K" else (self.strip, self.depth)

    @property
    def wsize(self) -> int:
        """Columns of the product that one wave makes from a strip."""
        return (self.keys if self.operand == "K" else self.depth) // self.waves_n

    @property
    def wtile(self) -> tuple[int, int]:
        """The part of a strip that one wave reads."""
        return (self.wsize, self.strip) if self.operand == "K" else (self.strip, self.wsize)

    def get_wtile_coord(self, warp_col: int) -> tuple[int, int]:
        """Which of the strip's wave tiles the waves of column `warp_col` read."""
        return (warp_col, 0) if self.operand == "K" else (0, warp_col)

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
        return 2 * rows * cols

    @property
    def lds_bytes(self) -> int:
        return self.slots * self.strip_bytes

    @property
    def vm_instrs_per_load(self) -> int:
        """Vector-memory instructions with which each wave loads its part of a strip: what vmcnt counts."""
        return max(1, self.strip_bytes // (self.waves * WAVE * self.lane_bytes))

    @property
    def transposed(self) -> bool:
        """V stands in LDS with its keys side by side, so that a lane reads those of one column at once.

        Lanes that hold four keys of a column in registers write them as one vector. gfx950 needs none of it: its LDS
        transposes while it reads.
        """
        return self.operand == "V" and self.kind == "registers" and self.arch == "gfx942"

    @property
    def lane_tile(self) -> tuple[int, int]:
        """Keys and columns that a lane holds side by side while it copies."""
        if not self.transposed:
            return (1, self.lane_bytes // 2)
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
        banks. V that LDS transposes has none."""
        banks = 256 if self.arch == "gfx950" else 128  # bytes in one cycle: 64 and 32 banks
        if self.operand == "V" and not self.transposed:
            return (1, 1, 1)
        row = 2 * (self.strip if self.transposed else self.btile[1])
        vector = 4 if self.transposed else VECTOR
        per_phase = max(1, banks // row)
        return (vector, per_phase, min(banks // (2 * vector) // per_phase, row // (2 * vector)))


def outstanding(*later: KVBufferConfig) -> int:
    """The n of `s_waitcnt vmcnt(n)` that waits for a strip after which strips of `later` were asked for."""
    return min(MOST_OUTSTANDING, sum(config.vm_instrs_per_load for config in later))
