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

from warpattn.errors import AttentionError
from warpattn.kernels.topology import Edge, Role, Signal, Topology
from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.element import ELEMENT_OF, Element
from warpattn.problem.launch import Choice
from warpattn.problem.operands import is_masked

from ...nvidia.backward.arguments import STAGES, VISIT_FIELDS, VISITS
from ...nvidia.backward.order import key_tile_choice

KEYS = 128  # of a CTA: lanes of tensor memory
DS_SLOTS = 2  # of dS: dP, of which the next one is made, is complete behind dQ of the last one but one
PART = 64  # columns of S or dP in registers at a time
MAX_DIM = 128
MOST_TOGETHER = 96  # key tiles of a head whose CTAs certainly run at once, of 148 SMs
# The first role has the registers that the others leave over; mma and load share a warpgroup.
ROLES = (
    Role("weigh", 4, 176),
    Role("derive", 4, 168),
    Role("reduce", 4, 120),
    Role("mma", 1, 48),
    Role("load", 1, 48),
)


@dataclass(frozen=True)
class BackwardConfig:
    """Tile sizes of one compiled kernel. Both head dims are padded to the same size."""

    element: Element
    dim_qk: int
    dim_v: int
    block_m: int  # query rows of a tile
    rotate: bool  # begin with the query tile beside the own keys instead of the first
    ragged: bool  # sequences end to end
    deterministic: bool  # CTAs add to a tile of dQ in a fixed order

    @cached_property
    def persistent(self) -> bool:
        """Whether a CTA takes further key tiles: dV and dK leave through the memory of V and K."""
        return False

    @cached_property
    def padded(self) -> int:
        """Columns of Q, K, V and dO in shared memory."""
        return 64 if max(self.dim_qk, self.dim_v) <= 64 else 128

    @cached_property
    def padded_qk(self) -> int:
        return self.padded

    @cached_property
    def padded_v(self) -> int:
        return self.padded

    @cached_property
    def rows(self) -> int:
        """Keys of a TMA box."""
        return KEYS

    @cached_property
    def block_n(self) -> int:
        """Keys of a CTA."""
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

    def key_bytes(self, cols: int) -> int:
        """Of the keys, or the values, of a CTA, with `cols` columns."""
        return self.element.bytes * self.block_n * cols

    def row_bytes(self, cols: int) -> int:
        """Of a tile of Q or dO with a number for each row."""
        return (self.element.bytes * cols + 4) * self.block_m

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
    """The choice for the gradients of a dense or ragged `problem`; AttentionError for others."""
    if problem.kind not in ("dense", "ragged"):
        raise AttentionError(f"the keys are {problem.kind}; gradients on sm100 take dense and ragged ones")
    config, why = choose_config(problem, deterministic)
    memory = f"tensor memory: {config.tmem_columns} of 512 columns, for S, dP, P, dQ, dV and dK one after the other"
    return key_tile_choice(problem, config, why, target, memory)


def choose_config(problem: Problem, deterministic: bool = False) -> tuple[BackwardConfig, str]:
    """The configuration for a problem, and one sentence why."""
    dims = (problem.dim_qk, problem.dim_v)
    if max(dims) > MAX_DIM:
        rule = f'gradients on sm100 take multiples of 8 up to {MAX_DIM}; use backend="reference" for others'
        raise AttentionError(f"the head dims are {dims[0]} and {dims[1]}; {rule}")
    ragged = problem.kind == "ragged"
    # CTAs that go round wait for each other in a circle: those of a head must run at once.
    together = not deterministic or problem.seq_k <= MOST_TOGETHER * KEYS
    flags = (not is_masked(problem) and not ragged and together, ragged, deterministic)
    element = ELEMENT_OF[problem.dtype]
    if max(dims) > 64:
        why = "head dim <= 128: 64 queries a tile, so that tensor memory has room for dQ beside dV and dK"
        return BackwardConfig(element, *dims, 64, *flags), why
    return BackwardConfig(element, *dims, 128, *flags), "head dim <= 64: 128 queries a tile fill tensor memory"
