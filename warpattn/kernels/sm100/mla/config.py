"""LatentConfig: the shape of the Blackwell decode kernel for latent attention (MLA, absorbed), as a value.

A token's key is [latent 512 | rotary 64] and its value the latent again. With 128 rows the output would fill tensor
memory; 64 rows take 16 lanes of every 32, so that the output's 512 columns take 256 and scores fit beside them:

      shared memory   queries 64 × 576: 72 KiB, P 8 KiB, key tiles 64 × 576: 72 KiB a slot, two slots
      tensor memory   O 64 × 512: 256 columns, S 64 × 64: 64 columns, of 512

Latents of 8 bits become tiles of 16 (convert.py): two tiles of 8 bits beside three slots of 32 keys.

Nothing in this file imports Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from warpattn.kernels.nvidia.latent_sizes import LatentSizes
from warpattn.kernels.topology import Edge
from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.launch import DEFAULT_OPTIONS, Choice, PlanOptions
from warpattn.problem.problem import Scales
from warpattn.problem.scales import eight_bit_of

from ..tile import TileConfig, choice_of

WIDENED = "latents of 8 bits become 16-bit ones times their scales, rounded once, in two warps of their own"


@dataclass(frozen=True)
class LatentConfig(LatentSizes, TileConfig):
    """Two halves of the latents, and rotary columns beside them."""

    BM: int = 64
    BN: int = 64
    stages: int = 2
    own_rope: bool = False  # whether rotary columns of queries are in a tensor of their own
    narrow_rope: bool = False  # whether those of keys have 8 bits, as the latents

    @property
    def rope_bytes(self) -> int:
        """Bytes of a key tile's rotary part."""
        return self.element.bytes * self.BN * self.rope

    @property
    def staged_bytes(self) -> int:
        return self.BN * (self.dim_qk if self.narrow_rope else self.dim_v)

    @property
    def landing_bytes(self) -> int:
        """Bytes of an 8-bit tile, and of a 16-bit rotary part that arrives in its slot."""
        return self.staged_bytes + (0 if self.narrow_rope else self.rope_bytes)

    def scale_blocks(self, operand: str) -> int:
        """Latents are values, and have scales always: the product of the rotary parts must have none."""
        return 0 if self.eight_bit is None or operand == "k" else self.eight_bit.blocks("v", self.dim_v)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a key tile."""
        return self.element.bytes * self.BN * self.dim_qk

    @property
    def ring(self) -> Edge:
        return Edge("keys", "load", ("mma",), self.stages, self.tile_bytes)


def choose_latent(problem: Problem, target: Arch, options: PlanOptions = DEFAULT_OPTIONS) -> Choice:
    """Chooses for latent attention of a few tokens over dense or paged keys."""
    config = LatentConfig(problem.element, problem.dim_qk, problem.dim_v, page_size=problem.page_size)
    config = replace(config, own_rope=problem.q_rope > 0)
    bits = eight_bit_of(problem)
    if bits is not None:
        scales = Scales(v=bits.columns("v") or "token")  # also one of all latents, with strides of 0
        config = replace(config, eight_bit=replace(bits, scales=scales), BN=32, stages=3)
        config = replace(config, narrow_rope=problem.narrow_rope)
    why = "64 rows, of 16 lanes in 32: the output's 512 columns take half of tensor memory, so scores fit"
    choice = choice_of("mla", problem, config, target, why, options)
    return choice if problem.kv_dtype is None else replace(choice, reasons=(*choice.reasons, WIDENED))
