"""BackwardConfig: tiles, rings and registers of the Hopper backward kernel, and its choice for a problem.

Nothing in this file imports Triton. A CTA owns 128 keys of a key head, walks the query tiles that see them, and takes
the next keys:

    load       ── Q, row maxima ─▶ Q ring ──┬─▶ attend 0   keys  0.. 63: S, P, dP, dS; dV and dK stay in registers
               ── dO, row sums ──▶ dO ring ─┴─▶ attend 1   keys 64..127
    attend 0, 1 ── dS ─▶ dS ring ─▶ reduce    dQ = dS · K, added to fp32 in global memory by TMA

Above head dim 128 one warpgroup has no registers for both dK and dV of 64 keys, so a CTA owns 64 and each warpgroup one
of them:

    weigh      S, P; dV += P · dO       ── P ─▶ derive
    derive     dP, dS; dK += dS · Q     ── dS ─▶ reduce
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from warpattn.errors import AttentionError
from warpattn.kernels.topology import Edge, Role, Topology
from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.element import ELEMENT_OF, Element
from warpattn.problem.launch import Choice
from warpattn.problem.operands import COPY_RULE

from ..prefill.config import CONSUMER_ROWS, is_masked, pad_dim

CONSUMERS = 2
STAGES = 2  # slots of each ring: this tile's and the next one's
VISITS = 2 * STAGES  # records of query tiles: `reduce` reads one while the loader writes that of two tiles later
VISIT_FIELDS = 5  # int32 of a record: first row, query head, flags, turn, key tile (-1: none left)
BEHIND = 1 << 28  # rows and keys past the end of all sequences, of the visit to keys that no query sees
MASKED, MORE, FIRST = 1, 2, 2  # the flags: the tile needs the mask; another tile follows; from bit 2 on, the first key
ROWS = 32  # of a program of the kernels before and after the main one
PADDING = 128  # rows that sequences are padded to where the kernels keep numbers of their own: a query tile at most
CAPTURED_ROWS = 64  # rows, and keys at a time, of a CTA that takes gradients of what a score captured
LANES = 128  # sequences, or parts of a sink's gradient, that are loaded at once
MAX_DIM = 256
SEARCH = 32  # query tiles whose spans the loader tests at once, one a lane


@dataclass(frozen=True)
class BackwardConfig:
    """Tile sizes and resources of one compiled kernel.

    `dq_cols` columns of dQ are computed and added at a time. Unless warpgroups are `by_product`, head dims are padded
    to one size, as dK and dV leave through the same memory.
    """

    element: Element
    dim_qk: int
    dim_v: int
    block_m: int  # query rows of a tile
    dq_cols: int
    attend_registers: int
    reduce_registers: int
    load_registers: int
    rotate: bool  # begin with the query tile beside the own keys instead of the first
    ragged: bool  # sequences end to end
    deterministic: bool  # CTAs add to a tile of dQ in a fixed order

    @cached_property
    def by_product(self) -> bool:
        """Whether warpgroups share the keys and differ in what they compute of them."""
        return self.padded > 128

    @cached_property
    def persistent(self) -> bool:
        """Whether a CTA takes further key tiles. Those of a fixed order wait for each other, so all have to run."""
        return not self.by_product and not self.deterministic

    @cached_property
    def values_first(self) -> bool:
        """Whether a tile begins with dV, not dP, and hands dS over when dK has begun: no product waits for loads and
        stores. At head dim 64 P and dS are 32 registers each, which move before such products: 3 to 6 % slower."""
        return self.padded > 64

    @cached_property
    def padded(self) -> int:
        return max(64, pad_dim(self.dim_qk), pad_dim(self.dim_v))

    @cached_property
    def padded_qk(self) -> int:
        return max(64, pad_dim(self.dim_qk)) if self.by_product else self.padded

    @cached_property
    def padded_v(self) -> int:
        return max(64, pad_dim(self.dim_v)) if self.by_product else self.padded

    @cached_property
    def widths_qk(self) -> tuple[int, ...]:
        """Columns of the parts in which products take Q and K."""
        return product_widths(self.dim_qk)

    @cached_property
    def widths_v(self) -> tuple[int, ...]:
        return product_widths(self.dim_v)

    @cached_property
    def key_parts(self) -> int:
        """Warpgroups' shares of the keys."""
        return 1 if self.by_product else CONSUMERS

    @cached_property
    def ds_stages(self) -> int:
        """Slots of the dS ring, and buffers of dQ."""
        return 1 if self.by_product else STAGES

    @cached_property
    def rows(self) -> int:
        """Keys of a warpgroup."""
        return CONSUMER_ROWS

    @cached_property
    def block_n(self) -> int:
        """Keys of a CTA."""
        return self.key_parts * CONSUMER_ROWS

    def key_bytes(self, cols: int) -> int:
        """Of the keys, or the values, of a CTA, with `cols` columns."""
        return self.element.bytes * self.block_n * cols

    def row_bytes(self, cols: int) -> int:
        """Of a tile of Q or dO with a number for each row."""
        return (self.element.bytes * cols + 4) * self.block_m

    @cached_property
    def dq_buffers(self) -> int:
        """Buffers of dQ on its way to global memory."""
        return min(self.ds_stages, self.dq_parts)

    @cached_property
    def dq_parts(self) -> int:
        return -(-sum(self.widths_qk) // self.dq_cols)

    @cached_property
    def topology(self) -> Topology:
        attend = ("weigh", "derive") if self.by_product else tuple(f"attend {wg}" for wg in range(CONSUMERS))
        roles = [Role(name, 4, self.attend_registers) for name in attend]
        roles += [Role("reduce", 4, self.reduce_registers), Role("load", 1, self.load_registers)]
        qk, v = self.padded_qk, self.padded_v
        slot = self.element.bytes * self.block_n * self.block_m
        edges = [
            Edge("K", "load", (attend[0], "reduce") if self.by_product else (*attend, "reduce"), 1, self.key_bytes(qk)),
            Edge("V", "load", attend[1:] if self.by_product else attend, 1, self.key_bytes(v)),
            Edge("Q", "load", attend, STAGES, self.row_bytes(qk)),
            Edge("dO", "load", attend, STAGES, self.row_bytes(v)),
            Edge("dS", attend[-1], ("reduce",), self.ds_stages, slot),
        ]
        if self.by_product:
            edges.append(Edge("P", "weigh", ("derive",), self.ds_stages, slot))
        staging = 4 * self.dq_buffers * self.block_m * self.dq_cols
        if not self.by_product:  # dV and dK
            staging += self.key_bytes(self.padded)
        return Topology(tuple(roles), tuple(edges), staging + 4 * VISITS * VISIT_FIELDS)


def product_widths(dim: int) -> tuple[int, ...]:
    """Columns of the parts in which products take a head dim, powers of two: 192 are 128 and 64. None has 256, which
    the assembler does not have in a kernel of 512 threads."""
    return next(widths for widths in ((64,), (64, 32), (128,), (128, 64), (128, 128)) if dim <= sum(widths))


class BackwardShape(NamedTuple):
    """The main kernel's `shape` argument, int32."""

    seq_q: Any
    seq_k: Any
    heads_q: Any
    group: Any  # query heads of a key head
    heads_kv: Any  # of a batch entry: a division of the others would be kept by every role, and spilled
    tiles: Any  # key tiles of a head; of all sequences at most where they are end to end
    section: Any  # `KeyTileOrder.section`
    heads: Any  # key heads of all batch entries


class Sequences(NamedTuple):
    """Where sequences end to end begin, int32 (batch + 1,), and the list of their key tiles, see `key_tiles.py`."""

    cu_q: Any
    cu_k: Any
    tiles: Any


class Turns(NamedTuple):
    """`Prepared.turns`, and the blocks of ROWS padded rows of a head, int32."""

    pointer: Any
    blocks: Any


class CapturedShape(NamedTuple):
    """The `shape` argument of the kernel for what a score captured, int32."""

    batch: Any
    seq_q: Any  # or all queries, where they are end to end
    seq_k: Any
    heads_q: Any
    group: Any


class AdjointFunctions(NamedTuple):
    """How a gradient of what a score captured is computed, and where it is added."""

    value: Any  # function of the pair: what its gradient is multiplied with
    index: tuple[Any, ...]  # functions, one for each dimension of the tensor
    sizes: int  # where the tensor's sizes begin in `score_args`
    by_row: bool  # whether the index depends on the row
    by_key: bool
    shared: bool  # whether pairs of a tile may read one element


class RowShape(NamedTuple):
    """The `shape` argument of the kernels before and after the main one, int32."""

    batch: Any
    seq_q: Any  # or all queries, where they are end to end
    padded_q: Any  # rows of shift, delta and the fp32 dq, of each sequence or all
    heads_q: Any


class Statistics(NamedTuple):
    """What the forward and the caller know of each row, fp32 (batch, heads_q, seq_q), and the sinks (heads_q,)."""

    lse: Any
    dlse: Any
    sinks: Any


class Prepared(NamedTuple):
    """fp32 (heads, padded_q) twice, (heads, padded_q, dim), and parts of the sinks' gradients (heads, padded_q / ROWS);
    heads are batch * heads_q, or heads_q where sequences are end to end."""

    shift: Any
    delta: Any
    dq: Any
    dsinks: Any
    turns: Any  # int32 (heads, padded_q / ROWS): CTAs that have added to a tile of dq, at the tile's first block


class Added(NamedTuple):
    """What is left to add up or to round, as in `Prepared`."""

    dq: Any
    dsinks: Any


@dataclass(frozen=True)
class KeyTileOrder:
    """How CTAs are numbered: the key tiles of a section's heads one after the other, of each tile all heads. As many
    heads are a section as run at once, so that CTAs share queries in L2 (with more heads side by side 16 x 1 k takes
    11 % more time on an H100). A causal mask's longest tiles are first, so the last section ends evenly."""

    tiles: int  # of a head
    heads: int  # key heads
    section: int  # heads of a section


def choose(problem: Problem, target: Arch, deterministic: bool = False) -> Choice:
    """The choice for the gradients of a dense or ragged `problem`; AttentionError for others."""
    if problem.kind == "paged":
        raise AttentionError("the keys are paged; gradients take dense and ragged ones")
    config, why = choose_config(problem, deterministic)
    if config.persistent:
        why += "; one persistent CTA on each SM takes key tiles as it gets free"
    if config.ragged:
        tiles, heads = problem.seq_k // config.block_n + problem.batch, problem.heads_kv
        order = "key tiles of the longest sequence first; the device counts them"
    else:
        tiles, heads = -(-problem.seq_k // config.block_n), problem.batch * problem.heads_kv
        order = "the key tiles of a head one after the other share its queries in L2"
    section = heads_of_section(problem, config, tiles, target)
    ctas = min(tiles * heads, target.processors) if config.persistent else tiles * heads
    if section > 1:
        order += f"; {section} heads at a time, so that long tiles of all begin first"
    numbers = padded_rows(problem) * problem.heads_q * (1 if config.ragged else problem.batch)

    def lines() -> tuple[str, ...]:
        return (
            *config.topology.picture().splitlines(),
            f"{ctas} CTAs: {tiles * heads} key tiles of {config.block_n} keys, query tiles of {config.block_m}",
            f"workspace: {4 * numbers * (problem.dim_qk + 2):,} bytes for dQ in fp32 and two numbers for each row",
        )

    if deterministic:
        order += "; CTAs add to a tile of dQ in a fixed order, that in which they arrive there"
    reasons = (why, order, "the query heads of a key head are walked in one CTA: dK and dV need no second pass")
    numbered = KeyTileOrder(tiles, heads, section)
    return Choice("backward", config, (ctas,), lines, (*reasons, COPY_RULE), order=numbered)


def heads_of_section(problem: Problem, config: BackwardConfig, tiles: int, target: Arch) -> int:
    """Heads whose key tiles are numbered together: one where tiles have equal work, or add in turns."""
    if config.deterministic or not (config.ragged or is_masked(problem)):
        return 1
    heads = problem.heads_kv * (1 if config.ragged else problem.batch)
    waves = RAGGED_WAVES if config.ragged else 1
    return max(1, min(heads, waves * target.processors // max(1, tiles)))


def padded_rows(problem: Problem) -> int:
    """Rows of a head in the kernels' own numbers. Sequence b of those end to end begins at a multiple of PADDING, at
    (cu_q[b] + b * PADDING) rounded down, so that no lengths are added up."""
    if problem.kind == "ragged":
        return PADDING * (problem.seq_q // PADDING + problem.batch)
    return PADDING * -(-problem.seq_q // PADDING)


# CTAs of a section, in waves of all SMs, where sequences are end to end: their tiles differ more (of 32 documents of
# mean 512 a list of CTAs as long as they take ends 10 % later with one head at a time).
RAGGED_WAVES = 4
MOST_TOGETHER = 96  # key tiles of a head whose CTAs certainly run at once, of 132 SMs

SHORT_ROWS = 2048  # queries up to which, at head dim 64, 64-row tiles fit a causal triangle better than 128-row ones


def choose_config(problem: Problem, deterministic: bool = False) -> tuple[BackwardConfig, str]:
    """The configuration for a problem, and one sentence why."""
    element, dims = ELEMENT_OF[problem.dtype], (problem.dim_qk, problem.dim_v)
    masked, ragged = is_masked(problem), problem.kind == "ragged"
    # CTAs that go round wait for each other in a circle: those of a head must run at once.
    keys = CONSUMER_ROWS * (1 if max(dims) > 128 else CONSUMERS)
    together = not deterministic or problem.seq_k <= MOST_TOGETHER * keys
    flags = (not masked and not ragged and together, ragged, deterministic)
    if max(dims) > MAX_DIM:
        rule = f'gradients on sm90 take multiples of 8 up to {MAX_DIM}; use backend="reference" for others'
        raise AttentionError(f"the head dims are {dims[0]} and {dims[1]}; {rule}")
    if max(dims) > 128:
        why = "head dim > 128: 64 keys, dV in one warpgroup and dK in the other; dQ 64 columns at a time"
        return BackwardConfig(element, *dims, 64, 64, 208, 72, 24, *flags), why
    if max(dims) > 64:
        why = "head dim <= 128: 64 queries a tile; dK and dV of 64 keys take 128 registers of a warpgroup's 208"
        return BackwardConfig(element, *dims, 64, 64, 208, 72, 24, *flags), why
    if masked and problem.seq_q <= SHORT_ROWS * (problem.batch if ragged else 1):
        why = f"head dim <= 64, a mask and at most {SHORT_ROWS} queries: 64-row tiles waste less of the diagonal"
        return BackwardConfig(element, *dims, 64, 64, 160, 96, 24, *flags), why
    why = "head dim <= 64: 128 queries a tile; all columns of dQ at once, which reads dS once"
    return BackwardConfig(element, *dims, 128, 64, 192, 104, 24, *flags), why
