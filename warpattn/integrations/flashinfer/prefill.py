"""Batches of prompts: `BatchPrefillWithPagedKVCacheWrapper`, `BatchPrefillWithRaggedKVCacheWrapper`.

A method under `drop_in` gets all its arguments as one value, whose attribute `self` is the wrapper.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from warpattn.api import attention_paged, attention_varlen
from warpattn.errors import AttentionError, many
from warpattn.integrations.flashinfer.decode import planned_layer
from warpattn.integrations.flashinfer.layer import (
    BLOCK_SCALES,
    NAMES,
    NAMES_OF_PAGES,
    Layer,
    finished,
    of_layout,
    with_scale,
    with_scales,
)
from warpattn.integrations.flashinfer.masks import FlatMask, flat_mask, packed_mask
from warpattn.integrations.flashinfer.older import Wrapper, layer_of, older_call
from warpattn.integrations.flashinfer.single import (
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from warpattn.integrations.flashinfer.tables import PageLists, Tables, kept_offsets
from warpattn.integrations.signature import Given, drop_in
from warpattn.sequences import Ragged

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]

REFUSED_BY_PLAN = {
    **dict.fromkeys(("prefix_len_ptr", "token_pos_in_items_ptr", "max_item_len_ptr"), "scoring of items is not served"),
    "token_pos_in_items_len": "scoring of items is not served",
    "use_token_head_sf": "give scales of tokens and heads as k_scale and v_scale of warpattn.PagedKV",
}
HINTS_OF_PLAN = {
    "use_fp16_qk_reduction", "rope_scale", "rope_theta", "q_data_type", "kv_data_type", "non_blocking", "seq_lens",
    "seq_lens_q", "max_token_per_sequence", "max_sequence_kv", "fixed_split_size", "disable_split_kv", "uniform_q_len",
}  # fmt: skip
REFUSED_BY_RUN = {"kv_cache_sf": BLOCK_SCALES}
PAGED_PLAN = (
    "self, qo_indptr: ints, paged_kv_indptr: ints, paged_kv_indices: ints, paged_kv_last_page_len: ints, "
    "num_qo_heads: count, num_kv_heads: count, head_dim_qk: count, page_size: count, head_dim_vo=None, "
    "custom_mask: 1=None, "
    "packed_custom_mask: 1=None, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, "
    "sm_scale: number=None, window_left: whole=-1, logits_soft_cap: number=None, rope_scale=None, "
    "rope_theta=None, q_data_type='float16', kv_data_type=None, o_data_type=None, non_blocking=True, "
    "prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None, "
    "seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None, max_sequence_kv=None, "
    "fixed_split_size=None, disable_split_kv=False, uniform_q_len=None, use_token_head_sf=False"
)
PAGED_FORWARD = (
    "self, q: 3, paged_kv_cache, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, k_scale=None, "
    "v_scale=None, window_left: whole=-1, logits_soft_cap: number=None, sm_scale: number=None, rope_scale=None, "
    "rope_theta=None"
)
RAGGED_FORWARD = (
    "self, q: 3, k, v, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, window_left: whole=-1, "
    "logits_soft_cap: number=None, sm_scale: number=None, rope_scale=None, rope_theta=None"
)


class _PrefillWrapper(Wrapper):
    """The base class of both wrappers: layout and device, the plan's layer and offsets."""

    def _start(self, given: Given, fixed: tuple[int, int] | None) -> None:
        for name in ("jit_args", "jit_kwargs", "custom_mask_buf", "mask_indptr_buf"):
            if getattr(given, name) is not None:
                raise AttentionError(f"{name} is given; kernels and masks of your own are not compiled into a wrapper")
        self.layout, self.device = of_layout(given.kv_layout), given.float_workspace_buffer.device
        self.is_cuda_graph_enabled = bool(given.use_cuda_graph)
        self.tables, self.layer, self.planned = Tables(fixed), None, given
        self.offsets: dict[str, Tensor] = {}
        self.own_mask: FlatMask | None = None

    def _new_plan(self, given: Given, of_keys: str) -> tuple[Given, Layer]:
        """Forget the plan before, and return the options and the layer of the new one, which is set when all of it is
        there; a custom mask replaces `causal`. of_keys: the name of the keys' offsets."""
        self.layer = None
        queries, keys = len(given.qo_indptr), len(getattr(given, of_keys))
        if queries != keys:
            rule = "they must be those of the same requests"
            raise AttentionError(f"qo_indptr has {many(queries, 'offset')} and {of_keys} {keys}; {rule}")
        causal = bool(given.causal) and given.custom_mask is None and given.packed_custom_mask is None
        planned = Given(vars(given) | {"causal": causal})
        return planned, layer_of(planned, given.head_dim_qk)

    def _plan_mask(self, given: Given, keys: Tensor) -> None:
        """Set the custom mask; `keys` are the requests' numbers of keys, on the host."""
        self.own_mask = None
        for name, made in (("custom_mask", flat_mask), ("packed_custom_mask", packed_mask)):  # the latter, if both
            mask = getattr(given, name)
            if mask is not None and self.is_cuda_graph_enabled:
                raise AttentionError(f"{name} is given and use_cuda_graph True; graphs hold no masks of one's own")
            if mask is not None:
                self.own_mask = made(mask, given.qo_indptr.cpu(), keys, self.device)

    def _tail(self, given: Given, k: Any, v: Any) -> dict[str, Any]:
        """Return the keywords of `attention` for a call over keys `k` and values `v`."""
        layer = planned_layer(self, given, k, v)
        if self.own_mask is not None:
            layer = layer._replace(mask=layer.mask & self.own_mask)
        return layer.tail()


class BatchPrefillWithPagedKVCacheWrapper(_PrefillWrapper):
    """Attention of any numbers of new tokens of each request, whose keys are in pages."""

    @drop_in(
        "self, float_workspace_buffer: tensor, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf: ints=None, "
        "paged_kv_indptr_buf=None, paged_kv_indices_buf: ints=None, paged_kv_last_page_len_buf=None, "
        "custom_mask_buf=None, mask_indptr_buf=None, backend='auto', jit_args=None, jit_kwargs=None, "
        "variant_owns_mask=False, max_total_num_rows=None",
        hints={"backend", "variant_owns_mask", "max_total_num_rows"},
    )
    def __init__(given: Any) -> None:
        """With `use_cuda_graph` the buffers give the largest batch: requests, and pages of all requests."""
        fixed = None
        if given.use_cuda_graph:
            buffers = (given.qo_indptr_buf, given.paged_kv_indices_buf)
            if not all(isinstance(x, Tensor) for x in buffers):
                raise AttentionError("use_cuda_graph is True; it needs qo_indptr_buf and paged_kv_indices_buf")
            fixed = (len(buffers[0]) - 1, len(buffers[1]))
        given.self._start(given, fixed)

    @drop_in(
        PAGED_PLAN,
        refused=REFUSED_BY_PLAN,
        hints=HINTS_OF_PLAN | {"head_dim_vo", "block_tables"},
        names={name: f"paged_kv_{name}" for name in ("indptr", "indices", "last_page_len")},
    )
    def plan(given: Any) -> None:
        """Set the queries and pages of each request. Reads the lists back from a card, as FlashInfer does."""
        own = given.self
        planned, layer = own._new_plan(given, "paged_kv_indptr")
        own.cu_q, longest = kept_offsets(own, "qo_indptr", given.qo_indptr)
        own.max_q = None if own.is_cuda_graph_enabled else longest
        lists = (given.paged_kv_indptr, given.paged_kv_indices, given.paged_kv_last_page_len)
        own.tables.plan(PageLists(*lists, int(given.page_size)), own.device)
        own._plan_mask(given, own.tables.lengths.cpu())
        own.planned, own.layer = planned, layer

    @drop_in(
        "self, q: 3, paged_kv_cache, q_scale=None, k_scale=None, v_scale=None, out=None, lse: 2=None, "
        "return_lse=False, lse_base='log2', lse_layout='NH', enable_pdl=None, window_left: whole=None, sinks=None, "
        "kv_cache_sf=None, skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None, uses_spcompress=None",
        refused=REFUSED_BY_RUN | {"skip_softmax_threshold_scale_factor": "every key counts"},
        hints={"enable_pdl", "use_fp16_softmax", "uses_spcompress"},
        names=NAMES_OF_PAGES,
    )
    def run(given: Any) -> Any:
        """q (tokens, Hq, D); out (tokens, Hq, Dv), with return_lse also lse (tokens, Hq)."""
        own = given.self
        kv = own.tables.over(given.paged_kv_cache, own.layout, given)
        tail = own._tail(given, kv.k_pages, kv.v_pages)
        seq = Ragged(own.cu_q, max_q=own.max_q)
        q = with_scale("q_scale", given, given.q)
        out, lse = attention_paged(q, kv, seq, out=given.out, sinks=given.sinks, **tail)
        return finished(given, out, lse, kv.v_pages)

    @drop_in(PAGED_PLAN.replace("non_blocking=True, ", ""))
    def workspace_size(given: Any) -> tuple[int, int]:
        """Bytes that `plan` needs of its caller's two buffers: none."""
        return 0, 0

    begin_forward = plan
    forward, forward_return_lse = older_call(PAGED_FORWARD, False), older_call(PAGED_FORWARD, True)


class BatchPrefillWithRaggedKVCacheWrapper(_PrefillWrapper):
    """Attention over prompts laid end to end, keys and values too."""

    @drop_in(
        "self, float_workspace_buffer: tensor, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, "
        "kv_indptr_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend='auto', jit_args=None, "
        "jit_kwargs=None, variant_owns_mask=False",
        hints={"qo_indptr_buf", "kv_indptr_buf", "backend", "variant_owns_mask"},
    )
    def __init__(given: Any) -> None:
        """Keys and values are (total, heads, dim) in either layout."""
        given.self._start(given, None)

    @drop_in(
        "self, qo_indptr: ints, kv_indptr: ints, num_qo_heads: count, num_kv_heads: count, head_dim_qk: count, "
        "head_dim_vo=None, custom_mask: 1=None, packed_custom_mask: 1=None, causal=False, pos_encoding_mode='NONE', "
        "use_fp16_qk_reduction=False, window_left: whole=-1, logits_soft_cap: number=None, sm_scale: number=None, "
        "rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None, o_data_type=None, "
        "non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, "
        "max_item_len_ptr=None, fixed_split_size=None, disable_split_kv=False, seq_lens=None, seq_lens_q=None, "
        "max_token_per_sequence=None, max_sequence_kv=None, v_indptr=None, o_indptr=None, qo_indptr_cpu=None, "
        "kv_indptr_cpu=None, uniform_q_len=None, use_token_head_sf=False",
        refused=REFUSED_BY_PLAN | {"v_indptr": "values follow kv_indptr", "o_indptr": "outputs follow qo_indptr"},
        hints=HINTS_OF_PLAN | {"head_dim_vo", "qo_indptr_cpu", "kv_indptr_cpu"},
    )
    def plan(given: Any) -> None:
        """Set where each request's queries and keys start."""
        own = given.self
        planned, layer = own._new_plan(given, "kv_indptr")
        own._plan_mask(given, given.kv_indptr.cpu().diff())
        cu_q, max_q = kept_offsets(own, "qo_indptr", given.qo_indptr)
        cu_k, max_k = kept_offsets(own, "kv_indptr", given.kv_indptr)
        bounds = (None, None) if own.is_cuda_graph_enabled else (max_q, max_k)
        own.seq = Ragged(cu_q, cu_k, *bounds)
        own.planned, own.layer = planned, layer

    @drop_in(
        "self, q: 3, k, v, q_scale=None, k_scale=None, v_scale=None, o_scale=None, out=None, lse: 2=None, "
        "return_lse=False, lse_base='log2', lse_layout='NH', enable_pdl=None, kv_cache_sf=None",
        refused=REFUSED_BY_RUN | {"o_scale": "multiply the output by it"},
        hints={"enable_pdl"},
        names=NAMES,
    )
    def run(given: Any) -> Any:
        """q (tokens, Hq, D), k and v (keys, Hkv, D); out (tokens, Hq, Dv), with return_lse also lse (tokens, Hq)."""
        own = given.self
        tail = own._tail(given, given.k, given.v)
        q, k, v = with_scales(given, given.q, given.k, given.v)
        out, lse = attention_varlen(q, k, v, own.seq, out=given.out, **tail)
        return finished(given, out, lse, given.v)

    begin_forward = plan
    forward, forward_return_lse = older_call(RAGGED_FORWARD, False), older_call(RAGGED_FORWARD, True)
