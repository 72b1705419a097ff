"""The functions of flash-attn 3: module `flash_attn_interface`.

Arguments, their order, shapes and results are flash-attn's. Keys and values, or all three, may have 8 bits (see
`descaled`); the result of 8-bit queries is in bf16 and has no backward. The absorbed query `qv` of latent attention is
served (see `latent`). `get_scheduler_metadata` gives an empty tensor: plans are made, and remembered, per
call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warpattn.api import attention
from warpattn.errors import AttentionError
from warpattn.inputs import kind_of
from warpattn.integrations.flash_attn import descaled, packed
from warpattn.integrations.flash_attn.cache import cached
from warpattn.integrations.flash_attn.latent import absorbed
from warpattn.integrations.flash_attn.modifiers import Tail, backend_for, scored, two_limits, visible
from warpattn.integrations.flash_attn.version2 import CACHE_NAMES, NAMES
from warpattn.integrations.signature import Given, drop_in
from warpattn.serving.filled import fill, require_own

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

VERSION = "3.0.0+warpattn"
SCALES = "q_descale=None, k_descale=None, v_descale=None"
OPTIONS = (
    f"softmax_scale: number=None, causal=False, qv=None, {SCALES}, window_size=(-1, -1), attention_chunk=0, "
    "softcap: number=0.0, "
    "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
)
HINTS = {"num_splits", "pack_gqa", "sm_margin"}
RESULTS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # dtypes of combined outputs
PAGED = {"kv.block_table": "page_table", "block_table": "page_table"}


def _tail(given: Given, first_key: Tensor | None = None) -> Tail:
    mask = visible(given.causal, two_limits(given.window_size), given.attention_chunk, first_key)
    return Tail(mask, scored(given.softcap), scale=given.softmax_scale)


def _trained(given: Given) -> Tail:
    """Return keyword arguments of functions that have a backward."""
    return _tail(given)._replace(backend=backend_for(given.deterministic))


def _scaled(given: Given) -> Given:
    """Return the arguments with scales in queries, keys and values."""
    given = descaled.read(given, "q", "k", "v")
    named = vars(given)
    factors = descaled.Factors(given.k_descale, given.v_descale, named.get("qv"))
    if factors.k is None and factors.v is None and given.q_descale is None:
        return given
    q = descaled.of_queries(given.q, given.k, named.get("cu_seqlens_q"), given.q_descale, factors.qv)
    k, v, cu = given.k, given.v, named.get("cu_seqlens_k")
    k, v = descaled.of_batch(k, v, factors) if cu is None else descaled.of_rows(k, v, cu, factors)
    return Given(named | {"q": q, "k": k, "v": v})


def _dense(q: descaled.Rows, k: descaled.Rows, v: descaled.Rows, given: Given) -> Any:
    return attention(q, k, v, **_trained(given)._asdict(), return_lse=bool(given.return_attn_probs))


@drop_in(f"q, k, v, {OPTIONS}", hints=HINTS)
@descaled.forward_only
def flash_attn_func(given: Given) -> Any:
    """q (batch, seq_q, heads_q, dim), k (batch, seq_k, heads_kv, dim), v (batch, seq_k, heads_kv, dim_v); `latent` for
    qv (batch, seq_q, heads_q, dim_v), `descaled` for q_descale, k_descale and v_descale (batch, heads_kv)."""
    given = _scaled(given)
    given = given if given.qv is None else absorbed(given)
    return _dense(given.q, given.k, given.v, given)


@drop_in(
    f"qkv: (4, 5), softmax_scale: number=None, causal=False, {SCALES}, window_size=(-1, -1), attention_chunk=0, "
    "softcap: number=0.0, deterministic=False, num_heads_q: count=None, sm_margin=0, return_attn_probs=False",
    hints={"sm_margin"},
)
@descaled.forward_only
def flash_attn_qkvpacked_func(given: Given) -> Any:
    """qkv (batch, seq, 3, heads, dim), or (batch, seq, heads_q + 2 * heads_kv, dim) with num_heads_q."""
    qkv, heads = given.qkv, given.num_heads_q
    if qkv.ndim == 5:
        q, k, v = packed.parts("qkv", qkv, 2, 3)
    elif heads is None or qkv.ndim != 4 or heads >= qkv.shape[2] or (qkv.shape[2] - heads) % 2:
        rule = "with a qkv of rank 4 it says how many heads are queries, an even number of others being keys and values"
        raise AttentionError(f"num_heads_q is {heads!r} and qkv has shape {tuple(qkv.shape)}; {rule}")
    else:
        keys = (qkv.shape[2] - heads) // 2
        q, k, v = qkv.split([heads, keys, keys], dim=2)
    given = _scaled(Given(vars(given) | {"q": q, "k": k, "v": v}))
    return _dense(given.q, given.k, given.v, given)


@drop_in(
    "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, " + OPTIONS,
    hints=HINTS,
    names=NAMES,
)
@descaled.forward_only
def flash_attn_varlen_func(given: Given) -> Any:
    """q (total_q, heads_q, dim), k (total_k, heads_kv, dim), v (total_k, heads_kv, dim_v), qv like v in heads of q."""
    given = _scaled(given)
    given = given if given.qv is None else absorbed(given)
    queries = packed.Queries(given.q, given.cu_seqlens_q, given.max_seqlen_q, given.seqused_q)
    keys = packed.Keys(given.k, given.v, given.cu_seqlens_k, given.max_seqlen_k, given.seqused_k)
    out, lse = packed.attend(queries, keys, _trained(given))
    return (out, lse) if given.return_attn_probs else out


@drop_in(
    "q: (3, 4, None), k_cache: (4, None), v_cache: 4, k: (3, 4)=None, v: (3, 4)=None, qv: (3, 4)=None, "
    "rotary_cos: 2=None, rotary_sin: 2=None, cache_seqlens=None, cache_batch_idx: ints=None, cache_leftpad: ints=None, "
    "page_table: table=None, cu_seqlens_q: ints=None, cu_seqlens_k_new: ints=None, max_seqlen_q=None, "
    f"rotary_seqlens: ints=None, {SCALES}, softmax_scale: number=None, causal=False, window_size=(-1, -1), "
    "attention_chunk=0, softcap: number=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, "
    "pack_gqa=None, sm_margin=0, return_softmax_lse=False",
    hints={"scheduler_metadata", "num_splits", "pack_gqa", "sm_margin"},
    names=CACHE_NAMES | PAGED,
)
def flash_attn_with_kvcache(given: Given) -> Any:
    """q (batch, seq_q, heads_q, dim), or (total_q, heads_q, dim) with cu_seqlens_q; see `cache`. No backward."""
    given = descaled.read(given, "q", "k_cache", "v_cache")
    wider = Given(vars(given) | {"reach": lambda keys, queries: (keys - 1, queries - 1)})
    out, lse = cached(wider, _tail(given, given.cache_leftpad))
    return (out, lse) if given.return_softmax_lse else out


@drop_in("out_partial: tensor, lse_partial: tensor, out: tensor=None, out_dtype=None")
def flash_attn_combine(given: Given) -> tuple[Tensor, Tensor]:
    """Merge partial results over different keys: out (..., heads, dim) and lse (..., heads).

    out_partial (splits, ..., heads, dim) and lse_partial (splits, ..., heads), fp32. The result is in the dtype of
    `out`, else in out_dtype, else in that of out_partial. A row that no part has seen gives 0 and -inf.
    """
    for name in ("out_partial", "lse_partial"):
        dtype = getattr(given, name).dtype
        if not dtype.is_floating_point:
            raise AttentionError(f"{name} has dtype {dtype}; it must be a float dtype")
    parts, lses = given.out_partial.float(), given.lse_partial.float()
    if parts.shape[:-1] != lses.shape:
        raise AttentionError(
            f"lse_partial has shape {tuple(lses.shape)}; it must be that of out_partial without the last axis, "
            f"{tuple(parts.shape[:-1])}"
        )
    shape, dtype = parts.shape[1:], given.out_partial.dtype if given.out_dtype is None else given.out_dtype
    if given.out is not None and given.out.shape != shape:
        raise AttentionError(f"out has shape {tuple(given.out.shape)}; it must be {tuple(shape)}")
    if not isinstance(dtype, torch.dtype) or dtype not in RESULTS:
        raise AttentionError(f"out_dtype is {kind_of(dtype)}; it must be one of {', '.join(map(str, RESULTS))}")
    if given.out is not None and given.out.dtype not in RESULTS:
        raise AttentionError(f"out has dtype {given.out.dtype}; it must be one of {', '.join(map(str, RESULTS))}")
    if given.out is not None and not torch.compiler.is_compiling():
        require_own({"out": given.out})
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.softmax(lses.masked_fill(lse == -torch.inf, 0.0), dim=0)[..., None]
    seen = (lses != -torch.inf)[..., None]
    result = (weights * parts.where(seen, 0.0)).sum(0)  # a part that saw no key may hold any values
    if given.out is not None:
        return fill(given.out, result), lse
    return result.to(dtype), lse


@drop_in(
    "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens: ints, qkv_dtype=None, "
    "headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, "
    "max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, "
    "pack_gqa=None, sm_margin=0",
    hints={
        "batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim", "qkv_dtype",
        "headdim_v", "cu_seqlens_q", "cu_seqlens_k_new", "cache_leftpad", "page_size", "max_seqlen_k_new", "causal",
        "window_size", "attention_chunk", "has_softcap", "num_splits", "pack_gqa", "sm_margin",
    },
)  # fmt: skip
def get_scheduler_metadata(given: Given) -> Tensor:
    """An empty int32 tensor to pass on as scheduler_metadata."""
    return torch.empty(0, dtype=torch.int32, device=given.cache_seqlens.device)
