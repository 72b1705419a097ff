"""Named tuples that launches of decode and latent attention hand to their kernels, see `sm90.arguments`."""

from __future__ import annotations

from typing import Any, NamedTuple

from warpattn.problem.argument_types import Int64


class DecodeShape(NamedTuple):
    """Sizes of the problem, int32. A row tile is a tile of query rows of one sequence."""

    batch: Any
    tokens: Any  # query tokens of a sequence; of a ragged one at most, others are left out
    total: Any  # query tokens of all ragged sequences
    capacity: Any  # most keys of a sequence
    heads: Any  # key heads
    group: Any  # query heads per key head
    tiles: Any  # row tiles of a key head
    pages: Any  # of the cache
    page_size: Any
    splits: Any  # equal parts of a head, or
    whole: Any  # heads of a CTA: an `EvenCut`
    prefetched: Any = 0  # key tiles of a CTA whose keys it prefetches, in decode


class MappedRows(NamedTuple):
    """Keys or values (batch or page, row, head, dim) that TMA reads."""

    desc: Any


class ScaledRows(NamedTuple):
    """8-bit keys or values (batch or page, row, head, dim) that TMA reads, and their scale with its strides: 0 for
    the dimensions that it does not have."""

    desc: Any
    scale: Any  # float*
    outer: Int64
    row: Int64
    head: Int64


class ColumnScaledRows(NamedTuple):
    """8-bit rows as `ScaledRows`; `block`: stride from the scale of one block of columns to the next, 0 where they have
    the same."""

    desc: Any
    scale: Any  # float*
    outer: Int64
    row: Int64
    head: Int64
    block: Int64


class MappedLatents(NamedTuple):
    """Rotary parts that TMA reads; latents and rotary parts as rows of memory, which mla/recompute.py reads."""

    desc: Any
    latents: Any  # StridedRows
    rope: Any  # StridedRows, 16-bit ones behind the latents


class ScaledQueries(NamedTuple):
    """8-bit queries (batch, token, head, dim) and their scale."""

    pointer: Any
    outer: Int64  # strides as of a `StridedRows`
    row: Int64
    head: Int64
    scale: Any  # ScaleRows


class KeyIndex(NamedTuple):
    """Lengths, pages and queries of the sequences."""

    lengths: Any  # int32* (batch,)
    table: Any  # int32* (batch, row of `table_stride`)
    table_stride: Int64
    cu_q: Any  # int32* (batch + 1,): first query token of each sequence, if ragged


class PartialResults(NamedTuple):
    """The workspace of a launch."""

    o: Any  # float* (slots, rows, cols)
    denominators: Any  # int64* (slots, rows), packed
    rows: Any  # of a slot, int32
    tickets: Any  # int32* (heads,): finished parts of each head, 0 between launches
    heads: Any  # int32* (heads, 2): parts of each head and where the first is, for the combining kernel
