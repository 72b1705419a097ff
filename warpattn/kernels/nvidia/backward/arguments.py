"""Named tuples that launches of a backward pass to its kernels, which read fields by name, and sizes that all of them
share. This file imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from warpattn.language.derivative import Adjoint
from warpattn.language.nodes import Program

STAGES = 2  # slots of the Q and dO rings: for this query tile and the next one
VISITS = 2 * STAGES  # records of query tiles: `reduce` reads one while the loader writes that of two tiles later
VISIT_FIELDS = 12  # int32 of a record: first row, query head, flags, turn; b, h and first of `Keys`; of a ragged batch
# also seq_q, seq_k, q_start, k_start and row
TURN_FIELDS = 3  # int32 of a dQ tile: head and first row in the kernels' own numbers (-1: no tile follows), turn
BEHIND = 1 << 28  # row and key past the end of all sequences, for the one visit of keys that no query sees
MASKED, MORE, FIRST = 1, 2, 2  # the flags: the tile needs the mask; another tile follows; from bit 2 on, the first key
ROWS = 32  # rows of a program of the kernels before and after the main one
PADDING = 128  # rows of which sequences begin at multiples in the kernels' own buffers ("own numbers")
LANES = 128  # sequences, or parts of a sink's gradient, that are loaded at once
CAPTURED_ROWS = 64  # rows of a CTA, and keys at a time, in the kernel for gradients of captured tensors
SEARCH = 32  # query tiles whose spans the loader tests at once, one per lane


class BackwardShape(NamedTuple):
    """The main kernel's `shape` argument, int32."""

    seq_q: Any
    seq_k: Any
    heads_q: Any
    group: Any  # query heads per key head
    heads_kv: Any  # key heads of a batch entry; as a quotient every role would keep, and spill, it
    tiles: Any  # key tiles of a head; for packed sequences an upper bound over all of them
    section: Any  # `KeyTileOrder.section`
    heads: Any  # key heads of all batch entries
    lap: Any  # `KeyTileOrder.lap`; for packed sequences it is in the list of their key tiles
    lap_rows: Any  # `KeyTileOrder.lap_rows`; as a quotient the loader would keep, and spill, it


class Sequences(NamedTuple):
    """Offsets of packed sequences, int32 (batch + 1,), and the list of their key tiles, see `key_tiles.py`."""

    cu_q: Any
    cu_k: Any
    tiles: Any


class Turns(NamedTuple):
    """`Prepared.turns`, and the number of blocks of ROWS padded rows in a head, int32."""

    pointer: Any
    blocks: Any


class RowShape(NamedTuple):
    """The `shape` argument of the kernels before and after the main one, int32."""

    batch: Any
    seq_q: Any  # queries of a sequence; of all packed sequences
    padded_q: Any  # rows of shift, delta and the fp32 dq, of a sequence or of all packed ones
    heads_q: Any


class Statistics(NamedTuple):
    """LSE and its gradient for each row, fp32 (batch, heads_q, seq_q), and the sinks (heads_q,)."""

    lse: Any
    dlse: Any
    sinks: Any


class Prepared(NamedTuple):
    """Buffers of the kernels, fp32: shift and delta (heads, padded_q), dq (heads, padded_q, dim), parts of the sinks'
    gradients (heads, padded_q / ROWS). heads: batch * heads_q, or heads_q if packed; dq, turns: times `dq_copies`."""

    shift: Any
    delta: Any
    dq: Any
    dsinks: Any
    turns: Any  # int32 (heads, padded_q / ROWS): counters of dq tiles, each at its first block, see turns.py


class Added(NamedTuple):
    """The buffers of `Prepared` that the last kernel sums and rounds."""

    dq: Any
    dsinks: Any
    turns: Any


class BackwardPrograms(NamedTuple):
    """The programs of mask, score and the score's derivative that a main kernel is compiled for."""

    mask: Program
    score: Program | None
    slope: Program | None  # None: 1


class CapturedShape(NamedTuple):
    """The `shape` argument of the kernel for gradients of captured tensors, int32."""

    batch: Any
    seq_q: Any  # or all queries, where they are end to end
    seq_k: Any
    heads_q: Any
    group: Any


class CapturedPrograms(NamedTuple):
    """The programs that the kernel for gradients of captured tensors is compiled for."""

    mask: Program
    score: Program
    adjoints: tuple[Adjoint, ...]  # of the tensors whose gradients are wanted


class AdjointFunctions(NamedTuple):
    """How the gradient of a captured tensor is computed, and where it is added."""

    value: Any  # function of a (row, key) pair: factor of the score's gradient
    index: tuple[Any, ...]  # functions, one for each dimension of the tensor
    sizes: int  # where the tensor's sizes begin in `score_args`
    by_row: bool  # whether the index depends on the row
    by_key: bool
    shared: bool  # whether pairs of a tile may read one element


@dataclass(frozen=True)
class PairProducts:
    """An architecture's matrix products of CAPTURED_ROWS queries and keys, for gradients of captured tensors."""

    layout: Any  # register layout of the products
    memory: Any  # function () that allocates what the products need beside shared memory
    multiply: Any  # function (ctx, number of products before) of a `Captured`: (Q · Kᵀ, dO · Vᵀ)

    @property
    def cache_key(self) -> str:
        """The key for Triton's cache: the functions' source text, because their names do not identify it."""
        return f"{self.layout} {self.memory.cache_key} {self.multiply.cache_key}"


@dataclass(frozen=True)
class DeviceCode:
    """The functions of an architecture that the shared backward kernels call."""

    make_rings: Any  # function (config): the rings of the main kernel
    start_roles: Any  # function (ctx) of a `visits.Context`: runs every role of the main kernel in its warps
    products: PairProducts

    @property
    def cache_key(self) -> str:
        return f"{self.make_rings.cache_key} {self.start_roles.cache_key} {self.products.cache_key}"
