"""FlashInfer's functions that append to a paged cache, `flashinfer.page`.

    append_indptr (0, 2, 3)  seq_lens (5, 9)      tokens 0 and 1 become rows 3 and 4 of request 0, token 2 row 8 of
                                                  request 1: batch_indices (0, 0, 1), positions (3, 4, 8)

Nothing is read back from a card.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warpattn.errors import AttentionError, many
from warpattn.integrations.flashinfer.layer import of_layout
from warpattn.integrations.flashinfer.pages import key_and_value
from warpattn.integrations.signature import Given, drop_in
from warpattn.serving.slots import append_slots

__all__ = ["append_paged_kv_cache", "append_paged_mla_kv_cache", "get_batch_indices_positions", "get_seq_lens"]

LISTS = "batch_indices: ints, positions: ints"
PAGES = "kv_indices: ints, kv_indptr: ints, kv_last_page_len: ints"
NAMES = {"k": "append_key", "v": "append_value", "k_pages": "paged_kv_cache[0]", "v_pages": "paged_kv_cache[1]"}
LATENT = {"k": "append_ckv", "v": "append_kpe", "k_pages": "ckv_cache", "v_pages": "kpe_cache"}


@drop_in("kv_indptr: ints, kv_last_page_len: ints, page_size: count")
def get_seq_lens(given: Given) -> Tensor:
    """kv_indptr (requests + 1,), kv_last_page_len (requests,); the number of keys of each request (requests,)."""
    full = (given.kv_indptr.diff() - 1).clamp(min=0)
    if len(full) != len(given.kv_last_page_len):
        rule = f"kv_last_page_len has {len(given.kv_last_page_len)}"
        raise AttentionError(f"kv_indptr lists {many(len(full), 'request')}; {rule}")
    return full * given.page_size + given.kv_last_page_len


@drop_in("append_indptr: ints, seq_lens: ints, nnz: count")
def get_batch_indices_positions(given: Given) -> tuple[Tensor, Tensor]:
    """append_indptr (requests + 1,) offsets of the new tokens, seq_lens (requests,) keys with them.

    Returns the request of each token and its position there, int32 (nnz,), on append_indptr's device; -1 for tokens
    beyond the last offset, which FlashInfer leaves undefined: `append_paged_kv_cache` writes nothing for them.
    """
    ends, lengths = given.append_indptr[1:].long(), given.seq_lens.to(given.append_indptr.device).long()
    if len(lengths) != len(ends):
        raise AttentionError(f"append_indptr lists {many(len(ends), 'request')}; seq_lens has {len(lengths)}")
    token = torch.arange(int(given.nnz), device=ends.device)
    request = torch.searchsorted(ends, token, right=True)
    if not len(ends):
        return (none := token.int().fill_(-1)), none.clone()
    beyond, request = request >= len(ends), request.clamp(max=len(ends) - 1)
    position = lengths[request] - ends[request] + token
    return request.int().masked_fill(beyond, -1), position.int().masked_fill(beyond, -1)


@drop_in(f"append_key: 3, append_value: 3, {LISTS}, paged_kv_cache, {PAGES}, kv_layout='NHD'", names=NAMES)
def append_paged_kv_cache(given: Given) -> None:
    """Write append_key, append_value (tokens, Hkv, D) at their positions, whose pages the lists already hold."""
    k_pages, v_pages = key_and_value(given.paged_kv_cache, of_layout(given.kv_layout))
    slots = _slots(given, len(given.append_key), k_pages.shape[1])
    append_slots(given.append_key, given.append_value, k_pages, v_pages, slots)


@drop_in(f"append_ckv: 2, append_kpe: 2, {LISTS}, ckv_cache: 3, kpe_cache: 3, {PAGES}", names=LATENT)
def append_paged_mla_kv_cache(given: Given) -> None:
    """Write append_ckv (tokens, 512) and append_kpe (tokens, 64) into caches (pages, rows, 512) and (…, 64)."""
    slots = _slots(given, len(given.append_ckv), given.ckv_cache.shape[1])
    latent, rotary = (x[:, None] for x in (given.append_ckv, given.append_kpe))
    append_slots(latent, rotary, given.ckv_cache[:, :, None], given.kpe_cache[:, :, None], slots)


def _slots(given: Any, tokens: int, size: int) -> Tensor:
    """Return each token's slot, page * size + row; -1, which is not written, for a request or position below 0."""
    request, position = given.batch_indices.long(), given.positions.long()
    if not len(request) == len(position) == tokens:
        counts = f"batch_indices has {len(request)} and positions {len(position)}"
        raise AttentionError(f"there are {many(tokens, 'new token')}; {counts}: one is needed for each")
    if not tokens or not len(given.kv_indices):
        return position.new_full((tokens,), -1)
    place = given.kv_indptr.long()[request.clamp(min=0)] + position.clamp(min=0) // max(size, 1)
    page = given.kv_indices.long()[place.clamp(max=len(given.kv_indices) - 1)]
    return torch.where((request < 0) | (position < 0), -1, page * size + position % max(size, 1))
