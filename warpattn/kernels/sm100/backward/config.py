"""BackwardConfig: tiles, rings, registers and tensor memory of the Blackwell backward kernel, and its choice.

Nothing in this file imports Triton. A CTA owns keys of a key head and loops over the query tiles that see them:

    load     ── Q, row maxima ─▶ Q ring,  dO, row sums ─▶ dO ring,  K, V
    mma      S = K · Qᵀ   dP = V · dOᵀ   dV += P · dO   dK += dS · Q   dQ = dSᵀ · K
    weigh    S ─▶ P;  dV to global memory          derive   P, dP ─▶ dS;  dK to global memory
    reduce   dQ, added to fp32 in global memory by TMA

Everything that a product writes has columns of tensor memory of its own, so that no product waits for a tile that
another one reads:

      columns, M queries, N keys    S  M │ dP  M │ P  M/2 │ dQ     │ dV     │ dK
      D 64, M 128, N 128             128     128       64       64       64       64    512
      D 128, M 64, N 128              64      64       32       64      128      128    480
      D 256, M 64, N 64               64      64        –      128      128      128    512

dQ of 64 queries and 128 keys is computed transposed, Kᵀ · dS, whose rows are the columns of K: products have 128 rows
then, too. Above head dim 128 dV and dK of 128 keys would fill tensor memory, and no room is in shared memory for more
than 64 queries and keys: everything has 64 rows, which take 16 lanes of every 32, so that D columns take D / 2. P
would have to be in the lanes of what it is multiplied into, so it is in shared memory.
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

LANES = 128  # lanes of tensor memory
PART = 64  # columns of S or dP in registers at a time


def roles(weigh: int, derive: int, reduce: int, single: int) -> tuple[Role, ...]:
    """The roles with registers a thread of each; `single`: mma and load, which share a warpgroup. The first role gets
    those that the others leave over of 512."""
    return (
        Role("weigh", 4, weigh), Role("derive", 4, derive), Role("reduce", 4, reduce), Role("mma", 1, single),
        Role("load", 1, single),
    )  # fmt: skip


ROLES = roles(176, 168, 120, 48)
WIDE_ROLES = roles(152, 128, 104, 128)  # mma keeps the addresses of 16 steps of K and of V, others half a tile


@dataclass(frozen=True)
class BackwardConfig(BackwardTiles):
    """Tile sizes of one compiled kernel."""

    @cached_property
    def persistent(self) -> bool:
        """Whether a CTA does several key tiles. No: dV and dK are staged in the memory of V and K."""
        return False

    @cached_property
    def rows(self) -> int:
        """Keys of a CTA."""
        return LANES // 2 if self.wide else LANES

    @cached_property
    def key_parts(self) -> int:
        """Boxes of the keys."""
        return 1

    @cached_property
    def ds_slots(self) -> int:
        """Slots of dS. With two, one is free when the next dP is complete, which follows dQ of the last tile but one;
        with one, `derive` waits for dQ of the last tile."""
        return 1 if self.wide else STAGES

    @cached_property
    def transposed(self) -> bool:
        """Whether tensor memory has a lane for each column of dQ, not for each row."""
        return self.block_m < self.rows

    @cached_property
    def dq_shape(self) -> tuple[int, int]:
        """Lanes and columns of dQ in tensor memory."""
        return (self.padded, self.block_m) if self.transposed else (self.block_m, self.padded_qk)

    @cached_property
    def dq_cols(self) -> int:
        """Columns of dQ that are added at a time: all, or as many as fit in shared memory."""
        return 64 if self.wide else self.padded

    @cached_property
    def dq_parts(self) -> int:
        return -(-self.dim_qk // self.dq_cols)

    @cached_property
    def tmem_columns(self) -> int:
        """Columns of tensor memory; P takes half a column per query."""
        widths = (self.block_m, self.block_m, self.dq_shape[1], self.padded_v, self.padded_qk)
        return sum(map(self.block_columns, widths)) + (0 if self.wide else self.block_m // 2)

    def block_columns(self, cols: int) -> int:
        """Columns of tensor memory of an fp32 tile; with 64 rows half of the tile is in the unused lanes."""
        return max(64, cols // 2) if self.wide else cols

    @cached_property
    def topology(self) -> Topology:
        qk, v = self.padded_qk, self.padded_v
        edges = (
            Edge("K", "load", ("weigh", "mma"), 1, self.key_bytes(qk)),
            Edge("V", "load", ("mma",), 1, self.key_bytes(v)),
            Edge("Q", "load", ("weigh", "mma"), STAGES, self.row_bytes(qk)),
            Edge("dO", "load", ("derive", "mma"), STAGES, self.row_bytes(v), released_with="Q"),
        )
        mma, weigh, derive = (("mma",),), (("weigh",),), (("derive",),)
        signals = (
            Signal("S", mma), Signal("S read", derive), Signal("dP", mma), Signal("P", weigh),
            Signal("P read", (("derive", "mma"),)), Signal("dS", self.ds_slots * derive), Signal("dQ", mma),
            Signal("dQ read", (("reduce",),)), Signal("sums", mma), Signal("keys", weigh),
        )  # fmt: skip
        tiles = self.ds_slots + (1 if self.wide else 0)  # of dS and P
        private = tiles * self.element.bytes * self.block_n * self.block_m + 4 * self.block_m * self.dq_cols
        return Topology(WIDE_ROLES if self.wide else ROLES, edges, private + 4 * VISITS * VISIT_FIELDS, signals)


def choose(problem: Problem, target: Arch, deterministic: bool = False) -> Choice:
    """Chooses for the gradients of a dense or ragged `problem`."""
    config, why = choose_config(problem, deterministic)
    tiles = "S, dP, dQ, dV and dK" if config.wide else "S, dP, P, dQ, dV and dK"
    memory = f"tensor memory: {config.tmem_columns} of 512 columns, for {tiles} one after the other"
    return key_tile_choice(problem, config, why, target, memory)


def choose_config(problem: Problem, deterministic: bool = False) -> tuple[BackwardConfig, str]:
    """The configuration for a problem, and one sentence why."""
    widest = max(problem.dim_qk, problem.dim_v)
    fields = problem_fields(problem, LANES // 2 if widest > 128 else LANES, deterministic)
    if widest > 128:
        why = "head dim > 128: 64 keys and 64 queries a tile, of which dV and dK take half of tensor memory"
        return BackwardConfig(**fields, block_m=64), why
    if widest > 64:
        why = "head dim <= 128: 64 queries a tile, so that tensor memory has room for dQ beside dV and dK"
        return BackwardConfig(**fields, block_m=64), why
    return BackwardConfig(**fields, block_m=128), "head dim <= 64: 128 queries a tile fill tensor memory"
