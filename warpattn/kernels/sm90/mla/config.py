"""MlaConfig: the shape of the Hopper decode kernel for latent attention (MLA, absorbed), as a value.

A token's key is its latent vector and a rotary part, [512 | 64], and its value is the latent vector again, so each is
read once for both products. What is left of the decode kernel's plan when tiles are that wide:

      shared memory   queries 64 × 576: 72 KiB, key tiles 32 × 576: 36 KiB a slot, four slots: 216 of 227 KiB
      registers       O [64, 512] fp32 does not fit into a warpgroup: two of them keep 256 columns each, 128 a thread,
                      and make the probabilities of every other tile, which the other one gets through shared memory

With 64 keys there would be two slots, both of them in use until a pair of tiles is done, and nothing on its way.
Widths are powers of two where TMA and wgmma need it: a tile is two blocks of 256 columns and one of 64. Nothing in this
file imports Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

from warpattn.kernels.topology import Edge, Role, Topology
from warpattn.problem.backends import LATENT
from warpattn.problem.element import Element

from ..decode.config import DecodeConfig

BLOCK_N = 32  # keys of a tile


@dataclass(frozen=True)
class MlaConfig(DecodeConfig):
    """Tiles and resources of one compiled kernel; keys are shared out as in `DecodeConfig`."""

    consumer_registers: int = 224
    producer_registers: int = 56
    combine_apart: bool = True  # at least 16 rows of 512 columns a head: too much for the last CTA alone

    @property
    def padded_qk(self) -> int:
        return self.dim_qk

    @property
    def half(self) -> int:
        """Columns of the output that a warpgroup has, and of a block of latents."""
        return self.dim_v // 2

    @property
    def rope(self) -> int:
        """Columns of the rotary part."""
        return self.dim_qk - self.dim_v

    @property
    def k_cols(self) -> int:
        return self.rope

    @property
    def v_cols(self) -> int:
        return self.half

    @property
    def k_bytes(self) -> int:
        """Of a tile's rotary part; the latents are `v_bytes`."""
        return self.element.bytes * self.block_n * self.rope

    @property
    def tile_bytes(self) -> int:
        return self.k_bytes + self.v_bytes

    @property
    def consumers(self) -> int:
        return 2

    @property
    def combine_cols(self) -> int:
        """128: with 32 parts at once, where all 512 columns would leave registers for 8."""
        return 128

    @property
    def tiles_outermost(self) -> bool:
        return True

    @property
    def words(self) -> str:
        return f"tile {self.rows} x {self.block_n}, 2 x {self.half} output columns, ring K and V {self.stages}"

    @property
    def topology(self) -> Topology:
        """Roles and the ring of a block; queries stay in shared memory that the warpgroups fill together."""
        attend = tuple(f"attend {half}" for half in range(self.consumers))
        roles = [Role(name, 4, self.consumer_registers) for name in attend]
        edge = Edge("K and V", "load", attend, self.stages, self.tile_bytes)
        return Topology((*roles, Role("load", 1, self.producer_registers)), (edge,), self.private_bytes)

    @property
    def private_bytes(self) -> int:
        """Shared memory beside the ring: queries; marks and sums of both warpgroups, six of 4 lanes a row in fp32."""
        return self.q_bytes + 6 * 4 * 4 * self.rows


def choose_mla(element: Element, page_size: int = 0) -> MlaConfig:
    """The configuration for `page_size` keys a page (0: not paged)."""
    box = min(page_size & -page_size, BLOCK_N)
    return MlaConfig(element, *LATENT, BLOCK_N, 4, 1, 1, page_box=box)
