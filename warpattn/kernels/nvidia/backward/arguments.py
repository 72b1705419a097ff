"""Named tuples that launches of a backward hand to its kernels, and the sizes that all of them share. The launch fills
in values, and the kernel reads fields by name. Nothing here imports Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from warpattn.language.derivative import Adjoint
from warpattn.language.nodes import Program

STAGES = 2  # slots of the rings of Q and dO: this tile's and the next one's
VISITS = 2 * STAGES  # records of query tiles: `reduce` reads one while the loader writes that of two tiles later
VISIT_FIELDS = 5  # int32 of a record: first row, query head, flags, turn, key tile (-1: none left)
TURN_FIELDS = 3  # int32 of a tile of dQ: head and first row in the kernels' own numbers (-1: no tile follows), turn
BEHIND = 1 << 28  # rows and keys past the end of all sequences, of the visit to keys that no query sees
MASKED, MORE, FIRST = 1, 2, 2  # the flags: the tile needs the mask; another tile follows; from bit 2 on, the first key
ROWS = 32  # of a program of the kernels before and after the main one
PADDING = 128  # rows that sequences are padded to where the kernels keep numbers of their own: a query tile at most
LANES = 128  # sequences, or parts of a sink's gradient, that are loaded at once
CAPTURED_ROWS = 64  # rows, and keys at a time, of a CTA that takes gradients of what a score captured
SEARCH = 32  # query tiles whose spans the loader tests at once, one a lane


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
    lap: Any  # `KeyTileOrder.lap`; of sequences end to end it is in the list of their key tiles


class Sequences(NamedTuple):
    """Where sequences end to end begin, int32 (batch + 1,), and the list of their key tiles, see `key_tiles.py`."""

    cu_q: Any
    cu_k: Any
    tiles: Any


class Turns(NamedTuple):
    """`Prepared.turns`, and the blocks of ROWS padded rows of a head, int32."""

    pointer: Any
    blocks: Any


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
    heads are batch * heads_q, or heads_q where sequences are end to end; `dq_copies` times as many of dq and turns."""

    shift: Any
    delta: Any
    dq: Any
    dsinks: Any
    turns: Any  # int32 (heads, padded_q / ROWS): CTAs that have added to a tile of dq, at the tile's first block


class Added(NamedTuple):
    """What is left to add up or to round, as in `Prepared`."""

    dq: Any
    dsinks: Any
    turns: Any


class BackwardPrograms(NamedTuple):
    """The mask, the score and the score's derivative that a main kernel is compiled for."""

    mask: Program
    score: Program | None
    slope: Program | None  # None: 1


class CapturedShape(NamedTuple):
    """The `shape` argument of the kernel for what a score captured, int32."""

    batch: Any
    seq_q: Any  # or all queries, where they are end to end
    seq_k: Any
    heads_q: Any
    group: Any


class CapturedPrograms(NamedTuple):
    """What the kernel for gradients of what a score captured is compiled for."""

    mask: Program
    score: Program
    adjoints: tuple[Adjoint, ...]  # of the tensors whose gradients are wanted


class AdjointFunctions(NamedTuple):
    """How a gradient of what a score captured is computed, and where it is added."""

    value: Any  # function of the pair: what its gradient is multiplied with
    index: tuple[Any, ...]  # functions, one for each dimension of the tensor
    sizes: int  # where the tensor's sizes begin in `score_args`
    by_row: bool  # whether the index depends on the row
    by_key: bool
    shared: bool  # whether pairs of a tile may read one element


@dataclass(frozen=True)
class PairProducts:
    """An architecture's products of CAPTURED_ROWS queries and keys, in the kernel for what a score captured."""

    layout: Any  # registers of the products
    memory: Any  # function () that allocates what they need beside shared memory
    multiply: Any  # function (ctx, number of products before) of a `Captured`: (Q · Kᵀ, dO · Vᵀ)

    @property
    def cache_key(self) -> str:
        """What Triton's cache knows them by: the functions' source text, which is not in their names."""
        return f"{self.layout} {self.memory.cache_key} {self.multiply.cache_key}"


@dataclass(frozen=True)
class DeviceCode:
    """The functions of an architecture in the kernels that all share."""

    make_rings: Any  # function (config): the rings of the main kernel
    start_roles: Any  # function (ctx) of a `visits.Context`: runs every role of the main kernel in its warps
    products: PairProducts

    @property
    def cache_key(self) -> str:
        return f"{self.make_rings.cache_key} {self.start_roles.cache_key} {self.products.cache_key}"
