"""Models with latent attention (MLA) in SGLang.

    decode    queries (tokens, heads, 512) and (…, 64), pages        `attention_paged`, `LatentQuery`
    prompts   q and k (tokens, heads, 192), v (tokens, heads, 128)   `attention_varlen`: new tokens, chunks of context

SGLang's own classes project between the two forms, gather context and merge parts by their LSE.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from warpattn.api import attention_paged, attention_varlen
from warpattn.errors import AttentionError
from warpattn.integrations.step_plans import LayerModifiers
from warpattn.masks import Full
from warpattn.sequences import PagedKV, Ragged
from warpattn.sequences.latent_query import of_parts

NAME = "warpattn"


def register(runner: Any) -> None:
    """Tell SGLang's models which form this backend takes; for unknown backends they use decode's form for prompts, with
    queries and keys joined.

    SGLang scales queries by their positions (Mistral's models) only where it joins them, so those models keep that.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS as IN_PARTS

    config = getattr(getattr(runner, "model_config", None), "hf_config", None)
    joins = getattr(config, "llama_4_scaling", None) is not None
    if joins == (NAME in IN_PARTS):
        (IN_PARTS.remove if joins else IN_PARTS.append)(NAME)

    def form(attn: Any, batch: Any) -> Any:
        prompts = batch.forward_mode.is_extend_without_speculative()
        return AttnForwardMethod.MHA_CHUNKED_KV if prompts else AttnForwardMethod.MLA

    AttentionBackendRegistry.register(NAME, form)


def prompts(
    q: Tensor, k: Tensor | None, v: Tensor | None, new: Ragged, layer: Any, batch: Any, modifiers: LayerModifiers
) -> Any:
    """Attend new tokens to themselves (`new`), or to a chunk of their context, as `batch` says.

    Returns out (tokens, heads · Dv); where SGLang merges parts, out (tokens, heads, Dv) and a natural lse (tokens,
    heads).
    """
    if k is None or v is None:
        raise AttentionError("k and v are None; layers of prompts of latent attention share no keys")
    tail, seq = modifiers.tail(q.device), new
    if batch.attn_attend_prefix_cache:
        chunk = batch.prefix_chunk_idx
        longest = batch.prefix_chunk_max_seq_lens[chunk]
        seq = Ragged(new.cu_q, batch.prefix_chunk_cu_seq_lens[chunk], new.max_q, longest)
        tail["mask"] = Full()
    k, v = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim), v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
    out, lse = attention_varlen(q, k, v, seq, return_lse=True, **tail)
    return (out, lse.transpose(0, 1).contiguous()) if batch.mha_return_lse else out.flatten(1)


def decode(kv: PagedKV, modifiers: LayerModifiers, seq: Ragged, *q: Tensor) -> Tensor:
    """Attend q (tokens, heads, 576), or 512 and 64 columns of it, up to `seq.max_q` tokens of a request; returns
    (tokens, heads · 512)."""
    requests, (first, *_), tail = len(kv.lengths), q, modifiers.tail(q[0].device)
    out = first.new_empty(*first.shape[:2], kv.v_pages.shape[-1])
    if len(first) == requests * (seq.max_q or 0):
        *rows, found = (x.unflatten(0, (requests, -1)) for x in (*q, out))
        attention_paged(of_parts(*rows), kv, out=found, **tail)
    else:
        attention_paged(of_parts(*q), kv, seq, out=out, **tail)
    return out.flatten(1)
