"""BackwardConfig: tiles, rings and registers of the Hopper backward kernel, and its choice for a problem.

This file imports no Triton. A CTA owns 128 keys of a key head, loops over query tiles that see them, and
goes on with other keys:

    load       ── Q, row maxima ─▶ Q ring ──┬─▶ attend 0   keys  0.. 63: S, P, dP, dS; dV and dK stay in registers
               ── dO, row sums ──▶ dO ring ─┴─▶ attend 1   keys 64..127
    attend 0, 1 ── dS ─▶ dS ring ─▶ reduce    dQ = dS · K, added to fp32 in memory by TMA

Above head dim 128 one warpgroup has no registers for both dK and dV of 64 keys, so a CTA owns 64 keys and each
warpgroup one of the two gradients:

    weigh      S, P; dV += P · dO       ── P ─▶ derive
    derive     dP, dS; dK += dS · Q     ── dS ─▶ reduce

If dK and dV together have at most 320 columns, a CTA owns 128 keys. Then there is no `reduce`; the attending warpgroups
get its registers and add dQ themselves:

    attend 0, 1 ── dS ─▶ dS ring ─▶ attend 0, 1    dQ = dS · K, every other 64 columns each

Two or three more warps make CTAs add to a dQ tile after the first one, which stores it, or for deterministic gradients
in a fixed order (`ordered.py`):

    turn       waits for the CTA's turn         ── turns ─▶ add or attend 0, 1, and pass
    reduce     dQ = dS · K                      ── dQ ────▶ add
    add        dQ to global memory              ── added ─▶ pass, which lets the next CTA add
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from warpattn.kernels.topology import Edge, Role, Topology
from warpattn.language.nodes import reads
from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.launch import Choice
from warpattn.problem.operands import is_masked, sees_first_keys

from ...nvidia.backward.arguments import STAGES, TURN_FIELDS, VISIT_FIELDS, VISITS
from ...nvidia.backward.order import key_tile_choice
from ...nvidia.backward.tiles import BackwardTiles, problem_fields
from ..prefill.config import CONSUMER_ROWS
from ..prefill.exact_values import STEP, widths_of

CONSUMERS = 2
DQ_COLUMNS = 64  # columns of dQ that are computed and added at a time
SUM_COLUMNS = 320  # columns of dK and dV together that fit in 160 of a thread's 240 registers, for 64 keys
MASK_KEEPS = slice(0, 1)  # of a mask's program: whether a key is visible, without the span
SHORT_ROWS = 2048  # see `short_rows`
FEW_KEYS, SHORT_KEYS = 4096, 512  # of a sequence, see `claims_pay`


class RoleRegisters(NamedTuple):
    """Registers a thread of each kind of role, after reallocation."""

    attend: int
    reduce: int
    load: int


@dataclass(frozen=True)
class BackwardConfig(BackwardTiles):
    """Tile sizes and resources of one compiled kernel."""

    attend_adds: bool = False  # see `add.py`; above head dim 128

    @cached_property
    def registers(self) -> RoleRegisters:
        """Registers of the roles: all that an SM has."""
        if self.attend_adds:
            return RoleRegisters(240, 0, 24)
        if self.deterministic and self.persistent:  # the loading role computes turns, `reduce` does not add
            return RoleRegisters(208, 64, 32)
        return RoleRegisters(208, 72, 24)

    @cached_property
    def dq_cols(self) -> int:
        return DQ_COLUMNS

    @cached_property
    def by_product(self) -> bool:
        """Whether warpgroups share keys and differ in products (by_product.py)."""
        return self.wide and not self.attend_adds

    @cached_property
    def padded_qk(self) -> int:
        return DQ_COLUMNS * -(-self.dim_qk // DQ_COLUMNS) if self.attend_adds else self.whole_qk

    @cached_property
    def padded_v(self) -> int:
        return DQ_COLUMNS * -(-self.dim_v // DQ_COLUMNS) if self.attend_adds else self.whole_v

    def box(self, cols: int) -> int:
        return DQ_COLUMNS if self.attend_adds else cols

    @cached_property
    def persistent(self) -> bool:
        """Whether a CTA does several key tiles. CTAs in turns that add dQ in attending warpgroups would be 1.03 to 1.08
        times as fast (H200), but under a mask the assembler spills what the polls need."""
        return not self.by_product and not (self.attend_adds and self.deterministic)

    @cached_property
    def values_first(self) -> bool:
        """Whether a query tile begins with dV, not dP, and hands dS over after dK has begun, so that no product waits
        for loads and stores. At head dim 64 that is 3 to 6 % slower: P and dS, 32 registers each, are moved first."""
        return self.padded > 64

    @cached_property
    def widths_qk(self) -> tuple[int, ...]:
        """Widths of the column parts in which products take Q and K."""
        return box_widths(self.padded_qk) if self.attend_adds else self.sum_widths(self.dim_qk)

    @cached_property
    def widths_v(self) -> tuple[int, ...]:
        return box_widths(self.padded_v) if self.attend_adds else self.sum_widths(self.dim_v)

    @cached_property
    def exact_sums(self) -> bool:
        """Whether dK and dV are products of exactly their columns, rounded up to 16 (../exact_columns.py); not where
        that saves none: at head dims 88 and 96 it is no faster (H200)."""
        dims = self.dim_qk, self.dim_v
        saves = any(whole_steps(dim) < sum(product_widths(dim)) for dim in dims)
        return self.padded == 128 and not self.wide and max(dims) <= 112 and saves

    def sum_widths(self, dim: int) -> tuple[int, ...]:
        """Widths of the column parts of a gradient that warpgroups sum in registers."""
        return widths_of(whole_steps(dim)) if self.exact_sums else product_widths(dim)

    @cached_property
    def key_parts(self) -> int:
        """Warpgroups that divide the keys."""
        return 1 if self.by_product else CONSUMERS

    @cached_property
    def key_stages(self) -> int:
        """Slots of the K ring. With two, K of the next key tile arrives while this one is attended to; above head dim
        128 there is no room."""
        return 2 if self.persistent and not self.wide else 1

    @cached_property
    def stages_in_ds(self) -> bool:
        """Whether dV and dK leave through a slot of dS, which is large enough up to 64 columns. Elsewhere they leave
        through the slot of V, whose next values then arrive later, or through those of dQ."""
        return self.padded == 64

    @cached_property
    def ds_stages(self) -> int:
        """Slots of the dS ring."""
        return 1 if self.by_product else STAGES

    @cached_property
    def rows(self) -> int:
        """Keys of a warpgroup."""
        return CONSUMER_ROWS

    @cached_property
    def adds(self) -> tuple[str, ...]:
        """The roles that add dQ."""
        if self.attend_adds:
            return self.attending
        return ("add",) if self.counted else ("reduce",)

    @cached_property
    def attending(self) -> tuple[str, ...]:
        """The roles that compute dK and dV."""
        return ("weigh", "derive") if self.by_product else tuple(f"attend {wg}" for wg in range(CONSUMERS))

    @cached_property
    def dq_buffers(self) -> int:
        """Buffers from which TMA adds dQ to global memory."""
        return 1 if self.by_product else CONSUMERS

    @cached_property
    def dq_copies(self) -> int:
        """Sums of dQ among which deterministic CTAs are divided. A turn takes 1.3 times as long as a query tile (H100),
        and CTAs reach a dQ tile `block_n / block_m` query tiles apart. If that is 1, turns of one sum would delay them,
        so there are two; also where heads of a large group run side by side and begin at the same tile."""
        together = self.side_by_side and not self.mirrored
        return 2 if self.deterministic and (together or self.block_n < 2 * self.block_m) else 1

    @cached_property
    def dq_rows(self) -> int:
        return CONSUMER_ROWS

    @cached_property
    def dq_row_parts(self) -> int:
        return self.block_m // self.dq_rows

    @cached_property
    def dq_parts(self) -> int:
        """Parts of a tile of dQ, first those of its first rows."""
        return self.dq_row_parts * -(-sum(self.widths_qk) // self.dq_cols)

    @cached_property
    def topology(self) -> Topology:
        attend = self.attending
        roles = [Role(name, 4, self.registers.attend) for name in attend]
        reduce = () if self.attend_adds else ("reduce",)
        adding = () if self.attend_adds else ("add",)
        ordered = ("turn", *adding, "pass") if self.counted else ()
        roles += [Role(name, 4, self.registers.reduce) for name in reduce]
        roles += [Role(name, 1, self.registers.load) for name in ("load", *ordered)]
        qk, v = self.padded_qk, self.padded_v
        slot = self.element.bytes * self.block_n * self.block_m
        edges = [
            Edge("K", "load", (*(attend[:1] if self.by_product else attend), *reduce), self.key_stages,
                 self.key_bytes(qk)),
            Edge("V", "load", attend[1:] if self.by_product else attend, 1, self.key_bytes(v)),
            Edge("Q", "load", (*attend, *ordered[:1]), STAGES, self.row_bytes(qk)),
            Edge("dO", "load", attend, STAGES, self.row_bytes(v)),
            Edge("dS", attend[-1], reduce or attend, self.ds_stages, slot),
        ]
        if self.by_product:
            edges.append(Edge("P", "weigh", ("derive",), self.ds_stages, slot))
        added = 4 * self.dq_rows * self.dq_cols
        private = 4 * VISITS * VISIT_FIELDS
        if self.counted:
            edges.append(Edge("turns", "turn", (*self.adds, "pass"), STAGES, 4 * TURN_FIELDS))
            edges.append(Edge("added", self.adds[-1], ("pass",), STAGES, 0))
        if self.counted and not self.attend_adds:
            edges.append(Edge("dQ", "reduce", self.adds, self.dq_buffers, added))
        else:
            private += self.dq_buffers * added
        return Topology(tuple(roles), tuple(edges), private)


def add_in_attend(dim_qk: int, dim_v: int) -> bool:
    """Whether attending warpgroups add dQ: above head dim 128 if registers hold dK and dV of 64 keys beside dQ. Not up
    to 128, with two parts of dQ: the assembler then waits after every product."""
    return dim_qk > 128 and sum(DQ_COLUMNS * -(-dim // DQ_COLUMNS) for dim in (dim_qk, dim_v)) <= SUM_COLUMNS


def box_widths(padded: int) -> tuple[int, ...]:
    """Widths of column parts that are TMA boxes."""
    return (DQ_COLUMNS,) * (padded // DQ_COLUMNS)


def product_widths(dim: int) -> tuple[int, ...]:
    """Widths of the column parts in which products take a head dim, powers of two: 192 is 128 and 64. At most 128: a
    kernel of 512 threads has no registers for products of 256 columns."""
    return next(widths for widths in ((64,), (64, 32), (128,), (128, 64), (128, 128)) if dim <= sum(widths))


def whole_steps(dim: int) -> int:
    """Columns of a head dim that products have, a multiple of 16."""
    return -(-dim // STEP) * STEP


def reads_place(score: Hashable) -> bool:
    """Whether a score depends on more than q·k: on indices or captured tensors."""
    read = reads(score)
    return bool(read.tensors or read.symbols - {"s"})


def choose(problem: Problem, target: Arch, deterministic: bool = False) -> Choice:
    """Chooses for the gradients of a dense or ragged `problem`."""
    config, why = choose_config(problem, deterministic)
    why += "; dK and dV are products of exactly their columns" * config.exact_sums
    return key_tile_choice(problem, config, why, target)


def choose_config(problem: Problem, deterministic: bool = False) -> tuple[BackwardConfig, str]:
    """The configuration for a problem, and one sentence why."""
    adds = add_in_attend(problem.dim_qk, problem.dim_v)
    narrow = adds or max(problem.dim_qk, problem.dim_v) <= 128
    fields = problem_fields(problem, CONSUMER_ROWS * (CONSUMERS if narrow else 1), deterministic)
    rows, why = query_rows(problem, deterministic)
    claims = not deterministic and claims_pay(problem, rows)
    why += "; the first CTA at a tile of dQ stores it, which saves writing zeros" * claims
    return BackwardConfig(**fields, block_m=rows, claims=claims, attend_adds=adds), why


def query_rows(problem: Problem, deterministic: bool) -> tuple[int, str]:
    """Query rows of a tile, and one sentence why."""
    widest, few = max(problem.dim_qk, problem.dim_v), "64 queries a tile"
    if add_in_attend(problem.dim_qk, problem.dim_v):
        return 64, (
            "head dims of at most 320 columns together: 64 keys a warpgroup, which have 240 registers and add dQ, too"
        )
    if widest > 128:
        return 64, "head dim > 128: 64 keys, dV in one warpgroup and dK in the other; dQ 64 columns at a time"
    if widest > 64:
        return 64, f"head dim <= 128: {few}; dK and dV of 64 keys take 128 registers of a warpgroup's 208"
    if is_masked(problem) and (short := short_rows(problem, deterministic)):
        return 64, f"head dim <= 64, a mask and at most {short} queries a sequence: {few}"
    if problem.score is not None and reads_place(problem.score):
        return 64, f"head dim <= 64 and a score that depends on places or tensors: {few}, 128 spill"
    if len(reads(problem.mask, MASK_KEEPS).tensors) > 1:
        return 64, f"head dim <= 64 and a mask that reads several tensors: {few}, 128 spill"
    return 128, "head dim <= 64: 128 queries a tile; dQ of 64 at a time, so that `reduce` needs few registers"


def claims_pay(problem: Problem, rows: int) -> bool:
    """Whether storing dQ first is faster than zeroing it, with tiles of `rows` queries (H200). At 128 columns it is
    1.00 to 1.11 times as fast. At 64 a mask leaves too few tiles of 128 queries to hide the wait for what another CTA
    stores (0.90 to 0.99; with 64 queries a tile packed sequences 1.04, short ones 1.03 to 1.06), and zeros are a small
    part where keys are many. Warpgroups that add dQ themselves wait for it before they attend to the next tile: 0.97 to
    1.01, short sequences 1.03 to 1.26. Products in different warpgroups (by_product.py) have one buffer of dQ: 0.96 to
    1.01."""
    widest = max(problem.dim_qk, problem.dim_v)
    ragged = problem.kind == "ragged"
    sequences = problem.batch if ragged else 1
    if add_in_attend(problem.dim_qk, problem.dim_v):
        return problem.seq_k <= SHORT_KEYS * sequences
    if widest > 64:
        return widest <= 128
    if is_masked(problem):
        return rows == CONSUMER_ROWS and (ragged or short_rows(problem, False) > 0)
    return problem.seq_k <= FEW_KEYS * sequences


def short_rows(problem: Problem, deterministic: bool) -> int:
    """The most queries a sequence (in packed ones, on average) with which 64 queries a tile are faster under a mask at
    head dim 64, or 0 if this problem has more (H200). Where rows see keys from the first on, and without turns, fewer
    queries make enough tiles of 128."""
    if problem.kind == "ragged":
        return SHORT_ROWS if problem.seq_q <= SHORT_ROWS * problem.batch else 0
    most = SHORT_ROWS
    if sees_first_keys(problem):
        most //= 2 if deterministic else 4
    return most if problem.seq_q <= most else 0
