"""What results of transformers' models are judged by: the model in fp32 with attention written out, one head at a time.

One head's scores are all that is in memory, so that 16 k tokens fit; for a backward pass they are computed again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

NAME = "bench_exact"


def register() -> None:
    """Make `attn_implementation=NAME` known to transformers."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """As transformers' eager attention: scale, soft-cap, mask, sinks, softmax."""
    batch, heads, queries, _ = query.shape
    group, sinks = heads // key.shape[1], options.get("s_aux")
    out = query.new_empty(batch, queries, heads, value.shape[-1])
    rows = []
    for b in range(batch):
        mask = None if attention_mask is None else attention_mask[min(b, len(attention_mask) - 1), 0]
        for h in range(heads):
            k, v = key[b, h // group], value[b, h // group]
            sink = None if sinks is None else sinks[h]
            given = (query[b, h], k, v, mask, sink, scaling, options.get("softcap"))
            if torch.is_grad_enabled():
                rows.append(checkpoint(_head, *given, use_reentrant=False))
            else:
                out[b, :, h] = _head(*given)
    if rows:
        out = torch.stack(rows).unflatten(0, (batch, heads)).transpose(1, 2)
    return out, None


def _head(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sink: Tensor | None, scaling: float, cap: float | None
) -> Tensor:
    scores = q @ k.T * scaling
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        scores = scores + mask[:, : len(k)]
    if sink is not None:
        scores = torch.cat((scores, sink.expand(len(q), 1)), 1)
    return scores.softmax(1)[:, : len(k)] @ v


@contextmanager
def exact(model: Any) -> Iterator[Any]:
    """The model in fp32, to be thrown away."""
    twin = copy.deepcopy(model).float()
    twin.set_attn_implementation(NAME)
    yield twin


@torch.inference_mode()
def logits_of_end(model: Any, texts: Sequence[Sequence[int]], tokens: int) -> Tensor:
    """Of the last `tokens` positions of each text, (texts, tokens, vocabulary)."""
    found = []
    for text in texts:
        ids = torch.tensor([list(text)], device=model.device)
        found.append(model(ids, use_cache=False, logits_to_keep=tokens).logits[0].float())
    return torch.stack(found)


def usual_error(model: Any, texts: Sequence[Sequence[int]], tokens: int) -> float:
    """Of the logits as the model is, beside fp32's: a share of the largest."""
    with exact(model) as twin:
        true = logits_of_end(twin, texts, tokens)
    return float((logits_of_end(model, texts, tokens) - true).abs().max() / true.abs().max())


def error_of_choices(model: Any, prompts: Sequence[Sequence[int]], chosen: Sequence[Sequence[int]]) -> float:
    """Of tokens chosen greedily: half of the largest distance, in fp32's logits over the same text, from the best token
    to the chosen one; two logits that are each off by that much swap places."""
    count = len(chosen[0])
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, chosen, strict=True)]
    with exact(model) as twin:
        logits = logits_of_end(twin, texts, count + 1)[:, :-1]
    index = torch.tensor([list(tokens) for tokens in chosen], device=logits.device)
    taken = logits.gather(2, index[..., None])[..., 0]
    return float((logits.amax(2) - taken).max() / logits.abs().max()) / 2
