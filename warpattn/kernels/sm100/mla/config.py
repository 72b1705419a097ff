"""LatentConfig: the shape of the Blackwell decode kernel for latent attention (MLA, absorbed), as a value.

A token's key is [latent 512 | rotary 64] and its value the latent again. With 128 rows the output would fill tensor
memory; 64 rows take 16 lanes of every 32, so that the output's 512 columns take 256 and scores fit beside them:

      shared memory   queries 64 × 576: 72 KiB, P 8 KiB, key tiles 64 × 576: 72 KiB a slot, two slots
      tensor memory   O 64 × 512: 256 columns, S 64 × 64: 64 columns, of 512

Nothing in this file imports Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

from warpattn.kernels.nvidia.latent_sizes import LatentSizes
from warpattn.kernels.topology import Edge
from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.launch import DEFAULT_OPTIONS, Choice, PlanOptions

from ..tile import TileConfig, choice_of


@dataclass(frozen=True)
class LatentConfig(LatentSizes, TileConfig):
    """Two halves of the latents, and rotary columns beside them."""

    BM: int = 64
    BN: int = 64
    stages: int = 2

    @property
    def tile_bytes(self) -> int:
        """Of a key tile."""
        return self.element.bytes * self.BN * self.dim_qk

    @property
    def ring(self) -> Edge:
        return Edge("keys", "load", ("mma",), self.stages, self.tile_bytes)


def choose_latent(problem: Problem, target: Arch, options: PlanOptions = DEFAULT_OPTIONS) -> Choice:
    """The choice for latent attention of a few tokens over dense or paged keys."""
    config = LatentConfig(problem.element, problem.dim_qk, problem.dim_v, page_size=problem.page_size)
    why = "64 rows, of 16 lanes in 32: the output's 512 columns take half of tensor memory, so scores fit"
    return choice_of("mla", problem, config, target, why, options)
