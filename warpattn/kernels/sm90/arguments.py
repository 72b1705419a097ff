"""Named tuples that launches pass to the Hopper kernels as arguments, and sizes that host and kernels share. Kernels
read the fields by name. This file imports no Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from warpattn.problem.argument_types import Int64

# Bound of c * (q . k), c = scale * log2(e). Kernels multiply by c before they subtract the row maximum; with c above 1
# the largest scores overflow fp32 there, so such calls use the softmax of score functions (softmax_steps.py).
LARGEST_EXPONENT = torch.finfo(torch.float32).max
TRANSPOSED_KEYS = 128  # keys that one program of prefill/eight_bit/transpose_values.py transposes
PLACES_OF_PROGRAM = 128  # places that one program of copies/places.py lists


class TransposeShape(NamedTuple):
    """The `shape` argument of prefill/eight_bit/transpose_values.py, int32."""

    keys: Any  # keys of every sequence
    blocks: Any  # blocks of KEYS_OF_PRODUCT places in a row of the output
    heads: Any  # key heads
    columns: Any  # head dim / 16
    batch: Any  # sequences
    halvings: Any  # steps of the binary search for a sequence


class CopyShape(NamedTuple):
    """The `shape` argument of copies/kernel.py, int32."""

    keys: Any  # maximum keys of a sequence
    places: Any  # blocks of COPIED_KEYS keys per sequence
    heads: Any  # key heads
    k_runs: Any  # columns of K / 8
    v_runs: Any  # columns of V / 8
    pages: Any  # pages of the cache
    page_size: Any


class CopySource(NamedTuple):
    """K or V that copies/kernel.py reads, with the scales of its tokens."""

    rows: Any  # StridedRows
    scale: Any  # ScaleRows, or ColumnScaleRows


class CopyIndex(NamedTuple):
    """Where copies/kernel.py finds keys; empty without pages."""

    table: Any  # int32* (batch, row of `table_stride`)
    table_stride: Int64
    lengths: Any  # int32* (batch,)
    out_table: Any  # int32* (batch, places): pages of the copies

    @classmethod
    def of(cls, kv: Any) -> CopyIndex:
        """The index of a `PagedKV`; `out_table` is filled in later."""
        table = kv.block_table if kv.block_table.stride(1) == 1 else kv.block_table.contiguous()
        return cls(table, table.stride(0), kv.lengths.contiguous(), None)


class PlaceLists(NamedTuple):
    """Where copies/places.py puts the copies of a step's keys, COPIED_KEYS in a place."""

    ends: Any  # int32* (1 + batch,): places in use; then of each sequence, the first place after its own
    places: Any  # int32* (places, 2): sequence and first key of each place in use
    table: Any  # int32* (batch, row of `table_stride`): the places of each sequence that has some
    table_stride: Int64


class PlacesShape(NamedTuple):
    """The `shape` argument of copies/places.py, int32."""

    batch: Any  # sequences
    keys: Any  # maximum keys of a sequence
    capacity: Any  # places
    least: Any  # queries that must see each key of a sequence for it to be copied


class PrefillShape(NamedTuple):
    """The `shape` argument of prefill, int32."""

    seq_q: Any
    seq_k: Any
    heads_q: Any
    group: Any  # query heads per key head
    m_tiles: Any  # query tiles per head
    heads: Any  # batch * heads_q
    section: Any  # query heads whose tiles the scheduler hands out together


class SplitShape(NamedTuple):
    """`PrefillShape` with split-KV."""

    seq_q: Any
    seq_k: Any
    heads_q: Any
    group: Any
    m_tiles: Any
    heads: Any
    section: Any
    batch: Any
    splits: Any  # CTAs per query tile
