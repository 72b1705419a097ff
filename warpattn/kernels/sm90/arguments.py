"""What launches hand to the Hopper kernels: named tuples, whose fields kernels read by name, and when scores need
another softmax. Nothing here imports Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from warpattn.problem.argument_types import Int64

# Of c * (q . k), c = scale * log2(e): kernels multiply by c before they take the maximum of a row away. Where c is
# above 1, that is no fp32 number for the largest scores; those get the softmax of score functions (exact_softmax.py).
LARGEST_EXPONENT = torch.finfo(torch.float32).max
KEYS_OF_PRODUCT = 32  # that one wgmma of 8 bits sums over, and whose order is its own: see prefill/eight_bit/weights.py
TRANSPOSED_KEYS = 128  # of a program of prefill/eight_bit/transpose_values.py
COPIED_KEYS = 128  # of a program of copies/kernel.py, and of a page of its copies


class TransposeShape(NamedTuple):
    """The `shape` argument of prefill/eight_bit/transpose_values.py, int32."""

    keys: Any  # of every sequence
    blocks: Any  # of KEYS_OF_PRODUCT places in a row of the output
    heads: Any  # of keys
    columns: Any  # of the head dim, 16 at a time
    batch: Any  # sequences
    halvings: Any  # steps of a search among them


class CopyShape(NamedTuple):
    """The `shape` argument of copies/kernel.py, int32."""

    keys: Any  # of a sequence at most
    places: Any  # of COPIED_KEYS keys, of a sequence
    heads: Any  # of keys
    k_runs: Any  # of 8 columns
    v_runs: Any
    pages: Any  # of the cache
    page_size: Any
    least_q: Any  # queries of a ragged sequence at least whose keys are copied


class CopySource(NamedTuple):
    """Keys or values of copies/kernel.py, and the factors of their tokens."""

    rows: Any  # StridedRows
    scale: Any  # ScaleRows, or ColumnScaleRows


class CopyIndex(NamedTuple):
    """Where its keys are: nothing without pages."""

    table: Any  # int32* (batch, row of `table_stride`)
    table_stride: Int64
    lengths: Any  # int32* (batch,)
    cu_q: Any  # int32* (batch + 1,) of ragged queries
    out_table: Any  # int32* (batch, places): pages of the copies

    @classmethod
    def of(cls, kv: Any, cu_q: Any) -> CopyIndex:
        """That of a `PagedKV`, without pages of the copies yet."""
        table = kv.block_table if kv.block_table.stride(1) == 1 else kv.block_table.contiguous()
        return cls(table, table.stride(0), kv.lengths.contiguous(), cu_q, None)


class PrefillShape(NamedTuple):
    """The `shape` argument of prefill, int32."""

    seq_q: Any
    seq_k: Any
    heads_q: Any
    group: Any  # query heads of a key head
    m_tiles: Any  # query tiles of a head
    heads: Any  # query heads of the whole batch
    section: Any  # query heads whose tiles the scheduler hands out together


class SplitShape(NamedTuple):
    """The same where keys of a tile are shared out."""

    seq_q: Any
    seq_k: Any
    heads_q: Any
    group: Any
    m_tiles: Any
    heads: Any
    section: Any
    batch: Any
    splits: Any  # parts of a tile
