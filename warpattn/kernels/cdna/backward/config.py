"""BackwardConfig: the two kernels of a backward of gfx942 or gfx950, and their choice; nothing here imports Triton.

Each kernel holds 128 rows of one side in registers and loops over tiles of the other side:

      side        holds       walks       S [128, walked]    gradients in registers
      queries     Q, dO       K, V        Q · Kᵀ             dQ += dS · K
      keys        K, V        Q, dO       K · Qᵀ             dK += dS · Q,  dV += P · dO

So S and dP are computed twice, seven products instead of five, and in return nothing is added in global memory: there
are no atomic operations and no fp32 copy of dQ, and the same bits in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from warpattn.errors import many
from warpattn.kernels.amd.kv_config import KVBufferConfig
from warpattn.language.nodes import Program
from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.element import ELEMENT_OF, Element
from warpattn.problem.launch import Choice
from warpattn.problem.operands import COPY_RULE

from ..config import Products, RowStrides, pad_dim

HELD = 128  # rows that a workgroup holds: 32 for each of four waves
SEARCH = 64  # query tiles whose spans a wave tests at once, one a lane
SINK_PARTS = 256  # parts of a sink's gradient that are loaded at once


@dataclass(frozen=True)
class SideConfig(Products):
    """Tiles of one of the two kernels."""

    arch: str  # "gfx942" | "gfx950"
    element: Element
    dim_qk: int
    dim_v: int
    side: str  # "queries" | "keys": what a workgroup holds
    walked: int  # rows of a tile of the other side

    waves_m: ClassVar[int] = 4
    waves_n: ClassVar[int] = 1
    instr: ClassVar[int] = HELD // waves_m  # rows and columns of an MFMA
    pack: ClassVar[int] = 1  # query heads of a tile

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return HELD if self.side == "queries" else self.walked

    @property
    def block_n(self) -> int:
        """Keys of a tile."""
        return HELD if self.side == "keys" else self.walked

    @property
    def streams(self) -> tuple[KVBufferConfig, ...]:
        """Buffers in LDS of the walked tiles: K and V, or Q and dO, as the transposed right operand of S and of dP
        ("K"), and as that of the gradients ("V"): K; Q and dO."""
        dims = (self.dim_qk, self.dim_v)
        turned = tuple(self._stream("K", dim) for dim in dims)
        return turned + tuple(self._stream("V", dim) for dim in (dims if self.side == "keys" else dims[:1]))

    @property
    def lds_bytes(self) -> int:
        return sum(stream.lds_bytes for stream in self.streams)

    def _stream(self, operand: str, dim: int) -> KVBufferConfig:
        padded = pad_dim(dim)
        strip = padded if operand == "K" else self.walked
        return KVBufferConfig(
            operand, "registers", self.arch, self.element, self.walked, padded, dim, strip, 1, self.waves, self.element
        )


@dataclass(frozen=True)
class BackwardConfig:
    """Both kernels of a backward."""

    queries: SideConfig
    keys: SideConfig


@dataclass(frozen=True)
class BackwardTraits:
    """Compile-time parameters of the kernels beside their tiles."""

    sequence: str  # "dense" | "ragged"
    has_dlse: bool
    has_dsinks: bool

    @property
    def ragged_queries(self) -> bool:
        """Whether queries of sequences are laid end to end."""
        return self.sequence == "ragged"


class BackwardPrograms(NamedTuple):
    """The mask, the score and the score's derivative that a kernel is compiled for."""

    mask: Program
    score: Program | None
    slope: Program | None  # None: 1

    @property
    def keys(self) -> tuple[Any, ...]:
        """The programs' keys."""
        return tuple(None if program is None else program.key for program in self)


class BackwardShape(NamedTuple):
    """The integers of a launch: the host fills in values, kernels read fields by name."""

    seq_q: Any  # or all queries, where they are end to end
    seq_k: Any
    heads_q: Any
    heads_kv: Any
    group: Any  # query heads per key head
    m_tiles: Any  # tiles of HELD rows of the longest sequence, queries or keys
    tiles: Any  # workgroups
    blocks: Any  # of HELD rows that a head has in `RowNumbers`


class Reads(NamedTuple):
    """Operands of both kernels."""

    q: Any
    k: Any
    v: Any
    dout: Any


class ReadStrides(NamedTuple):
    """Strides of `Reads`."""

    q: RowStrides
    k: RowStrides
    v: RowStrides
    dout: RowStrides


class QueryStrides(NamedTuple):
    """Strides of what else the kernel of the queries reads and writes."""

    out: RowStrides
    dq: RowStrides


class KeyStrides(NamedTuple):
    """Strides of what the kernel of the keys writes."""

    dk: RowStrides
    dv: RowStrides


class RowNumbers(NamedTuple):
    """What the kernel of the queries leaves for that of the keys, fp32 (heads, blocks * HELD): of each row
    lse * log2(e), infinite where nothing is visible, and delta = Σ dout · out - dlse. Where delta is not finite
    it is 0 instead and the first the lowest number, so that P is infinite where the row sees a key, and 0 elsewhere."""

    top: Any
    delta: Any


class Statistics(NamedTuple):
    """What the forward and the caller know of each row, fp32 (batch, heads_q, seq_q) or (heads_q, all queries), and the
    sinks (heads_q,)."""

    lse: Any
    dlse: Any
    sinks: Any


class QueryResults(NamedTuple):
    """What the kernel of the queries writes beside `RowNumbers`: dq, and parts of the sinks' gradients, fp32 (batch,
    heads_q, tiles of a head)."""

    dq: Any
    dsinks: Any


class KeyResults(NamedTuple):
    """What the kernel of the keys writes."""

    dk: Any
    dv: Any


def choose(problem: Problem, target: Arch, deterministic: bool = False) -> Choice:
    """The choice for the gradients of a dense or ragged `problem`, which have the same bits in every run anyway."""
    config, why = choose_config(problem, target.name)
    heads = problem.batch * problem.heads_kv
    group = problem.heads_q // problem.heads_kv
    grid = (heads * group * -(-problem.seq_q // HELD), heads * -(-problem.seq_k // HELD))
    numbers = number_blocks(problem) * HELD * problem.heads_q * (1 if problem.kind == "ragged" else problem.batch)

    def lines() -> tuple[str, ...]:
        return (
            *(_line(side, count) for side, count in zip((config.queries, config.keys), grid, strict=True)),
            f"workspace: {8 * numbers:,} bytes for two numbers of each row",
        )

    reasons = (
        why,
        "S and dP are computed for dQ and again for dK and dV: no atomic operations, the same bits in every run",
        "the query heads of a key head are walked in one workgroup: dK and dV need no second pass",
        "tiles of one key head go to one XCD, whose L2 then holds its keys and queries",
        COPY_RULE,
    )
    return Choice("backward", config, grid, lines, reasons)


def choose_config(problem: Problem, arch: str) -> tuple[BackwardConfig, str]:
    """The configuration for a problem, and one sentence why."""
    sizes = (arch, ELEMENT_OF[problem.dtype], problem.dim_qk, problem.dim_v)
    wide = max(problem.dim_qk, problem.dim_v) > 64
    keys = 32 if wide else 64
    config = BackwardConfig(SideConfig(*sizes, "queries", keys), SideConfig(*sizes, "keys", 32))
    kept = "dK and dV of 128 keys take 128 of a lane's 512 registers, K and V 64" if wide else "two waves fit on a SIMD"
    return config, f"{'head dim > 64' if wide else 'head dim <= 64'}: {kept}, tiles of 32 queries"


def number_blocks(problem: Problem) -> int:
    """Blocks of HELD rows that a head has in `RowNumbers`. Sequence b of those end to end begins at a multiple of HELD,
    at (cu_q[b] + b * HELD) rounded down, so that no lengths are added up."""
    if problem.kind == "ragged":
        return problem.seq_q // HELD + problem.batch
    return -(-problem.seq_q // HELD)


def _line(side: SideConfig, count: int) -> str:
    other = "keys" if side.side == "queries" else "queries"
    return (
        f"{side.side}: {many(count, 'tile')} of {HELD}, {many(side.waves, 'wave')}, against {side.walked} {other} at a "
        f"time, 32 x 32 MFMA, {side.lds_bytes} bytes of LDS"
    )
