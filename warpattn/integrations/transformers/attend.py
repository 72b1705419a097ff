"""transformers' attention function: turns one layer's arguments into one call of warpattn.

Every option that would change the result is either supported or refused. Supported: the mask (a `Mask` of `build_mask`,
a 4-D tensor of the user's, or none), `softcap`, `s_aux` (sinks), `position_bias`, `sliding_window` if there is no mask,
packed batches described by `cu_seq_lens_q` and `cu_seq_lens_k`, and continuous batching (`continuous.py`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from warpattn.api import attention, attention_varlen
from warpattn.errors import AttentionError
from warpattn.inputs import of_type
from warpattn.integrations.transformers.continuous import read_cache
from warpattn.integrations.transformers.masks import ForwardMask
from warpattn.masks import And, Causal, Document, Full, Mask, Materialized, SlidingWindow
from warpattn.scores import Bias, Score, SoftCap
from warpattn.sequences import Ragged
from warpattn.torch_modes import autocast

# Options that would change the result, and what to do instead.
REFUSED = {
    "head_mask": "warpattn weighs no heads: use attn_implementation='eager'",
    "output_attentions": "warpattn never has the weights in memory: use attn_implementation='eager'",
}

# Names of attention's dropout rate in configurations; the error names the first that has the given rate.
DROPOUT_KEYS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout", "dropout_rate",
                "attention_dropout_rate", "attn_dropout_prob", "dropout")  # fmt: skip


def attend(
    module: nn.Module,
    query: Tensor,  # [batch, heads_q, queries, head_dim]
    key: Tensor,  # [batch, heads_kv, keys, head_dim]
    value: Tensor,  # [batch, heads_kv, keys, head_dim_v]
    attention_mask: Mask | Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Returns (batch, queries, heads, head_dim_v) and no attention weights.

    Raises AttentionError for options that warpattn does not have and that would change the result (`REFUSED`).
    """
    _refuse_dropout(module, options.get("dropout"))
    _refuse(options)
    cache = options.get("cache")
    if cache is not None:
        key, value = read_cache(cache, module, key, value, options)
    mask = _as_mask(module, attention_mask, options)
    modifiers = {"score": _score(options), "sinks": _sinks(query, options.get("s_aux")), "scale": scaling}
    q, k, v = (autocast(x).transpose(1, 2) for x in (query, key, value))  # models leave some of them in fp32
    packed = _packed(options)
    if packed is None:
        out = attention(q, k, v, mask=mask, **modifiers)
    else:
        if len(q) != 1:
            raise AttentionError(
                f"cu_seq_lens_q is given and the batch is {len(q)}; packed sequences need a batch of 1"
            )
        out = attention_varlen(q[0], k[0], v[0], packed, mask=_within_sequences(mask), **modifiers)
        assert isinstance(out, Tensor)  # return_lse is off
        out = out[None]
    assert isinstance(out, Tensor)
    return out, None


def _refuse_dropout(module: nn.Module, rate: float | None) -> None:
    """Refuse dropout; a model in training mode passes the rate of its configuration."""
    if not rate:
        return
    config = getattr(module, "config", None)
    keys = [name for name in DROPOUT_KEYS if getattr(config, name, None) == rate]
    where = f"config.{keys[0]}" if keys else "the attention dropout of the model's configuration"
    raise AttentionError(f"dropout is {rate}; warpattn has none: set {where} to 0 to train, or call model.eval()")


def _refuse(options: dict[str, Any]) -> None:
    for name, advice in REFUSED.items():
        value = options.get(name)
        if value is None or value is False:
            continue
        given = value if isinstance(value, bool | float | int) else of_type(value)
        raise AttentionError(f"{name} is {given}; {advice}")


def _as_mask(module: nn.Module, mask: Mask | Tensor | None, options: dict[str, Any]) -> Mask:
    if isinstance(mask, Mask):
        return mask.mask if isinstance(mask, ForwardMask) else mask
    if mask is not None:
        return Materialized(mask)
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    window = options.get("sliding_window")
    if window is None:
        return Causal() if is_causal else Full()
    return SlidingWindow(window) if is_causal else SlidingWindow(window + 1, right=window)


def _score(options: dict[str, Any]) -> Score | None:
    """Make the score: soft-cap, then position bias, as eager attention does; a mask comes after both."""
    cap, bias = options.get("softcap"), options.get("position_bias")
    if bias is None:
        return SoftCap(cap) if cap else None
    return SoftCap(cap) | Bias(bias) if cap else Bias(bias)


def _sinks(query: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Return the sinks in a dtype that `attention` takes: the queries', else fp32."""
    return sinks if sinks is None or sinks.dtype == query.dtype else sinks.float()


def _packed(options: dict[str, Any]) -> Ragged | None:
    """Return the sequences of a packed batch, if the caller gives their offsets."""
    cu_q, cu_k = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if cu_q is None:
        return None
    longest = [options.get(name) for name in ("max_length_q", "max_length_k")]
    max_q, max_k = (x if isinstance(x, int) else None for x in longest)
    cu_k = None if cu_k is cu_q or cu_k is None else cu_k.int()
    return Ragged(cu_q.int(), cu_k, max_q=max_q, max_k=max_k)


def _within_sequences(mask: Mask) -> Mask:
    """Return the mask within one sequence of a packed batch, without `Document`, which the offsets replace."""
    match mask:
        case And(left, right):
            parts = [part for part in map(_within_sequences, (left, right)) if part != Full()]
            return parts[0] & parts[1] if len(parts) == 2 else (parts or [Full()])[0]
        case Document():
            return Full()
        case Causal() | SlidingWindow() | Full():
            return mask
    rule = "packed sequences take causal, bidirectional and sliding-window masks, and no padding"
    raise AttentionError(f"cu_seq_lens_q is given and the mask has {of_type(mask)}; {rule}")
