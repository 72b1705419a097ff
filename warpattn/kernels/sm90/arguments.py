"""What launches hand to the Hopper kernels: named tuples, whose fields kernels read by name, and when scores need
another softmax. Nothing here imports Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

# Of c * (q . k), c = scale * log2(e): kernels multiply by c before they take the maximum of a row away. Where c is
# above 1, that is no fp32 number for the largest scores; those get the softmax of score functions (exact_softmax.py).
LARGEST_EXPONENT = torch.finfo(torch.float32).max
KEYS_OF_PRODUCT = 32  # that one wgmma of 8 bits sums over, and whose order is its own: see prefill/eight_bit/weights.py
TRANSPOSED_KEYS = 128  # of a program of prefill/eight_bit/transpose_values.py


class TransposeShape(NamedTuple):
    """The `shape` argument of prefill/eight_bit/transpose_values.py, int32."""

    keys: Any  # of every sequence
    blocks: Any  # of KEYS_OF_PRODUCT places in a row of the output
    heads: Any  # of keys
    columns: Any  # of the head dim, 16 at a time
    batch: Any  # sequences
    halvings: Any  # steps of a search among them


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
