"""BackwardConfig: tiles, rings and registers of the Hopper backward kernel, and its choice for a problem.

Nothing in this file imports Triton. A CTA owns 128 keys of a key head and walks the query tiles that see them:

    load       ── Q, row maxima ─▶ Q ring ──┬─▶ attend 0   keys  0.. 63: S, P, dP, dS; dV and dK stay in registers
               ── dO, row sums ──▶ dO ring ─┴─▶ attend 1   keys 64..127
    attend 0, 1 ── dS ─▶ dS ring ─▶ reduce    dQ = dS · K, added to fp32 in global memory by TMA
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

from ..prefill.config import CONSUMER_ROWS, pad_dim

CONSUMERS = 2
STAGES = 2  # slots of each ring: this tile's and the next one's
VISITS = 2 * STAGES  # records of query tiles: `reduce` reads one while the loader writes that of two tiles later
VISIT_FIELDS = 3  # int32 of a record: first row (-1: no tile at all), query head, flags
MASKED, MORE = 1, 2  # the flags: the tile needs the mask; another tile follows
ROWS = 32  # of a program of the kernels before and after the main one
PADDING = 128  # that the numbers of rows are padded to: a query tile at most
SINK_PARTS = 128  # parts of a sink's gradient that are loaded at once
MAX_DIM = 128
SEARCH = 32  # query tiles whose spans the loader tests at once, one a lane


@dataclass(frozen=True)
class BackwardConfig:
    """Tile sizes and resources of one compiled kernel.

    `dq_cols` columns of dQ are computed and added at a time; head dims are padded to one size, as dK leaves through
    the memory of V.
    """

    element: Element
    dim_qk: int
    dim_v: int
    block_m: int  # query rows of a tile
    dq_cols: int
    attend_registers: int
    reduce_registers: int
    load_registers: int

    @cached_property
    def padded(self) -> int:
        return max(64, pad_dim(self.dim_qk), pad_dim(self.dim_v))

    @cached_property
    def rows(self) -> int:
        """Keys of a warpgroup."""
        return CONSUMER_ROWS

    @cached_property
    def block_n(self) -> int:
        """Keys of a CTA."""
        return CONSUMERS * CONSUMER_ROWS

    @cached_property
    def key_bytes(self) -> int:
        """Of the keys, or the values, of a CTA."""
        return self.element.bytes * self.block_n * self.padded

    @cached_property
    def row_bytes(self) -> int:
        """Of a tile of Q or dO with a number for each row."""
        return (self.element.bytes * self.padded + 4) * self.block_m

    @cached_property
    def dq_parts(self) -> int:
        return self.padded // self.dq_cols

    @cached_property
    def topology(self) -> Topology:
        attend = tuple(f"attend {wg}" for wg in range(CONSUMERS))
        roles = [Role(name, 4, self.attend_registers) for name in attend]
        roles += [Role("reduce", 4, self.reduce_registers), Role("load", 1, self.load_registers)]
        edges = (
            Edge("K", "load", (*attend, "reduce"), 1, self.key_bytes),
            Edge("V", "load", attend, 1, self.key_bytes),
            Edge("Q", "load", attend, STAGES, self.row_bytes),
            Edge("dO", "load", attend, STAGES, self.row_bytes),
            Edge("dS", "attend", ("reduce",), STAGES, self.element.bytes * self.block_n * self.block_m),
        )
        staging = 4 * STAGES * self.block_m * self.dq_cols
        return Topology(tuple(roles), edges, staging + 4 * VISITS * VISIT_FIELDS)


class BackwardShape(NamedTuple):
    """The main kernel's `shape` argument, int32."""

    seq_q: Any
    seq_k: Any
    heads_q: Any
    group: Any  # query heads of a key head
    n_tiles: Any  # key tiles of a head
    heads: Any  # key heads of the whole batch
    section: Any  # key heads whose tiles are numbered together


class RowShape(NamedTuple):
    """The `shape` argument of the kernels before and after the main one, int32."""

    batch: Any
    seq_q: Any
    padded_q: Any  # rows of shift and delta
    heads_q: Any


class Statistics(NamedTuple):
    """What the forward and the caller know of each row, fp32 (batch, heads_q, seq_q), and the sinks (heads_q,)."""

    lse: Any
    dlse: Any
    sinks: Any


class Prepared(NamedTuple):
    """fp32 (batch * heads_q, padded_q) twice, (batch * heads_q, seq_q, dim), and parts of the sinks' gradients."""

    shift: Any
    delta: Any
    dq: Any
    dsinks: Any


class Added(NamedTuple):
    """What is left to add up or to round, as in `Prepared`."""

    dq: Any
    dsinks: Any


@dataclass(frozen=True)
class KeyTileOrder:
    """How CTAs are numbered: sections of key heads; in a section first key tiles first, heads fastest."""

    n_tiles: int
    heads: int
    section: int


def choose_config(element: Element, dim_qk: int, dim_v: int) -> tuple[BackwardConfig, str]:
    """The configuration for a pair of head dims, and one sentence why."""
    wide = max(dim_qk, dim_v)
    if wide > MAX_DIM:
        rule = f"gradients on sm90 take multiples of 8 up to {MAX_DIM}; use backend=\"reference\" for others"
        raise AttentionError(f"the head dims are {dim_qk} and {dim_v}; {rule}")
    if wide > 64:
        why = "head dim <= 128: 64 queries a tile; dK and dV of 64 keys take 128 registers of a warpgroup's 208"
        return BackwardConfig(element, dim_qk, dim_v, 64, 64, 208, 72, 24), why
    why = "head dim <= 64: 64 queries a tile, all of dQ's columns at once"
    return BackwardConfig(element, dim_qk, dim_v, 64, 64, 160, 96, 24), why


def choose(problem: Problem, target: Arch) -> Choice:
    """The choice for the gradients of a dense `problem`."""
    config, why = choose_config(ELEMENT_OF[problem.dtype], problem.dim_qk, problem.dim_v)
    n_tiles = -(-problem.seq_k // config.block_n)
    heads = problem.batch * problem.heads_kv
    section, order = _section(problem, target)
    grid = n_tiles * heads
    what = f"{problem.batch * problem.heads_q * problem.seq_q * problem.dim_qk * 4:,} bytes for dQ in fp32"
    lines = (
        *config.topology.picture().splitlines(),
        f"{grid} CTAs: key tiles of {config.block_n} keys, query tiles of {config.block_m}",
        f"workspace: {what} and two numbers for each row",
    )
    reasons = (why, order, "the query heads of a key head are walked in one CTA: dK and dV need no second pass")
    return Choice(
        "backward", config, (grid,), lambda: lines, (*reasons, COPY_RULE),
        order=KeyTileOrder(n_tiles, heads, section),
    )  # fmt: skip


def _section(problem: Problem, target: Arch) -> tuple[int, str]:
    """Key heads of a section: those whose Q, dO and fp32 dQ fit in L2 together."""
    heads = problem.batch * problem.heads_kv
    group = problem.heads_q // problem.heads_kv
    row = problem.element.bytes * (problem.dim_qk + problem.dim_v) + 4 * problem.dim_qk
    each = group * max(problem.seq_q, 1) * row
    sections = -(-heads // max(1, target.l2_keep // each))
    section = -(-heads // max(1, sections))
    why = f"sections of {section} key heads: Q, dO and dQ of a section within {target.l2_keep >> 20} MiB of L2"
    return section, why
