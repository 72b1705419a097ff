"""Continuous batching (`generate_batch`): attends a step of many requests over transformers' own paged cache.

    queries    q q q q | q | q           cu_seq_lens_q      new tokens of each request, end to end, a batch of 1
    keys       k k k k | k k k | k k     cu_seq_lens_k      read from the cache by `cache.update`

transformers allows its own implementations only: on a card with flash-attn it replaces any other with one line in the
log, elsewhere it refuses it. So we wrap its choice to keep a model's implementation if that is ours.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor, nn
from transformers.generation.continuous_batching import ContinuousBatchingManager

from warpattn.errors import AttentionError
from warpattn.inputs import of_type

CHOICE = "switch_to_cb_friendly_attn"
THEIR_NAMES = {"cu_seq_lens_k": "cu_seq_lens_k", "max_length_q": "max_seqlen_q", "max_length_k": "max_seqlen_k"}
_names: set[str] = set()


def admit(name: str) -> None:
    """Let continuous batching keep `attn_implementation=name`."""
    if not _names:
        _wrap_choice()
    _names.add(name)


def _wrap_choice() -> None:
    """Wrap transformers' choice of an implementation, in versions that have one."""
    choose = getattr(ContinuousBatchingManager, CHOICE, None)
    if choose is None:
        return

    @functools.wraps(choose)
    def keep_ours(manager: Any, model: Any, *options: Any, **named: Any) -> None:
        if model.config._attn_implementation not in _names:
            choose(manager, model, *options, **named)

    setattr(ContinuousBatchingManager, CHOICE, keep_ours)


def read_cache(
    cache: Any, module: nn.Module, key: Tensor, value: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Write a step's keys and values (1, heads, tokens, head_dim) into the cache; return all that its requests see, and
    set their offsets in `options`."""
    if not hasattr(cache, "update") or options.get("block_table") is not None:
        given = "a block table" if hasattr(cache, "update") else of_type(cache)
        raise AttentionError(f"cache is {given}; warpattn reads transformers' PagedAttentionCache by its index")
    what = {"key_states": key, "value_states": value, "layer_idx": module.layer_idx}
    if "kwargs" in inspect.signature(cache.update).parameters:
        return cache.update(**what, kwargs=options)
    return _read_rows(cache, what, module, options)


def _read_rows(
    cache: Any, what: dict[str, Any], module: nn.Module, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Do the same in transformers 5.17, whose cache gives rows (tokens, heads, head_dim) and whose options are per kind
    of layer."""
    rows = cache.update(**what, read_index=options["read_index"], write_index=options["write_index"])
    kind = "sliding_attention" if getattr(module, "sliding_window", None) else "full_attention"
    for name, theirs in THEIR_NAMES.items():
        given = options.get(theirs)
        options[name] = given[kind] if isinstance(given, dict) else given
    keys, values = (x.transpose(0, 1)[None] for x in rows)
    return keys, values
