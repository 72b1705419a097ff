"""Writes new keys and values into pages: `append_paged_kv_cache`, `append_paged_mla_kv_cache`, by `append_slots`.

    batch_indices 0 0 1   positions 15 16 3   pages of 16: request 0 has (7, 4), request 1 has (1,)
    slots 7·16 + 15, 4·16 + 0, 1·16 + 3                       a batch index of -1 is padding
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from warpattn.errors import AttentionError, many
from warpattn.integrations.flashinfer.layer import of_layout
from warpattn.integrations.flashinfer.tables import key_and_value
from warpattn.integrations.signature import Given, drop_in
from warpattn.quantized import EIGHT_BIT
from warpattn.serving.filled import fill
from warpattn.serving.slots import append_slots

LISTS = "kv_indices: ints, kv_indptr: ints, kv_last_page_len: ints"
UNUSED = {"kv_last_page_len"}  # a position says in which of its request's pages it is


@drop_in("append_indptr: ints, seq_lens: ints, nnz: count, batch_indices: ints=None, positions: ints=None")
def get_batch_indices_positions(given: Given) -> tuple[Tensor, Tensor]:
    """The request and the position of each of `nnz` new tokens, int32 (nnz,); the last one sits at the end of seq_lens
    (batch,), which count new tokens, too. Rows from append_indptr[-1] on are padding: -1 and 0."""
    starts, lengths = given.append_indptr, given.seq_lens
    _check_offsets("append_indptr", starts, "seq_lens", lengths)
    rows = torch.arange(given.nnz, device=starts.device, dtype=starts.dtype)
    if len(lengths):
        batch = torch.bucketize(rows, starts[1:].contiguous(), right=True)
        own = batch.clamp(max=len(lengths) - 1)
        place, real = rows - starts[own + 1] + lengths[own], batch < len(lengths)
    else:
        batch = place = rows
        real = rows < 0
    found = torch.where(real, batch, -1).int(), torch.where(real, place, 0).int()
    results, targets = [], {"batch_indices": given.batch_indices, "positions": given.positions}
    for x, (name, target) in zip(found, targets.items(), strict=True):
        if target is not None and (target.shape != x.shape or target.dtype != x.dtype):
            raise AttentionError(f"{name} is {target.dtype} of shape {tuple(target.shape)}; it must be torch.int32 of "
                                 f"shape {tuple(x.shape)}")  # fmt: skip
        results.append(x if target is None else fill(target, x))
    return results[0], results[1]


@drop_in("kv_indptr: ints, kv_last_page_len: ints, page_size: count")
def get_seq_lens(given: Given) -> Tensor:
    """The number of keys of each request (batch,) whose pages are listed by kv_indptr (batch + 1,)."""
    _check_offsets("kv_indptr", given.kv_indptr, "kv_last_page_len", given.kv_last_page_len)
    return (given.kv_indptr.diff() - 1).clamp(min=0) * given.page_size + given.kv_last_page_len


@drop_in(
    f"append_key: 3, append_value: 3, batch_indices: ints, positions: ints, paged_kv_cache, {LISTS}, kv_layout='NHD'",
    hints=UNUSED,
    names={"k": "append_key", "v": "append_value", "k_pages": "paged_kv_cache[0]", "v_pages": "paged_kv_cache[1]"},
)
def append_paged_kv_cache(given: Given) -> None:
    """Write append_key and append_value (tokens, Hkv, D) into a cache in place, token t to position positions[t] of
    request batch_indices[t]; pages are listed as they are with the new tokens. Caches of 8 bits take tensors of 8 bits
    as they are, and round others."""
    k, v = key_and_value(given.paged_kv_cache, of_layout(given.kv_layout))
    _append(given, (given.append_key, given.append_value), (k, v))


@drop_in(
    f"append_ckv: 2, append_kpe: 2, batch_indices: ints, positions: ints, ckv_cache: 3, kpe_cache: 3, {LISTS}",
    hints=UNUSED,
    names={"k": "append_ckv", "v": "append_kpe", "k_pages": "ckv_cache", "v_pages": "kpe_cache"},
)
def append_paged_mla_kv_cache(given: Given) -> None:
    """The same for latents append_ckv (tokens, 512), append_kpe (tokens, 64), into caches (pages, rows, columns)."""
    new, caches = (given.append_ckv, given.append_kpe), (given.ckv_cache, given.kpe_cache)
    _append(given, [x[:, None] for x in new], (caches[0][:, :, None], caches[1][:, :, None]))


def _check_offsets(name: str, starts: Tensor, other: str, lengths: Tensor) -> None:
    if len(starts) != len(lengths) + 1:
        rule = f"it must have one more than {other}, {len(lengths) + 1}"
        raise AttentionError(f"{name} has {many(len(starts), 'element')}; {rule}")


def _append(given: Given, new: Sequence[Tensor], pages: tuple[Tensor, Tensor]) -> None:
    """Write new rows (tokens, heads, dim) into pages (pages, rows, heads, dim)."""
    for name, x in (("batch_indices", given.batch_indices), ("positions", given.positions)):
        if len(x) != len(new[0]):
            raise AttentionError(f"{name} has {many(len(x), 'element')}; it must have one a new token, {len(new[0])}")
    k, v = (x.to(torch.bfloat16) if x.dtype in EIGHT_BIT and x.dtype == p.dtype else x
            for x, p in zip(new, pages, strict=True))  # fmt: skip
    append_slots(k, v, *pages, _slots(given, pages[0].shape[1]))


def _slots(given: Given, size: int) -> Tensor:
    """Return each token's row of the cache, int64 (tokens,); -1 for padding. Nothing is read from a card, where tokens
    beyond their request's pages are not written; on a CPU they are an error."""
    batch, positions, starts, indices = given.batch_indices.long(), given.positions, given.kv_indptr, given.kv_indices
    real = batch >= 0
    if not len(indices) or len(starts) < 2 or not size:
        inside, page = real & False, batch
    else:
        own = batch.clamp(0, len(starts) - 2)
        at = starts[own] + positions // size
        inside = real & (batch < len(starts) - 1) & (positions >= 0) & (at < starts[own + 1]) & (at < len(indices))
        page = indices[torch.where(inside, at, 0).long()].long()
    if batch.device.type == "cpu" and not torch.compiler.is_compiling() and bool((real & ~inside).any()):
        t = int((real & ~inside).nonzero()[0])
        rule = "kv_indptr and kv_indices must list its page"
        raise AttentionError(f"token {t} goes to position {int(positions[t])} of request {int(batch[t])}; {rule}")
    return torch.where(inside, page * size + positions % size, -1)


