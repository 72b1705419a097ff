"""Named tuples that launches pass to the kernels of decode and latent attention (MLA), see `sm90.arguments`."""

from __future__ import annotations

from typing import Any, NamedTuple

from warpattn.problem.argument_types import Int64


class DecodeShape(NamedTuple):
    """Sizes of the problem, int32. A row tile is a tile of query rows of one sequence."""

    batch: Any
    tokens: Any  # query tokens of a sequence; ragged sequences with more are skipped
    total: Any  # query tokens of all ragged sequences
    capacity: Any  # maximum keys of a sequence
    heads: Any  # key heads
    group: Any  # query heads per key head
    tiles: Any  # row tiles of a key head
    queues: Any  # work queues, see `choice.queues_of`
    pages: Any  # pages of the cache
    page_size: Any
    splits: Any  # `EvenCut.splits`: equal parts of a head
    whole: Any  # `EvenCut.whole`: heads of a CTA
    prefetched: Any = 0  # key tiles that a CTA of decode prefetches to L2


class MappedRows(NamedTuple):
    """K or V (batch or page, row, head, dim) that TMA reads."""

    desc: Any


class ScaledRows(NamedTuple):
    """8-bit K or V (batch or page, row, head, dim) that TMA reads, and the scales with their strides, 0 for dimensions
    that they do not have."""

    desc: Any
    scale: Any  # float*
    outer: Int64
    row: Int64
    head: Int64


class ColumnScaledRows(NamedTuple):
    """`ScaledRows` whose tokens may have a scale per block of columns; `block`: the stride between those, 0 if all
    columns share one."""

    desc: Any
    scale: Any  # float*
    outer: Int64
    row: Int64
    head: Int64
    block: Int64


class MappedLatents(NamedTuple):
    """The TMA descriptor of rotary parts; for mla/recompute.py also pointers to latents and rotary parts."""

    desc: Any
    latents: Any  # StridedRows
    rope: Any  # StridedRows, 16-bit ones behind the latents


class ScaledQueries(NamedTuple):
    """8-bit queries (batch, token, head, dim) and their scale."""

    pointer: Any
    outer: Int64  # strides as in `StridedRows`
    row: Int64
    head: Int64
    scale: Any  # ScaleRows


class KeyIndex(NamedTuple):
    """Key lengths, block table and query offsets of the sequences."""

    lengths: Any  # int32* (batch,)
    table: Any  # int32* (batch, row of `table_stride`)
    table_stride: Int64
    cu_q: Any  # int32* (batch + 1,): first query token of each sequence, if ragged


class PartialResults(NamedTuple):
    """The workspace of partial outputs."""

    o: Any  # float* (slots, rows, cols)
    denominators: Any  # int64* (slots, rows), packed
    rows: Any  # rows of a slot, int32
    tickets: Any  # int32* (heads,): finished parts of each head, 0 between launches
    heads: Any  # int32* (heads, 2): (number of parts, place of the first) of each head, for the combining kernel
