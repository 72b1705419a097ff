"""One layer's attention in vLLM."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl

from warpattn.api import attention_paged, attention_varlen
from warpattn.errors import AttentionError
from warpattn.integrations.step_plans import LayerModifiers, ScoreOptions
from warpattn.integrations.vllm.layer import EIGHT_BIT, ENCODERS, LayerOptions, check_options, layer_mask
from warpattn.integrations.vllm.metadata import WarpattnMetadata
from warpattn.sequences import PagedKV, Ragged
from warpattn.serving import append_slots, reserve_workspace


def key_and_value_pages(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Return views (pages, page size, heads, head_dim) of vLLM's cache (pages, heads, page size, keys and values)."""
    keys, values = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    return keys, values


class Cache(NamedTuple):
    """A layer's cache: pages as in `key_and_value_pages`, and its scales if it has 8 bits."""

    keys: Tensor
    values: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def pages(self, block_table: Tensor, lengths: Tensor) -> PagedKV:
        """The pages of some requests."""
        return PagedKV(
            self.keys, self.values, block_table, lengths, k_scale=self.k_scale, v_scale=self.v_scale
        )


def whole(scale: Tensor) -> Tensor:
    """Return a scale of one number, which may have shape [1], without dimensions."""
    return scale.reshape(()) if scale.numel() == 1 else scale


class WarpattnImpl(AttentionImpl[WarpattnMetadata]):
    """One layer's attention."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        unknown = set(named) - set(LayerOptions._fields)
        if unknown:
            rule = "warpattn's vLLM backend would ignore it"
            raise AttentionError(*(f"{name} is an option of this model; {rule}" for name in sorted(unknown)))
        options = LayerOptions(*arguments, **named)
        check_options(options)
        self.options = options
        self.num_heads, self.head_size, self.scale = options.num_heads, options.head_size, float(options.scale)
        self.num_kv_heads = options.num_heads if options.num_kv_heads is None else options.num_kv_heads
        self.kv_cache_dtype = options.kv_cache_dtype
        slopes = None if options.alibi_slopes is None else tuple(options.alibi_slopes)
        score = ScoreOptions(options.logits_soft_cap, slopes)
        self.modifiers = LayerModifiers(layer_mask(options), score, self.scale)
        self.both_directions = LayerModifiers(layer_mask(options, causal=False), score, self.scale)
        self._sinks: Tensor | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Convert sinks once to what kernels read."""
        self._sinks = None if self.options.sinks is None else self.options.sinks.detach().float().contiguous()

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values [tokens, heads, head_dim] into their slots; slot -1 is padding, and so are tokens
        without a slot."""
        if self.options.attn_type not in ENCODERS:
            cache = self._cache(layer, kv_cache)
            pages = (cache.keys, cache.values)
            append_slots(key, value, *pages, slot_mapping, k_scale=cache.k_scale, v_scale=cache.v_scale)

    def _cache(self, layer: Any, kv_cache: Tensor) -> Cache:
        """Return the cache; vLLM keeps 8-bit values as bytes, and their scales in the layer."""
        stored = EIGHT_BIT.get(self.kv_cache_dtype)
        if stored is None:
            return Cache(*key_and_value_pages(kv_cache, self.head_size))
        pages = key_and_value_pages(kv_cache.view(stored), self.head_size)
        return Cache(*pages, whole(layer._k_scale), whole(layer._v_scale))

    def forward(
        self,
        layer: Any,
        query: Tensor,  # [tokens, heads, head_dim], and maybe rows of padding after them
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: WarpattnMetadata | None,
        output: Tensor,
        **scales: Any,
    ) -> Tensor:
        """Write the attention of every token into `output` and return it."""
        given = [name for name, scale in scales.items() if scale is not None]
        if given:
            raise AttentionError(
                f"{given[0]} is given; warpattn's vLLM backend writes outputs in the dtype of the queries"
            )
        if attn_metadata is None:  # vLLM's memory profiling
            reserve_workspace(query.device)
            return output.fill_(0)
        out = output.view(len(output), self.num_heads, self.head_size)
        if self.options.attn_type in ENCODERS:
            self._fresh(attn_metadata, self.modifiers, (query, key, value), out)
            return output
        shared = self.options.kv_sharing_target_layer_name is not None  # keys are in another layer's cache
        step, modifiers = attn_metadata, self._modifiers(layer, attn_metadata)
        if step.fresh and not shared:
            self._fresh(step, modifiers, (query, key, value), out)
        else:
            self._ragged(step, modifiers, query, self._cache(layer, kv_cache), out)
        return output

    def _modifiers(self, layer: Any, step: WarpattnMetadata) -> LayerModifiers:
        """Return the layer's modifiers in a step, which may be non-causal or have images."""
        if not step.causal:
            return self.both_directions
        if step.images is None:
            return self.modifiers
        return step.images.over(self.modifiers, bool(getattr(layer, "mm_prefix_clamp_sliding_window", False)))

    def _ragged(
        self, step: WarpattnMetadata, modifiers: LayerModifiers, query: Tensor, cache: Cache, out: Tensor
    ) -> None:
        """Attend any mix of new tokens to the requests' pages."""
        tokens = step.num_actual_tokens
        pages = cache.pages(step.block_table, step.seq_lens)
        seq = Ragged(step.query_start_loc, max_q=step.max_query_len)
        q, out = query[:tokens], out[:tokens]
        if q.is_cuda:
            step.plans.attend(modifiers, q, pages, seq, out, self.sinks, step.lists)
        else:
            attention_paged(q, pages, seq, out=out, sinks=self.sinks, **modifiers.tail(q.device))

    def _fresh(
        self, step: WarpattnMetadata, modifiers: LayerModifiers, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor
    ) -> None:
        """Attend requests without context, whose keys are all in this step."""
        tokens = slice(0, step.num_actual_tokens)
        q, k, v = (x[tokens] for x in qkv)
        sequences = Ragged(step.query_start_loc, max_q=step.max_query_len, max_k=step.max_query_len)
        attention_varlen(q, k, v, sequences, out=out[tokens], sinks=self.sinks, **modifiers.tail(q.device))

    @property
    def sinks(self) -> Tensor | None:
        """The sinks, fp32 and contiguous."""
        if self._sinks is None and self.options.sinks is not None:
            self.process_weights_after_loading(torch.float32)
        return self._sinks
