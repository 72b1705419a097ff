"""Layouts of queries, keys and values in memory: dense batches, ragged batches, a paged key/value cache.

A sequence kind is a frozen value. It checks its tensors, computes the sizes of the problem, and can walk the batch one
sequence at a time, as the reference does:

    Dense      q (B, Sq, Hq, D)      k, v (B, Sk, Hkv, D | Dv)
    Ragged     q (total_q, Hq, D)    k, v (total_k, Hkv, D | Dv)      sequence b is rows cu[b] .. cu[b+1] - 1
    PagedKV    q (B, Sq, Hq, D)      pages (num_pages, page_size, Hkv, D | Dv)
               key t of sequence b is row t % page_size of page block_table[b, t // page_size], for t < lengths[b]
    PagedRagged  q as Ragged, keys as PagedKV: prompts and single new tokens of an engine's step in one batch

8-bit keys and values, and 8-bit queries with them, may have scales (quantized.py), in shapes that fit k, v and q.
"""

from warpattn.sequences.paged import PagedKV, PagedRagged
from warpattn.sequences.ragged import Ragged
from warpattn.sequences.sequence import Dense, Sequence, Sizes

__all__ = ["Dense", "PagedKV", "PagedRagged", "Ragged", "Sequence", "Sizes"]
