"""flash_attn_with_kvcache: append to a cache, rotate, attend; for the versions 2 and 3.

    k, v new ─ rotate k ─▶ written into the cache at cache_seqlens[b], cache_seqlens[b] + 1, ...
    q ─ rotate ───────────▶ attention over the keys up to cache_seqlens[b] + new ones, the last query at the last key

A cache without a page table counts as one page per sequence: (batch, capacity, heads, head_dim). So kernels for pages
serve both kinds in place: `attention_paged`, and `append_paged` unless new tokens are ragged or rotated by positions
that are not their own. There is no backward, as in flash-attn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warpattn.api import attention, attention_paged
from warpattn.errors import AttentionError, many
from warpattn.inputs import is_tensor, kind_of, number
from warpattn.integrations.flash_attn import descaled, packed
from warpattn.integrations.flash_attn.latent import absorbed
from warpattn.integrations.flash_attn.modifiers import Tail, two_limits
from warpattn.integrations.signature import Given, require_integers
from warpattn.quantized import EIGHT_BIT, split
from warpattn.scores import CustomScore, chained
from warpattn.sequences import PagedKV
from warpattn.sequences.latent_query import parted
from warpattn.serving.append import append_paged
from warpattn.serving.new_tokens import rotated
from warpattn.serving.slots import append_slots

WHOLE = "the keys of 1 page"  # what rules say of a cache that is one page for each sequence


def cached(given: Given, tail: Tail) -> tuple[Tensor, Tensor]:
    """Append and attend; returns out and LSE. `given` has the arguments of version 3, and `reach`: a function of the
    numbers of keys and queries, from which on a side of a window counts as none."""
    try:
        return _cached(given, tail)
    except AttentionError as error:
        raise AttentionError(*(_named(reason, given) for reason in error.reasons)) from error


def _named(reason: str, given: Given) -> str:
    """Name lengths and capacity as the caller gave them: without new keys lengths are an argument, and a cache without
    a page table has no pages."""
    reason = reason.replace("kv.lengths", "cache_seqlens") if given.k is None else reason
    return reason.replace(WHOLE, "the keys that the cache holds") if given.page_table is None else reason


def _cached(given: Given, tail: Tail) -> tuple[Tensor, Tensor]:
    _check(given)
    if given.rotary_cos is None:  # then nothing is rotated, though programs pass it
        given = Given(vars(given) | {"rotary_seqlens": None})
    stored = _stored(given)
    apart = _beside(given)
    with torch.no_grad():
        before = _lengths(given)
        q, after = given.q, before
        if given.k is not None:
            assert before is not None  # _check
            after = _append(_as_stored(given, stored, apart), before)
            if given.rotary_cos is not None:
                q = _rotated_queries(given, before if given.rotary_seqlens is None else given.rotary_seqlens)
        turned = Given(vars(given) | {"q": q} | dict(zip(("k_cache", "v_cache"), stored, strict=True)))
        latent = turned if given.qv is None else absorbed(turned, "k_cache", "v_cache")
        q = descaled.of_queries(latent.q, given.k_cache, given.cu_seqlens_q, given.q_descale, given.qv)
        return _scaled_back(given, _attend(latent, q, after, _with_factor(tail, apart)), apart)


def _check(given: Given) -> None:
    """Check arguments that must be given together."""
    reasons: list[str] = []

    def require(ok: bool, reason: str) -> None:
        reasons.extend([] if ok else [reason])

    new, rotary = given.k is not None, given.rotary_cos is not None
    require(new == (given.v is not None), "one of k and v is None; both are given, or neither")
    require(not new or given.cache_seqlens is not None, "cache_seqlens is None; appending k and v needs it")
    require(rotary == (given.rotary_sin is not None), "one of rotary_cos and rotary_sin is None; both, or neither")
    require(not rotary or new, "rotary_cos is given without k; it rotates what is appended, so it needs k and v")
    require(new or given.cu_seqlens_k_new is None, "cu_seqlens_k_new is given without k; it divides k and v")
    for name in ("q", "k_cache"):
        absent = getattr(given, name) is None and given.qv is None
        require(not absent, f"{name} is None; only with qv it may be left out")
    require((given.q is None) == (given.k_cache is None), "one of q and k_cache is None; with qv both, or neither")
    ragged = {"cu_seqlens_q": ("q", "qv"), "cu_seqlens_k_new": ("k", "v")}
    for cu, names in ragged.items():
        for name, x in ((name, getattr(given, name)) for name in names):
            rank, how = (4, "without") if getattr(given, cu) is None else (3, "with")
            dtype = None if x is None else x.dtype
            require(dtype is None or dtype.is_floating_point, f"{name} has dtype {dtype}; it must be fp16 or bf16")
            fits = x is None or x.ndim == rank
            shape = () if x is None else tuple(x.shape)
            require(fits, f"{name} has shape {shape}; {how} {cu} it must have rank {rank}")
    batch = _batch(given) if not reasons else 0
    for name in ("cu_seqlens_k_new", "rotary_seqlens", "cache_leftpad", "cache_batch_idx"):
        x, size = getattr(given, name), batch + (name == "cu_seqlens_k_new")
        what = f"{name} must have {many(size, 'element')} for {many(batch, 'sequence')}"
        require(bool(reasons) or x is None or len(x) == size, what)
    for name, x in (("k", given.k), ("v", given.v)):
        dtype, stored = getattr(x, "dtype", None), getattr(given, f"{name}_cache").dtype
        rule = f"new keys and values have 16 bits, or the dtype of {name}_cache, {stored}, and no rotation"
        require(dtype not in EIGHT_BIT or (dtype == stored and not rotary), f"{name} has dtype {dtype}; {rule}")
    turned = rotary and getattr(given.q, "dtype", None) in EIGHT_BIT
    require(not turned, "q has 8 bits; queries that are rotated have 16: pass fp16 or bf16")
    if reasons:
        raise AttentionError(*reasons)


def _lengths(given: Given) -> Tensor | None:
    """Return cache_seqlens as int32 [batch]."""
    lengths = given.cache_seqlens
    if lengths is None:
        return None
    if is_tensor(lengths) and lengths.shape == (_batch(given),):
        require_integers("cache_seqlens", lengths)
        return lengths.to(torch.int32)
    length = number(lengths)
    if not isinstance(length, int) or not 0 <= length < 2**31:
        rule = f"it must be a tensor ({_batch(given)},), or an int from 0 on"
        raise AttentionError(f"cache_seqlens is {kind_of(lengths)}; {rule}")
    return torch.full((_batch(given),), length, dtype=torch.int32, device=_queries(given).device)


def _queries(given: Given) -> Tensor:
    return given.qv if given.q is None else given.q


def _batch(given: Given) -> int:
    return len(_queries(given)) if given.cu_seqlens_q is None else len(given.cu_seqlens_q) - 1


def _table(given: Given) -> Tensor:
    """Return the page table; without one, sequence b has page b. cache_batch_idx chooses rows of it."""
    rows = given.cache_batch_idx
    if given.page_table is not None:
        if rows is None:
            return given.page_table
        packed.within("cache_batch_idx", rows, len(given.page_table), "rows of the page table")
        return given.page_table[rows.long()]
    if rows is None:
        rows = torch.arange(_batch(given), device=_queries(given).device)
    else:
        packed.within("cache_batch_idx", rows, len(given.v_cache), "rows of the cache")
    return rows.to(torch.int32)[:, None]


def _own_pages(given: Given) -> bool:
    """Whether row b of the cache is the one page of sequence b."""
    return given.page_table is None and given.cache_batch_idx is None


def _stored(given: Given) -> tuple[descaled.Rows, descaled.Rows]:
    """Return the caches, 8-bit ones with scales."""
    k, v, own = given.k_cache, given.v_cache, _own_pages(given)
    factors = descaled.Factors(given.k_descale, given.v_descale, given.qv)
    if not own and factors.k is None and factors.v is None:
        return k, v
    batch = _batch(given)
    if not own:
        return descaled.of_pages(k, v, batch, factors)
    k, v = (x[:batch] if isinstance(x, Tensor) and x.ndim and len(x) > batch else x for x in (k, v))
    return descaled.of_batch(k, v, factors) if given.k is None else descaled.of_pages(k, v, batch, factors)


def _beside(given: Given) -> descaled.Factors:
    """Return factors of keys and values that are no scales of the cache, because sequences differ."""
    if _own_pages(given) and given.k is None:
        return descaled.Factors(None, None)
    return descaled.beside(descaled.Factors(given.k_descale, given.v_descale), _queries(given).shape[-2])


def _as_stored(given: Given, stored: tuple[descaled.Rows, descaled.Rows], apart: descaled.Factors) -> Given:
    """Return the arguments with new keys and values as the cache has them, and their scales: what has 8 bits stays as
    it is, what has a factor of its sequence alone is divided by it, in fp32."""
    exact = apart.k is not None or apart.v is not None
    new: dict[str, Any] = {name: getattr(given, name) for name in ("rotary_cos", "rotary_sin")}
    new = {name: x.float() if exact and x is not None else x for name, x in new.items()}
    cu, batch = given.cu_seqlens_k_new, _batch(given)
    for name, rows, differs in zip("kv", stored, apart, strict=False):
        x, (_, scale), factor = getattr(given, name), split(rows), getattr(given, f"{name}_descale")
        if x.dtype in EIGHT_BIT:
            x, scale = x.to(torch.bfloat16), None
        elif exact:
            x = x.float()
            if differs is not None and x.shape[-2] == factor.shape[1] and (cu is not None or len(x) == batch):
                own = factor[:, None] if cu is None else factor[packed.divided("cu_seqlens_k_new", cu, len(x)).sequence]
                x = x / own[..., None]
        new |= {name: x, f"{name}_scale": scale}
    return Given(vars(given) | new)


def _with_factor(tail: Tail, apart: descaled.Factors) -> Tail:
    """Return the keywords with scores multiplied by the keys' factors before anything else."""
    if apart.k is None:
        return tail
    return tail._replace(score=chained(CustomScore(_times, factor=apart.k), tail.score))


def _times(s: Any, b: Any, h: Any, q: Any, k: Any, factor: Any) -> Any:
    return s * factor[b, h]


def _scaled_back(given: Given, result: tuple[Tensor, Tensor], apart: descaled.Factors) -> tuple[Tensor, Tensor]:
    """Multiply outputs by the values' factors."""
    (out, lse), factor = result, apart.v
    if factor is None:
        return result
    at = None if given.cu_seqlens_q is None else packed.divided("cu_seqlens_q", given.cu_seqlens_q, len(out))
    rows = factor[:, None] if at is None else factor[at.sequence]
    return (out.float() * rows[..., None]).to(out.dtype), lse


def _append(given: Given, before: Tensor) -> Tensor:
    """Write the new keys and values into the cache; return the lengths with them."""
    k, v, table = given.k, given.v, _table(given)
    tail: dict[str, Any] = {"cos": given.rotary_cos, "sin": given.rotary_sin, "k_scale": given.k_scale}
    tail |= {"v_scale": given.v_scale, "interleaved": bool(given.rotary_interleaved)}
    if given.cu_seqlens_k_new is None and given.rotary_seqlens is None:
        after = before + k.shape[1]
        append_paged(given.k_cache, given.v_cache, table, after, k, v, **tail)
        return after
    if given.cu_seqlens_k_new is not None:
        at = packed.divided("cu_seqlens_k_new", given.cu_seqlens_k_new, len(k))
    else:
        at = packed.places("k", torch.full((len(k),), k.shape[1], device=k.device), k.shape[1])
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    size = given.k_cache.shape[1]
    target = before.long()[at.sequence] + at.position
    packed.within("cache_seqlens", target, table.shape[1] * size, "keys that the cache holds")
    start = before if given.rotary_seqlens is None else given.rotary_seqlens
    positions = None if given.rotary_cos is None else start.long()[at.sequence] + at.position
    slots = table.long()[at.sequence, target // size] * size + target % size
    append_slots(k, v, given.k_cache, given.v_cache, slots, positions=positions, **tail)
    return before + at.cu.diff()


def _rotated_queries(given: Given, start: Tensor) -> Tensor:
    """Rotate queries by positions from `start` on if the mask is causal or a window; else all by `start`."""
    q, start = given.q, start.long()
    local = given.causal or given.attention_chunk or _is_window(given)
    if given.cu_seqlens_q is not None:
        at = packed.divided("cu_seqlens_q", given.cu_seqlens_q, len(q))
        return _rotated(q, start[at.sequence] + at.position * bool(local), given)
    step = torch.arange(q.shape[1], device=q.device) * bool(local)
    return _rotated(q.flatten(0, 1), (start[:, None] + step).flatten(), given).view(q.shape)


def _is_window(given: Given) -> bool:
    """Whether window_size is a window for flash-attn, which drops sides as wide as the cache before it rotates."""
    keys = given.v_cache.shape[1] * (1 if given.page_table is None else given.page_table.shape[1])
    most = packed.bound("max_seqlen_q", given.max_seqlen_q) if given.cu_seqlens_q is not None else given.q.shape[1]
    reach = given.reach(keys, len(given.q) if most is None else most)
    return any(x is not None and x < far for x, far in zip(two_limits(given.window_size), reach, strict=True))


def _rotated(x: Tensor, position: Tensor, given: Given) -> Tensor:
    """Apply the rotary embedding to tokens x [total, heads, head_dim]."""
    angles = (given.rotary_cos, given.rotary_sin)
    packed.within("a rotary position", position, min(map(len, angles)), "rows of rotary_cos and rotary_sin")
    size = 2 * given.rotary_cos.shape[-1]
    if size > x.shape[-1]:
        raise AttentionError(f"rotary_cos turns {size} columns; q and k have {x.shape[-1]}")
    return rotated(x, position, angles, bool(given.rotary_interleaved))


def _attend(given: Given, q: descaled.Rows, lengths: Tensor | None, tail: Tail) -> tuple[Tensor, Tensor]:
    k, v = given.k_cache, given.v_cache
    if lengths is None and _own_pages(given) and given.cu_seqlens_q is None:
        out, lse = attention(q, k, v, **tail._asdict(), return_lse=True)
        return out, lse
    table = _table(given)
    if lengths is None:
        full = table.shape[1] * split(k)[0].shape[1]
        lengths = torch.full((_batch(given),), full, dtype=torch.int32, device=parted(q)[0].device)
    if given.cu_seqlens_q is not None:
        queries = packed.Queries(q, given.cu_seqlens_q, given.max_seqlen_q)
        return packed.attend(queries, packed.Keys(k, v, None, None, lengths, table), tail)
    (k, k_scale), (v, v_scale) = split(k), split(v)
    kv = PagedKV(k, v, table, lengths, k_scale=k_scale, v_scale=v_scale)
    out, lse = attention_paged(q, kv, **tail._asdict(), return_lse=True)
    return out, lse
