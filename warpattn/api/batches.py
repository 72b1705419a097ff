"""`attention_varlen` and `attention_paged`: sequences of different lengths, end to end or in a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from warpattn.api.dense import attend_call, with_backend
from warpattn.errors import AttentionError
from warpattn.inputs import of_type
from warpattn.masks import Mask
from warpattn.problem import Call
from warpattn.problem.backends import Backend
from warpattn.quantized import Quantized
from warpattn.scores import Score
from warpattn.sequences import PagedKV, PagedRagged, Ragged
from warpattn.sequences.latent_query import WITH_PARTS, LatentQuery, check_once, parted
from warpattn.sequences.ragged import with_parts


def attention_varlen(
    q: Tensor | Quantized | LatentQuery,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    seq: Ragged,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str | Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over sequences of different lengths laid end to end, without padding.

    q (total_q, Hq, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv), dtypes and heads as for `attention`; `seq` says where
    each sequence starts. Masks and scores see positions within a sequence. The keyword tail is described in
    `warpattn.api`.

    Returns out (total_q, Hq, Dv) in the dtype of q; with return_lse also lse (Hq, total_q), fp32 (fp64 for fp64).
    Raises AttentionError listing every broken rule.
    """
    q, k, v, seq = with_parts(q, k, v, seq)
    return attend_call(Call(q, k, v, seq, mask, score, sinks, scale, return_lse, out), backend)


def attention_paged(
    q: Tensor | Quantized | LatentQuery,
    kv: PagedKV,
    seq: Ragged | None = None,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str | Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a paged key/value cache.

    q (B, Sq, Hq, D): the newest Sq positions of each sequence; `kv` holds the pages, the block table and the lengths,
    which include those positions. The keyword tail is described in `warpattn.api`.

    With `seq` = Ragged(cu_q) sequences may have different numbers of newest positions, laid end to end: q (total_q, Hq,
    D), any mix of prompts, parts of prompts and single new tokens, as a step of an engine has. The host reads no
    lengths: sequences of few queries go to the decode kernel and others to the prefill kernel on the device, in a fixed
    number of launches. With `seq.max_q`, the most queries of a sequence, unneeded launches are left out. On a card
    cu_q may end before total_q: rows after it are padding and are not written.

    Returns out (B, Sq, Hq, Dv) in the dtype of q; with return_lse also lse (B, Hq, Sq). With `seq` these are (total_q,
    Hq, Dv) and (Hq, total_q).
    Raises AttentionError listing every broken rule.
    """
    if not isinstance(kv, PagedKV):
        rule = "kv must be a warpattn PagedKV(k_pages, v_pages, block_table, lengths)"
        raise AttentionError(f"kv is {of_type(kv)}; {rule}")
    if seq is not None and not isinstance(seq, Ragged):
        raise AttentionError(f"seq is {of_type(seq)}; seq must be None or a warpattn Ragged(cu_q)")
    if isinstance(q, WITH_PARTS):
        q, q_fields = parted(q)
        check_once("kv", kv, q_fields)
        kv = kv.with_fields(**q_fields)
    layout = kv if seq is None else PagedRagged(kv, seq)
    call = Call(q, kv.k_pages, kv.v_pages, layout, mask, score, sinks, scale, return_lse, out)
    recorded = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()  # launches would not be seen
    if isinstance(kv.shared_pages, int) and kv.shared_pages and not recorded:
        from warpattn.runtime.merging.cascade import cascaded  # few calls need it

        result = cascaded(with_backend(call, backend))
        if result is not None:
            return result
    return attend_call(call, backend)
