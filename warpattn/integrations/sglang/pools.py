"""The forms of SGLang's cache: keys and values, a separate cache for layers with windows, or latents.

SGLang names a token's slot in its cache; a page is `page_size` slots, so every `page_size`-th slot of a request names
its page. Layers with windows may have fewer slots; the pool maps full slots to them, and a slot that no window reaches
any more to page 0, whose keys the mask hides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.layout.paged_view import paged_kv_view, paged_view
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

from warpattn.errors import Rules
from warpattn.inputs import of_type
from warpattn.sequences import PagedKV
from warpattn.sequences.latent import LatentPages
from warpattn.serving.slots import append_slots

SIXTEEN_BIT = (torch.float16, torch.bfloat16)
EIGHT_BIT = (torch.float8_e4m3fn, torch.float8_e5m2)
LATENT = (576, 512)  # columns of latents with their rotary part, and of values, that kernels have
POOLS = (MHATokenToKVPool, SWAKVPool, MLATokenToKVPool)  # no subclasses: these may name slots otherwise


class Tables(NamedTuple):
    """Pages of every request, and those of layers with windows."""

    pages: Tensor  # int32 [requests, pages]
    window_pages: Tensor | None = None
    window_slots: Tensor | None = None  # int64 [new tokens]

    def first(self, requests: int, tokens: int) -> Tables:
        """Return the tables of the first requests and new tokens."""
        if self.window_pages is None or self.window_slots is None:
            return Tables(self.pages[:requests])
        return Tables(self.pages[:requests], self.window_pages[:requests], self.window_slots[:tokens])


@dataclass(frozen=True)
class Pool:
    """The cache of a model runner."""

    pool: Any
    page_size: int

    @staticmethod
    def of(runner: Any, on_card: bool) -> Pool:
        """Return the runner's cache; raises AttentionError if the backend cannot read it."""
        pool, rules = runner.token_to_kv_pool, Rules()
        latent = bool(getattr(runner, "use_mla_backend", False))
        rule = f"it must be {MLATokenToKVPool.__name__}" if latent else "it must be MHATokenToKVPool or SWAKVPool"
        known = type(pool) in POOLS and isinstance(pool, MLATokenToKVPool) == latent
        if rules.require(known, f"the cache is {of_type(pool)}", rule):
            parts = (pool.full_kv_pool, pool.swa_kv_pool) if isinstance(pool, SWAKVPool) else (pool,)
            allowed = (*SIXTEEN_BIT, *EIGHT_BIT)
            listed = ", ".join(str(x).removeprefix("torch.") for x in allowed)
            for part in parts:
                what = f"the cache has a part that is {of_type(part)}"
                rules.require(type(part) in POOLS, what, "it must be MHATokenToKVPool")
                fine = part.dtype in allowed or (not on_card and part.dtype == torch.float32)
                rules.require(fine, f"the cache holds {part.dtype}", f"it must hold {listed}")
            if latent:
                dims = (pool.kv_cache_dim, pool.kv_lora_rank)
                rule = f"warpattn's kernels have {LATENT[0]} and {LATENT[1]}"
                what = f"latents have {dims[0]} columns, of which {dims[1]} are values"
                rules.require(not on_card or dims == LATENT, what, rule)
                ranks = getattr(pool, "_write_loc_dcp_span", 1)
                what, rule = f"{ranks} ranks share the context (DCP)", "warpattn's SGLang backend has no such form"
                rules.require(ranks == 1, what, rule)
        rules.done()
        return Pool(pool, runner.page_size)

    @property
    def latent(self) -> bool:
        return isinstance(self.pool, MLATokenToKVPool)

    @property
    def eight_bit(self) -> bool:
        return self.pool.dtype in EIGHT_BIT

    def holds(self, layer: Any) -> bool:
        """Whether a layer's keys are the latents of the cache."""
        dims = (layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim)
        return dims == (1, self.pool.kv_cache_dim, self.pool.kv_lora_rank)

    def tables(self, pages: Tensor, tokens: int) -> Tables:
        """Allocate tables for `tokens` new tokens; `fill` writes them."""
        if not isinstance(self.pool, SWAKVPool):
            return Tables(pages)
        return Tables(pages, torch.zeros_like(pages), pages.new_zeros(tokens, dtype=torch.int64))

    def fill(self, tables: Tables, firsts: Tensor, slots: Tensor) -> None:
        """Write tables from the first slots of pages [requests, pages] and the slots of new tokens."""
        width = firsts.shape[1]
        torch.div(firsts, self.page_size, rounding_mode="floor", out=tables.pages[:, :width])
        if tables.window_pages is not None and tables.window_slots is not None:
            found = self.pool.translate_loc_from_full_to_swa(firsts)
            tables.window_pages[:, :width] = torch.div(found, self.page_size, rounding_mode="floor")
            tables.window_slots.copy_(self.pool.translate_loc_from_full_to_swa(slots))

    def write(self, layer: Any, batch: Any, tables: Tables, k: Tensor, v: Tensor | None) -> None:
        """Write new keys and values into the cache. One of 8 bits divides k and v by their scales, in place."""
        scales = () if self.latent else (layer.k_scale, layer.v_scale)
        where = KVWriteLoc.for_batch(batch, swa_loc=tables.window_slots)
        self.pool.set_kv_buffer(layer, where, k, v, *scales)

    def write_latents(self, layer: Any, batch: Any, latents: Tensor, rotary: Tensor) -> None:
        """Write latents (tokens, 1, 512) and rotary keys (tokens, 1, 64) of new tokens into the cache."""
        pages = paged_view(self.pool.get_key_buffer(layer.layer_id), self.page_size)
        k_pages, v_pages = pages.split([latents.shape[-1], rotary.shape[-1]], -1)
        append_slots(latents, rotary.view(len(latents), 1, -1), k_pages, v_pages, batch.out_cache_loc)

    def pages(self, layer: Any, tables: Tables, lengths: Tensor) -> PagedKV:
        """Return a layer's keys and values."""
        keys, values = self.pool.get_key_buffer(layer.layer_id), self.pool.get_value_buffer(layer.layer_id)
        if self.latent:
            both, size = paged_view(keys, self.page_size), layer.v_head_dim
            if self.eight_bit:
                return LatentPages(both[..., :size], both[..., size:], tables.pages, lengths)
            return PagedKV(both, both[..., :size], tables.pages, lengths)
        heads = layer.tp_k_head_num
        pages = (
            paged_kv_view(keys, self.page_size, heads, layer.qk_head_dim),
            paged_kv_view(values, self.page_size, heads, layer.v_head_dim),
        )
        table = tables.pages
        if tables.window_pages is not None and self.pool.layers_mapping[layer.layer_id][1]:
            table = tables.window_pages
        scales = [_whole(x) if self.eight_bit else None for x in (layer.k_scale, layer.v_scale)]
        return PagedKV(*pages, table, lengths, k_scale=scales[0], v_scale=scales[1])


def _whole(scale: Tensor | None) -> Tensor | None:
    """Return a scale, one of a single number without dimensions."""
    return None if scale is None else scale.detach().reshape(()) if scale.numel() == 1 else scale.detach()
