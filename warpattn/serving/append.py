"""append_paged: writes new keys and values into the pages of a cache, on the CPU with torch, on a card with a kernel.

lengths[b] = 6, two new tokens, pages of 4          page 7 [ . . . . ]   page 2 [ a b . . ]
block_table[b] = (7, 2, …)                          positions 4 and 5 ─────────────┘
"""

from __future__ import annotations

import torch
from torch import Tensor

from warpattn.errors import Rules, many
from warpattn.kernels.cache.launch import NewRows, append_launches
from warpattn.runtime.repeated_calls import RepeatedCalls
from warpattn.sequences import PagedKV
from warpattn.serving.new_tokens import check_angles, check_heads, check_memory, check_places, rotated
from warpattn.serving.operators import operator_of
from warpattn.serving.scaled_rows import check_scales, write_rows
from warpattn.torch_modes import is_recorded

_TENSORS = ("k_pages", "v_pages", "k_new", "v_new", "block_table", "lengths", "cos", "sin", "k_scale", "v_scale")
_calls = RepeatedCalls("append_paged", 4, _TENSORS)


def append_paged(
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write the newest keys and values of each sequence into its pages, in place.

    k_pages (num_pages, page_size, Hkv, D), v_pages (num_pages, page_size, Hkv, Dv), block_table int32 (B, max_pages),
    lengths int32 (B,): as in `PagedKV`, so the lengths include the new tokens and one tensor serves this call and
    `attention_paged`. k_new (B, T, Hkv, D), v_new (B, T, Hkv, Dv): token t of sequence b goes to position
    lengths[b] - T + t; tokens whose position is below 0 are left out, so a length of 0 writes nothing. fp16, bf16 or
    fp32, the last stride of every tensor is 1.

    cos, sin (positions, R / 2), same dtype as k_new or fp32: rotary embedding of the first R elements of each new key,
    row p for position p. interleaved: pairs (0, 1), (2, 3), …; otherwise (0, R/2), (1, R/2 + 1), …

    Pages may have 8 bits, with k_scale, v_scale fp32 as in `PagedKV` or None for 1: new elements are divided by their
    scale, saturated and rounded to nearest. A scale of shape () or (Hkv,) is given; others, of (num_pages, page_size,
    Hkv) or (num_pages, page_size, Hkv, blocks), are computed from each new row and written.

    On a card nothing is read back, so the caller promises that pages are in the cache, that the table and `cos` hold
    all positions (other tokens are not written), and that every new token has its own place: if two have the same one,
    its content is undefined. Raises AttentionError listing every broken rule.
    """
    if is_recorded():
        cache, scales = (k_pages, v_pages, block_table, lengths), {"k_scale": k_scale, "v_scale": v_scale}
        _operator(*cache, k_new, v_new, cos=cos, sin=sin, interleaved=interleaved, **scales)
        return
    tensors = (k_pages, v_pages, k_new, v_new, block_table, lengths, cos, sin, k_scale, v_scale)
    if _calls.launched_again(tensors, interleaved):
        return
    kv = PagedKV(k_pages, v_pages, block_table, lengths, k_scale=k_scale, v_scale=v_scale)
    angles = None if cos is None or sin is None else (cos, sin)
    new = NewRows(k_new, v_new, angles, interleaved)
    rules = Rules()
    rules.flag("interleaved", interleaved)
    if _check_shapes(rules, kv, k_new, v_new) and check_angles(rules, k_new, "k_new", cos, sin):
        _check_places(rules, kv, new)
        copied = {"k_new": k_new, "v_new": v_new, "k_pages": k_pages, "v_pages": v_pages}
        check_scales(rules, {"k_scale": k_scale, "v_scale": v_scale}, copied)
    rules.done()
    if k_new.numel() == 0:
        return
    if k_new.device.type == "cpu":
        _check_values(rules, kv, k_new, cos)
        rules.done()
        _append(kv, new)
    else:
        _calls.launch(tensors, interleaved, lambda arch: append_launches(arch, kv, new))


_operator = operator_of(append_paged)


def _check_shapes(rules: Rules, kv: PagedKV, k_new: Tensor, v_new: Tensor) -> bool:
    """Check ranks and sizes; True if all ranks are right."""
    axes = ("batch", "tokens", "heads", "head_dim")
    ranks = [rules.tensor(name, x, *axes) for name, x in (("k_new", k_new), ("v_new", v_new))]
    pages = ("num_pages", "page_size", "heads", "head_dim")
    ranks += [rules.tensor(name, x, *pages) for name, x in (("k_pages", kv.k_pages), ("v_pages", kv.v_pages))]
    ranks.append(rules.tensor("block_table", kv.block_table, "batch", "max_pages"))
    ranks.append(rules.tensor("lengths", kv.lengths, "batch"))
    if not all(ranks):
        return False
    batch, tokens, _, _ = k_new.shape
    for name, found in (("v_new", len(v_new)), ("block_table", len(kv.block_table)), ("lengths", len(kv.lengths))):
        rules.require(found == batch, f"{name} has batch {found}", f"it must have the batch of k_new, {batch}")
    what = f"v_new has {many(v_new.shape[1], 'token')}"
    rules.require(v_new.shape[1] == tokens, what, f"it must have as many as k_new, {tokens}")
    check_heads(rules, {"k_new": k_new, "v_new": v_new}, {"k_pages": kv.k_pages, "v_pages": kv.v_pages})
    return True


def _check_places(rules: Rules, kv: PagedKV, new: NewRows) -> None:
    """Check dtypes, devices, strides and memory."""
    assert new.v is not None
    copied = {"k_new": new.k, "v_new": new.v, "k_pages": kv.k_pages, "v_pages": kv.v_pages}
    others = {"block_table": kv.block_table, "lengths": kv.lengths}
    for name, x in others.items():
        rules.require(x.dtype == torch.int32, f"{name} has dtype {x.dtype}", "it must be torch.int32")
    others |= dict(zip(("cos", "sin"), new.angles or (), strict=False))
    check_places(rules, copied, others, "append_paged")
    pages = {"k_pages": kv.k_pages, "v_pages": kv.v_pages}
    check_memory(rules, {"k_new": new.k, "v_new": new.v}, pages, new.angles is not None)


def _check_values(rules: Rules, kv: PagedKV, k_new: Tensor, cos: Tensor | None) -> None:
    """Check the values of lengths and pages, on the CPU only, where reading them costs nothing."""
    tokens, size = k_new.shape[1], kv.k_pages.shape[1]
    written: dict[tuple[int, int], int] = {}  # (page, row) -> sequence
    capacity = kv.block_table.shape[1] * size
    for b, length in enumerate(kv.lengths.tolist()):
        rule = f"a length must be within 0 .. {capacity}, the keys of {many(kv.block_table.shape[1], 'page')}"
        if not rules.require(0 <= length <= capacity, f"lengths[{b}] is {length}", rule):
            continue
        if cos is not None:
            what = f"cos has {many(len(cos), 'row')}"
            rules.require(length <= len(cos), what, f"position {length - 1} of sequence {b} must be in it")
        for slot in range(max(length - tokens, 0) // size, -(-length // size)):
            page = int(kv.block_table[b, slot])
            rule = f"a page in use must be within 0 .. {len(kv.k_pages) - 1}, the pages of the cache"
            rules.require(0 <= page < len(kv.k_pages), f"block_table[{b}, {slot}] is {page}", rule)
        for position in range(max(length - tokens, 0), length):
            page, row = int(kv.block_table[b, position // size]), position % size
            if (page, row) in written:
                what = f"row {row} of page {page} gets the tokens of sequences {written[page, row]} and {b}"
                rules.add(what, "each new token must have a place of its own")
                break
            written[page, row] = b


def _append(kv: PagedKV, new: NewRows) -> None:
    """Append with torch operations."""
    tokens = torch.arange(new.k.shape[1], device=new.k.device)
    every = kv.lengths[:, None].long() - len(tokens) + tokens
    there = every >= 0  # other tokens are left out
    sequence, _ = there.nonzero(as_tuple=True)
    position, size = every[there], kv.k_pages.shape[1]
    page = kv.block_table[sequence, position // size].long()
    k = new.k[there] if new.angles is None else rotated(new.k[there], position, new.angles, new.interleaved)
    assert new.v is not None
    for pages, x, scale in ((kv.k_pages, k, kv.k_scale), (kv.v_pages, new.v[there], kv.v_scale)):
        write_rows(pages, (page, position % size), x, scale)
