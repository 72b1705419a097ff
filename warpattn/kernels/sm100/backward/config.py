"""BackwardConfig: tiles, rings, registers and tensor memory of the Blackwell backward kernel, and its choice.

Nothing in this file imports Triton. A CTA owns 128 keys of a key head and walks the query tiles that see them:

    load     ── Q, row maxima ─▶ Q ring,  dO, row sums ─▶ dO ring,  K, V
    mma      S = K · Qᵀ   dP = V · dOᵀ   dV += P · dO   dK += dS · Q   dQ = dSᵀ · K
    weigh    S ─▶ P;  dV to global memory          derive   P, dP ─▶ dS;  dK to global memory
    reduce   dQ, added to fp32 in global memory by TMA

Everything that a product writes has columns of tensor memory of its own, so that no product waits for a tile that
another one reads:

      columns, M queries     S  M │ dP  M │ P  M/2 │ dQ  64 │ dV  D │ dK  D
      D 64, M 128              128     128       64      64      64      64    512
      D 128, M 64               64      64       32      64     128     128    480

dQ of 64 queries is computed transposed, Kᵀ · dS, whose rows are the columns of K: products have 128 rows then, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from warpattn.kernels.topology import Edge, Role, Signal, Topology
from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.launch import Choice

from ...nvidia.backward.arguments import STAGES, VISIT_FIELDS, VISITS
from ...nvidia.backward.order import key_tile_choice
from ...nvidia.backward.tiles import BackwardTiles, problem_fields

KEYS = 128  # of a CTA: lanes of tensor memory
DS_SLOTS = 2  # of dS: dP, of which the next one is made, is complete behind dQ of the last one but one
PART = 64  # columns of S or dP in registers at a time
# The first role has the registers that the others leave over; mma and load share a warpgroup.
ROLES = (
    Role("weigh", 4, 176),
    Role("derive", 4, 168),
    Role("reduce", 4, 120),
    Role("mma", 1, 48),
    Role("load", 1, 48),
)


@dataclass(frozen=True)
class BackwardConfig(BackwardTiles):
    """Tile sizes of one compiled kernel."""

    @cached_property
    def persistent(self) -> bool:
        """Whether a CTA takes further key tiles: dV and dK leave through the memory of V and K."""
        return False

    @cached_property
    def rows(self) -> int:
        """Keys of a TMA box."""
        return KEYS

    @cached_property
    def key_parts(self) -> int:
        """Boxes of the keys."""
        return 1

    @cached_property
    def dq_cols(self) -> int:
        """Columns of dQ that are added at a time: all."""
        return self.padded

    @cached_property
    def transposed(self) -> bool:
        """Whether tensor memory has a lane for each column of dQ, not for each row."""
        return self.block_m < KEYS

    @cached_property
    def dq_shape(self) -> tuple[int, int]:
        """Lanes and columns of dQ in tensor memory."""
        return (self.padded, self.block_m) if self.transposed else (self.block_m, self.padded)

    @cached_property
    def tmem_columns(self) -> int:
        """Columns of tensor memory, of which P takes half a one for each query."""
        return 2 * self.block_m + self.block_m // 2 + self.dq_shape[1] + 2 * self.padded

    @cached_property
    def topology(self) -> Topology:
        keys, tile = self.key_bytes(self.padded), self.row_bytes(self.padded)
        edges = (
            Edge("K", "load", ("weigh", "mma"), 1, keys),
            Edge("V", "load", ("mma",), 1, keys),
            Edge("Q", "load", ("weigh", "mma"), STAGES, tile),
            Edge("dO", "load", ("derive", "mma"), STAGES, tile),
        )
        mma, weigh, derive = (("mma",),), (("weigh",),), (("derive",),)
        signals = (
            Signal("S", mma), Signal("S read", derive), Signal("dP", mma), Signal("P", weigh),
            Signal("P read", (("derive", "mma"),)), Signal("dS", DS_SLOTS * derive), Signal("dQ", mma),
            Signal("dQ read", (("reduce",),)), Signal("sums", mma), Signal("keys", weigh),
        )  # fmt: skip
        ds = DS_SLOTS * self.element.bytes * self.block_n * self.block_m
        return Topology(ROLES, edges, ds + 4 * self.block_m * self.dq_cols + 4 * VISITS * VISIT_FIELDS, signals)


def choose(problem: Problem, target: Arch, deterministic: bool = False) -> Choice:
    """The choice for the gradients of a dense or ragged `problem`."""
    config, why = choose_config(problem, deterministic)
    memory = f"tensor memory: {config.tmem_columns} of 512 columns, for S, dP, P, dQ, dV and dK one after the other"
    return key_tile_choice(problem, config, why, target, memory)


def choose_config(problem: Problem, deterministic: bool = False) -> tuple[BackwardConfig, str]:
    """The configuration for a problem, and one sentence why."""
    fields = problem_fields(problem, KEYS, deterministic)
    if max(problem.dim_qk, problem.dim_v) > 64:
        why = "head dim <= 128: 64 queries a tile, so that tensor memory has room for dQ beside dV and dK"
        return BackwardConfig(**fields, block_m=64), why
    return BackwardConfig(**fields, block_m=128), "head dim <= 64: 128 queries a tile fill tensor memory"
