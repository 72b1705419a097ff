"""warpattn as an attention implementation of Hugging Face transformers (extra `transformers`).

    from warpattn.integrations.transformers import register
    register()
    model = AutoModel.from_pretrained(name, attn_implementation="warpattn")

transformers asks two functions of an implementation: one makes the mask, once per forward pass, the other attends, once
per layer. Its own implementations hand a (batch, 1, queries, keys) tensor from one to the other. Here a `Mask` goes
that way: it knows which tiles it hides, and is a few bytes where the tensor grows with the square of the length. What
has no `Mask` of its own (a model's private mask function, a static cache) still arrives as such a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from warpattn.api import attention
from warpattn.check import AttentionError
from warpattn.masks import Causal, CustomMask, Full, Mask, Materialized, Padding
from warpattn.scores import SoftCap

NAME = "warpattn"


def register(name: str = NAME) -> None:
    """Make `attn_implementation=name` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, build_mask)


def attend(
    module: nn.Module,
    query: Tensor,  # [batch, heads_q, queries, head_dim]
    key: Tensor,  # [batch, heads_kv, keys, head_dim]
    value: Tensor,  # [batch, heads_kv, keys, head_dim_v]
    attention_mask: Mask | Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: returns (batch, queries, heads, head_dim_v) and no attention weights.

    Understood options: `softcap`, `s_aux` (sinks, one logit per query head), `is_causal`. Raises AttentionError for
    dropout and for a position bias, which would change the result if they were ignored.
    """
    _refuse(options)
    cap = options.get("softcap")
    out = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        mask=_as_mask(module, attention_mask, options.get("is_causal")),
        score=SoftCap(cap) if cap else None,
        sinks=options.get("s_aux"),
        scale=scaling,
    )
    assert isinstance(out, Tensor)  # return_lse is off
    return out, None


def build_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Mask:
    """transformers' mask function: the `Mask` of one forward pass.

    `attention_mask` is bool (batch, keys), True for real tokens. Causal and bidirectional masks, with padding on either
    side or anywhere, become masks by formula; everything else is computed by transformers and becomes `Materialized`.
    """
    plain = {causal_mask_function: Causal(), bidirectional_mask_function: Full()}.get(mask_function)
    # Our rows end at the last key; a cache with room after the last token does not.
    aligned = mask_function is bidirectional_mask_function or q_offset + q_length == kv_length
    fits = attention_mask is None or attention_mask.shape == (batch_size, kv_length)
    if plain is not None and aligned and fits:
        return plain if attention_mask is None else plain & _padding(attention_mask)
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    full = sdpa_mask(
        batch_size, q_length, kv_length, q_offset, mask_function=mask_function, attention_mask=attention_mask, **options
    )
    assert full is not None  # it may be skipped only where that is allowed
    return Materialized(full)


def _padding(real: Tensor) -> Mask:
    """The mask of a bool (batch, keys) tensor; tokens at the front of every row need no tensor look-up per key."""
    lengths = real.sum(dim=1, dtype=torch.int32)
    at_front = torch.arange(real.shape[1], device=real.device) < lengths[:, None]
    if torch.equal(at_front, real):
        return Padding(lengths)
    return CustomMask(lambda b, h, q, k, real: real[b, k], real=real)


def _as_mask(module: nn.Module, mask: Mask | Tensor | None, is_causal: bool | None) -> Mask:
    if isinstance(mask, Mask):
        return mask
    if mask is not None:
        return Materialized(mask)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return Causal() if causal else Full()


def _refuse(options: dict[str, Any]) -> None:
    dropout = options.get("dropout") or 0.0
    if dropout:
        raise AttentionError(f"dropout is {dropout}; warpattn has none: call model.eval() or set the rate to 0")
    if options.get("position_bias") is not None:
        raise AttentionError("position_bias is a tensor; this adapter does not add it: use attn_implementation='sdpa'")
