"""The functions of flash-attn 2: module `flash_attn`, and `flash_attn.flash_attn_interface`.

Arguments, shapes and results are flash-attn's, except: the LSE of a row that sees no key is -inf; `return_attn_probs`
gives (out, lse, an empty tensor), since the third result exists for dropout only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from warpattn.api import attention
from warpattn.integrations.flash_attn import packed
from warpattn.integrations.flash_attn.cache import cached
from warpattn.integrations.flash_attn.modifiers import Tail, backend_for, scored, two_limits, visible
from warpattn.integrations.signature import Given, drop_in

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

VERSION = "2.8.3+warpattn"
OPTIONS = (
    "dropout_p=0.0, softmax_scale: number=None, causal=False, window_size=(-1, -1), softcap: number=0.0, "
    "alibi_slopes: (1, 2)=None, deterministic=False, return_attn_probs=False"
)
REFUSED = {"dropout_p": "there is no dropout: pass 0.0, as for inference"}
NAMES = {
    "seq.cu_q": "cu_seqlens_q",
    "seq.cu_k": "cu_seqlens_k",
    "seq.max_q": "max_seqlen_q",
    "seq.max_k": "max_seqlen_k",
    "kv.k_pages": "k",
    "kv.v_pages": "v",
    "kv.block_table": "block_table",
    "kv.lengths": "the difference of cu_seqlens_k",
    "ALiBi.slopes": "alibi_slopes",
}
CACHE_NAMES = NAMES | {
    "kv.k_pages": "k_cache",
    "kv.v_pages": "v_cache",
    "kv.lengths": "the length after appending",
    "k_pages": "k_cache",
    "v_pages": "v_cache",
    "k_new": "k",
    "v_new": "v",
    "lengths[": "the length after appending[",
    "cos has": "rotary_cos has",
    "sin has": "rotary_sin has",
    "rows of cos": "rows of rotary_cos",
}


def _tail(given: Given) -> Tail:
    mask = visible(given.causal, two_limits(given.window_size))
    backend = backend_for(given.deterministic)
    return Tail(mask, scored(given.softcap, given.alibi_slopes), scale=given.softmax_scale, backend=backend)


def _result(out: Tensor, lse: Tensor, given: Given) -> Any:
    return (out, lse, out.new_empty(0)) if given.return_attn_probs else out


def _dense(q: Tensor, k: Tensor, v: Tensor, given: Given) -> Any:
    if not given.return_attn_probs:
        return attention(q, k, v, **_tail(given)._asdict())
    out, lse = attention(q, k, v, **_tail(given)._asdict(), return_lse=True)
    return _result(out, lse, given)


def _varlen(queries: packed.Queries, keys: packed.Keys, given: Given) -> Any:
    return _result(*packed.attend(queries, keys, _tail(given)), given)


@drop_in(f"q, k, v, {OPTIONS}", REFUSED, names=NAMES)
def flash_attn_func(given: Given) -> Any:
    """q (batch, seq_q, heads_q, dim), k and v (batch, seq_k, heads_kv, dim)."""
    return _dense(given.q, given.k, given.v, given)


@drop_in(f"qkv: 5, {OPTIONS}", REFUSED, names=NAMES)
def flash_attn_qkvpacked_func(given: Given) -> Any:
    """qkv (batch, seq, 3, heads, dim)."""
    q, k, v = packed.parts("qkv", given.qkv, 2, 3)
    return _dense(q, k, v, given)


@drop_in(f"q, kv: 5, {OPTIONS}", REFUSED, names=NAMES)
def flash_attn_kvpacked_func(given: Given) -> Any:
    """q (batch, seq_q, heads_q, dim), kv (batch, seq_k, 2, heads_kv, dim)."""
    k, v = packed.parts("kv", given.kv, 2, 2)
    return _dense(given.q, k, v, given)


@drop_in(
    f"q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {OPTIONS}, block_table: table=None",
    REFUSED, names=NAMES,
)  # fmt: skip
def flash_attn_varlen_func(given: Given) -> Any:
    """q (total_q, heads_q, dim), k and v (total_k, heads_kv, dim), or pages by block_table."""
    keys = packed.Keys(given.k, given.v, given.cu_seqlens_k, given.max_seqlen_k, table=given.block_table)
    return _varlen(packed.Queries(given.q, given.cu_seqlens_q, given.max_seqlen_q), keys, given)


@drop_in(
    f"qkv: 4, cu_seqlens, max_seqlen, {OPTIONS}",
    REFUSED,
    names=NAMES | {"seq.cu_q": "cu_seqlens", "cu_seqlens_q": "cu_seqlens", "max_seqlen_q": "max_seqlen"},
)
def flash_attn_varlen_qkvpacked_func(given: Given) -> Any:
    """qkv (total, 3, heads, dim)."""
    q, k, v = packed.parts("qkv", given.qkv, 1, 3)
    starts = given.cu_seqlens, given.max_seqlen
    return _varlen(packed.Queries(q, *starts), packed.Keys(k, v, *starts), given)


@drop_in(
    f"q, kv: 4, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {OPTIONS}", REFUSED, names=NAMES,
)  # fmt: skip
def flash_attn_varlen_kvpacked_func(given: Given) -> Any:
    """q (total_q, heads_q, dim), kv (total_k, 2, heads_kv, dim)."""
    k, v = packed.parts("kv", given.kv, 1, 2)
    keys = packed.Keys(k, v, given.cu_seqlens_k, given.max_seqlen_k)
    return _varlen(packed.Queries(given.q, given.cu_seqlens_q, given.max_seqlen_q), keys, given)


_VERSION_3_ONLY = {
    "attention_chunk": 0,
    "cu_seqlens_q": None,
    "cu_seqlens_k_new": None,
    "max_seqlen_q": None,
    "rotary_seqlens": None,
    "qv": None,
    "q_descale": None,
    "k_descale": None,
    "v_descale": None,
    "reach": lambda keys, queries: (keys, keys),
}


@drop_in(
    "q: 4, k_cache: 4, v_cache: 4, k: 4=None, v: 4=None, rotary_cos: 2=None, rotary_sin: 2=None, cache_seqlens=None, "
    "cache_batch_idx: ints=None, cache_leftpad: ints=None, block_table: table=None, softmax_scale: number=None, "
    "causal=False, window_size=(-1, -1), softcap: number=0.0, rotary_interleaved=True, alibi_slopes: (1, 2)=None, "
    "num_splits=0, return_softmax_lse=False",
    hints={"num_splits"},
    names=CACHE_NAMES,
)
def flash_attn_with_kvcache(given: Given) -> Any:
    """q (batch, seq_q, heads_q, dim), caches (batch, capacity, heads_kv, dim) or pages; see `cache`. No backward."""
    mask = visible(given.causal, two_limits(given.window_size), first_key=given.cache_leftpad)
    tail = Tail(mask, scored(given.softcap, given.alibi_slopes), scale=given.softmax_scale)
    wider = Given(vars(given) | _VERSION_3_ONLY | {"page_table": given.block_table})
    out, lse = cached(wider, tail)
    return (out, lse) if given.return_softmax_lse else out
