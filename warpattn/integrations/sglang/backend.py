"""The backend: makes a step's tables once for all layers, then each layer attends to any mix of prompts and decoding.

    request slots, lengths ─▶ init_forward_metadata*  ─▶ Step: offsets, lengths, pages     once a step, on the card
    a layer's q, k, v      ─▶ forward_*: SGLang writes the cache, then `StepPlans`         graphs hold these launches

Graphs read the backend's own tables, which every replay fills anew. They capture decoding and the verification of
drafts, which are a chain of a request's next tokens, so attention of several new tokens. `scope.py` checks what is
supported, `pools.py` has the forms of the cache, `latent.py` latent attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask, maybe_create_verify_mask
from sglang.srt.layers.radix_attention import AttentionType
from torch import Tensor

from warpattn.api import attention_paged, attention_varlen
from warpattn.errors import AttentionError, Rules
from warpattn.integrations.sglang import latent
from warpattn.integrations.sglang.pools import Pool, Tables
from warpattn.integrations.sglang.scope import check_scope
from warpattn.integrations.step_plans import LayerModifiers, ScoreOptions, StepPlans, rounded
from warpattn.masks import Causal, Full, SlidingWindow
from warpattn.sequences import Ragged


class Step(NamedTuple):
    """A step of the engine, the same for all layers."""

    cu_q: Tensor  # int32 [requests + 1]
    lengths: Tensor  # int32 [requests], context and new tokens
    tables: Tables  # [requests, pages]
    max_q: int  # most new tokens of a request
    fresh: bool  # no request has context: k and v are all keys and values


class Even(NamedTuple):
    """Equally many new tokens of every request, as in graphs."""

    new: int
    uncounted: int  # of them are not in SGLang's lengths


def even(batch: Any) -> Even | None:
    """Return the new tokens of a batch that decodes or verifies; None with prompts; AttentionError for other kinds."""
    mode = batch.forward_mode
    if mode.is_decode():
        return Even(1, 0)
    if mode.is_target_verify():
        drafts = batch.spec_info
        if drafts.tree_topk != 1:
            raise AttentionError(
                f"drafts have {drafts.tree_topk} branches; warpattn's SGLang backend has chains of them, 1"
            )
        return Even(drafts.draft_token_num, drafts.draft_token_num)
    if mode.is_dllm_extend() or not mode.is_extend():
        raise AttentionError(
            f"a step of mode {mode.name} is requested; warpattn's SGLang backend has prompts, decoding and drafts"
        )
    return None


class WarpattnAttnBackend(AttentionBackend):
    """Attention of one model runner of SGLang."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.slots: Tensor = runner.req_to_token_pool.req_to_token  # [request slots, tokens] int32
        self.page_size: int = runner.page_size
        self.max_context_len: int = self.slots.shape[1]  # at most; SGLang reads it where it lacks the host's lengths
        self.decoded = check_scope(runner)
        self.pool = Pool.of(runner, self.slots.is_cuda)
        if self.pool.latent:
            latent.register(runner)
        self.plans = StepPlans(self.decoded)
        self._modifiers: dict[int, LayerModifiers] = {}
        self._offsets: dict[int, Tensor] = {}
        self._verify_mask = self._mask_of_drafts(1)

    def _mask_of_drafts(self, requests: int) -> VerifyMask | None:
        """Allocate the least memory for the mask that SGLang writes; it is causal for a chain, so nothing reads it."""
        return maybe_create_verify_mask(
            is_draft_runner=False, skip_prefill=False, max_bs=requests, max_context_len=self.max_context_len,
            num_draft_tokens=self.decoded if self.decoded > 1 else None, device=self.slots.device, is_read=False,
        )  # fmt: skip

    @property
    def verify_mask(self) -> VerifyMask | None:
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Do nothing: tables only depend on the number of drafts."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the tables of captured steps, for up to `max_bs` requests."""
        pages = -(-self.slots.shape[1] // self.page_size)
        numbers = torch.arange(max_bs + 1, dtype=torch.int32, device=self.slots.device)
        tables = self.pool.tables(numbers.new_zeros(max_bs, pages), max_num_tokens)
        self._captured = Step(numbers, numbers.new_zeros(max_bs), tables, 1, fresh=False)
        self._offsets.clear()
        self._verify_mask = self._mask_of_drafts(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of a request that pads a captured batch."""
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a step that runs outside of graphs."""
        batch, requests = forward_batch, forward_batch.batch_size
        if batch.forward_mode.is_idle():
            return
        same = even(batch)
        pages = rounded(-(-self._longest(batch, same) // self.page_size))
        table = self.slots.new_zeros(requests, min(pages, -(-self.slots.shape[1] // self.page_size)))
        tables = self.pool.tables(table, len(batch.out_cache_loc))
        lengths = batch.seq_lens[:requests].int()
        if same is not None:
            cu_q = torch.arange(requests + 1, dtype=torch.int32, device=table.device) * same.new
            step = Step(cu_q, lengths + same.uncounted, tables, same.new, fresh=False)
        else:
            cu_q = torch.zeros(requests + 1, dtype=torch.int32, device=table.device)
            torch.cumsum(batch.extend_seq_lens, 0, out=cu_q[1:])
            step = Step(cu_q, lengths, tables, max(batch.extend_seq_lens_cpu), not any(batch.extend_prefix_lens_cpu))
        self.pool.fill(tables, self._firsts(batch, table.shape[1]), batch.out_cache_loc)
        self.forward_metadata = step

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a captured step: equally many new tokens of every request."""
        batch = forward_batch
        same = even(batch)
        if same is None:
            mode = batch.forward_mode.name
            rule = "warpattn's SGLang backend has those of decoding and of drafts"
            raise AttentionError(f"a CUDA graph of mode {mode} is requested; {rule}")
        requests, whole = batch.batch_size, self._captured
        if same.new not in self._offsets:  # kept, since graphs hold their address
            self._offsets[same.new] = whole.cu_q * same.new
        offsets = self._offsets[same.new]
        tables = whole.tables.first(requests, len(batch.out_cache_loc))
        step = Step(offsets[: requests + 1], whole.lengths[:requests], tables, same.new, fresh=False)
        torch.add(batch.seq_lens[:requests], same.uncounted, out=step.lengths)
        pages = tables.pages.shape[1] if in_capture else -(-self._longest(batch, same) // self.page_size)
        self.pool.fill(tables, self._firsts(batch, pages), batch.out_cache_loc)
        self.forward_metadata = step

    def _longest(self, batch: Any, same: Even | None) -> int:
        """Return the tokens of the longest request, from the host's copy of the lengths."""
        lengths, most = batch.seq_lens_cpu, self.slots.shape[1]
        return most if lengths is None else min(most, max(1, int(lengths.max()) + (same.uncounted if same else 0)))

    def _firsts(self, batch: Any, pages: int) -> Tensor:
        """Return the first slot of every page of every request; those past a request's last page are not read."""
        firsts = self.slots[:, : pages * self.page_size : self.page_size]
        return firsts[batch.req_pool_indices[: batch.batch_size]]

    def forward_decode(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, *rest: Any, **named: Any):
        """Attend one new token of every request, (tokens, heads · head_dim)."""
        return self._forward(q, k, v, layer, forward_batch, *rest, **named)

    def forward_extend(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, *rest: Any, **named: Any):
        """Attend prompts or chunks of them, and decoding requests in the same batch."""
        return self._forward(q, k, v, layer, forward_batch, *rest, **named)

    def _forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, batch: Any, save_kv_cache: bool = True,
        sinks: Tensor | None = None, **others: Any,
    ) -> Any:  # fmt: skip
        rotary = {name: others.pop(name, None) for name in ("q_rope", "k_rope")} if self.pool.latent else {}
        given = [name for name, value in others.items() if value is not None and value is not False]
        if given:
            raise AttentionError(f"{given[0]} is given; warpattn's SGLang backend has none")
        step, modifiers = self.forward_metadata, self._modifiers_of(layer)
        fresh = step.fresh and not self.pool.eight_bit  # a cache of 8 bits holds other values than k and v
        if save_kv_cache and k is not None:
            if rotary.get("k_rope") is None:
                self.pool.write(layer, batch, step.tables, k, v)
            else:
                self.pool.write_latents(layer, batch, k, rotary["k_rope"])
        if self.pool.latent and self.pool.holds(layer):
            kv, seq = self.pool.pages(layer, step.tables, step.lengths), Ragged(step.cu_q, max_q=step.max_q)
            parts = [x.view(len(x), layer.tp_q_head_num, -1) for x in (q, rotary.get("q_rope")) if x is not None]
            return latent.decode(kv, modifiers, seq, *parts)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if self.pool.latent:
            seq = Ragged(step.cu_q, max_q=step.max_q, max_k=step.max_q)
            return latent.prompts(q, k, v, seq, layer, batch, modifiers)
        kv = self.pool.pages(layer, step.tables, step.lengths)
        out = q.new_empty(len(q), layer.tp_q_head_num, layer.v_head_dim)
        if fresh and k is not None and v is not None:
            seq = Ragged(step.cu_q, max_q=step.max_q, max_k=step.max_q)
            heads = layer.tp_k_head_num
            k, v = k.view(-1, heads, layer.qk_head_dim), v.view(-1, heads, layer.v_head_dim)
            attention_varlen(q, k, v, seq, out=out, sinks=sinks, **modifiers.tail(q.device))
            return out.flatten(1)
        seq = Ragged(step.cu_q, max_q=step.max_q)
        if q.is_cuda:
            self.plans.attend(modifiers, q, kv, seq, out, sinks)
        else:
            attention_paged(q, kv, seq, out=out, sinks=sinks, **modifiers.tail(q.device))
        return out.flatten(1)

    def _modifiers_of(self, layer: Any) -> LayerModifiers:
        """Return mask, score and scale of a layer, checked once."""
        found = self._modifiers.get(layer.layer_id)
        if found is None:
            found = self._modifiers[layer.layer_id] = modifiers_of(layer)
        return found


def modifiers_of(layer: Any) -> LayerModifiers:
    """Return mask, score and scale of a layer; raises AttentionError for an unsupported one."""
    rules, what = Rules(), "warpattn's SGLang backend has"
    rules.require(not layer.is_cross_attention, "the layer is cross-attention", f"{what} self-attention")
    kinds = AttentionType.DECODER, AttentionType.ENCODER_ONLY
    rules.require(layer.attn_type in kinds, f"attn_type is {layer.attn_type}", f"{what} DECODER and ENCODER_ONLY")
    encodings, cap = layer.pos_encoding_mode, layer.logit_capping_method
    rules.require(encodings == "NONE", f"pos_encoding_mode is {encodings}", f"{what} NONE")
    rules.require(not layer.logit_cap or cap == "tanh", f"logit_capping_method is {cap}", f"{what} tanh")
    rules.require(layer.xai_temperature_len <= 0, "the layer has a temperature by position", f"{what} none")
    rules.done()
    left = layer.sliding_window_size  # keys before the query, which it counts in
    both = layer.attn_type == AttentionType.ENCODER_ONLY
    if left is None or left < 0:
        mask = Full() if both else Causal()
    else:
        mask = SlidingWindow(left + 1, right=left if both else 0)
    return LayerModifiers(mask, ScoreOptions(layer.logit_cap or None, None), float(layer.scaling))
