"""Reads keys that several requests share once: attends to each level separately and merges results by their LSE.

    level 0   all requests' queries    ▶ pages of a common prompt     one request with many rows: a prompt's kernel
    level 1   each request's queries   ▶ its own pages                as without a common prompt
              merge_states
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import warpattn
from warpattn.errors import AttentionError, many
from warpattn.inputs import is_tensor, kind_of
from warpattn.integrations.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from warpattn.integrations.flashinfer.older import Wrapper, check_planned
from warpattn.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from warpattn.integrations.flashinfer.single import single_prefill_with_kv_cache_return_lse
from warpattn.integrations.flashinfer.states import merge_state, merge_state_in_place, merge_states
from warpattn.integrations.signature import Given, drop_in

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]

BUFFERS = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
LISTS = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")
NAMES_OF_FORWARD = {"paged_kv_cache": "unique_kv_cache", "k": "k_shared", "v": "v_shared"}
NATURAL = {"return_lse": True, "lse_base": "ln", "lse_layout": "HN"}  # as `merge_states` takes them


class MultiLevelCascadeAttentionWrapper(Wrapper):
    """Attention over pages of several levels; the last level's keys are the newest, and `causal` applies to these."""

    @drop_in(
        "self, num_levels: count, float_workspace_buffer: tensor, kv_layout='NHD', use_cuda_graph=False, "
        "qo_indptr_buf_arr=None, paged_kv_indptr_buf_arr=None, paged_kv_indices_buf_arr=None, "
        "paged_kv_last_page_len_buf_arr=None"
    )
    def __init__(given: Any) -> None:
        """With `use_cuda_graph` the buffers of each level give its largest batch."""
        own, levels = given.self, given.num_levels
        if not levels:
            raise AttentionError("num_levels is 0; it must be 1 or more")
        buffers: list[dict[str, Tensor]] = [{} for _ in range(levels)]
        for name in BUFFERS if given.use_cuda_graph else ():
            for level, buffer in zip(buffers, _of_levels(given, f"{name}_arr", levels), strict=True):
                level[name] = buffer
        place = (given.float_workspace_buffer, given.kv_layout, given.use_cuda_graph)
        own.is_cuda_graph_enabled = bool(given.use_cuda_graph)
        own.levels = [BatchPrefillWithPagedKVCacheWrapper(*place, **level) for level in buffers]

    @drop_in(
        "self, qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, "
        "num_qo_heads: count, num_kv_heads: count, head_dim: count, page_size: count, causal=False, "
        "pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale: number=None, window_left: whole=-1, "
        "logits_soft_cap: number=None, rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None",
        hints={"use_fp16_qk_reduction", "rope_scale", "rope_theta", "kv_data_type"},
        names={name.removesuffix("_arr"): name for name in LISTS},
    )
    def plan(given: Any) -> None:
        """Set the queries and pages of each request of each level; every level counts all queries."""
        own, count = given.self, len(given.self.levels)
        own.layer = None  # nothing is planned until all levels are
        lists = zip(*(_of_levels(given, name, count) for name in LISTS), strict=True)
        if count > 1 and given.window_left is not None and given.window_left >= 0:
            rule = "with several levels it would count from the end of each one's keys"
            raise AttentionError(f"window_left is {given.window_left}; {rule}")
        sizes = (given.num_qo_heads, given.num_kv_heads, given.head_dim, given.page_size)
        names = ("pos_encoding_mode", "sm_scale", "window_left", "logits_soft_cap", "q_data_type")
        named = {name: getattr(given, name) for name in names}
        for wrapper, level in zip(own.levels, lists, strict=True):
            wrapper.plan(*level, *sizes, causal=bool(given.causal) and wrapper is own.levels[-1], **named)
        own.layer = own.levels[-1].layer

    @drop_in("self, q: 3, paged_kv_cache")
    def run(given: Any) -> Tensor:
        """q (tokens, Hq, D); out (tokens, Hq, Dv)."""
        check_planned(given.self, "run")
        states = [level.run(given.q, given.paged_kv_cache, **NATURAL) for level in given.self.levels]
        return states[0][0] if len(states) == 1 else warpattn.merge_states(states)[0]

    begin_forward, forward = plan, run


def _of_levels(given: Given, name: str, levels: int) -> list[Tensor]:
    """Return the argument `name`, a list with a tensor for each level."""
    found = getattr(given, name)
    if not isinstance(found, list | tuple) or len(found) != levels or not all(map(is_tensor, found)):
        what = f"a list of {many(len(found), 'element')}" if isinstance(found, list | tuple) else kind_of(found)
        raise AttentionError(f"{name} is {what}; it must be a list of {many(levels, 'tensor')}, one for each level")
    return list(found)


class _SharedPrefix(Wrapper):
    """A common prompt as dense keys and values, and pages of each request's own."""

    kind: type[Any]

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self.own = self.kind(float_workspace_buffer, kv_layout)

    def _merged(self, given: Given, **options: Any) -> Tensor:
        """Merge attention over the common prompt, which precedes every query, with that over each request's pages."""
        shared = single_prefill_with_kv_cache_return_lse(
            given.q, given.k_shared, given.v_shared, kv_layout=self.own.layout, sm_scale=options.get("sm_scale")
        )
        own = self.own.forward_return_lse(given.q, given.unique_kv_cache, **options)
        return merge_state(*shared, *own)[0]


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """One new token of each request."""

    kind = BatchDecodeWithPagedKVCacheWrapper

    @drop_in(
        "self, unique_kv_indptr: ints, unique_kv_indices: ints, unique_kv_last_page_len: ints, num_qo_heads: count, "
        "num_kv_heads: count, head_dim: count, page_size: count, data_type='float16'",
        names={name: f"unique_kv_{name}" for name in ("indptr", "indices", "last_page_len")},
    )
    def begin_forward(given: Any) -> None:
        """Set the pages that belong to each request alone."""
        lists = (given.unique_kv_indptr, given.unique_kv_indices, given.unique_kv_last_page_len)
        sizes = (given.num_qo_heads, given.num_kv_heads, given.head_dim, given.page_size)
        given.self.own.plan(*lists, *sizes, data_type=given.data_type)
        given.self.layer = given.self.own.layer

    @drop_in("self, q: 3, k_shared: 3, v_shared: 3, unique_kv_cache", names=NAMES_OF_FORWARD)
    def forward(given: Any) -> Tensor:
        """q (requests, Hq, D), k_shared and v_shared (keys, Hkv, D); out (requests, Hq, Dv)."""
        check_planned(given.self, "forward")
        return given.self._merged(given)


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Any numbers of new tokens of each request."""

    kind = BatchPrefillWithPagedKVCacheWrapper

    @drop_in(
        "self, qo_indptr: ints, paged_kv_indptr: ints, paged_kv_indices: ints, paged_kv_last_page_len: ints, "
        "num_qo_heads: count, num_kv_heads: count, head_dim: count, page_size: count"
    )
    def begin_forward(given: Any) -> None:
        """Set the queries of each request and the pages that belong to it alone."""
        given.self.own.plan(*(value for name, value in vars(given).items() if name != "self"))
        given.self.layer = given.self.own.layer

    @drop_in(
        "self, q: 3, k_shared: 3, v_shared: 3, unique_kv_cache, causal=False, use_fp16_qk_reduction=False, "
        "sm_scale: number=None, rope_scale=None, rope_theta=None",
        hints={"use_fp16_qk_reduction", "rope_scale", "rope_theta"},
        names=NAMES_OF_FORWARD,
    )
    def forward(given: Any) -> Tensor:
        """q (tokens, Hq, D); out (tokens, Hq, Dv). `causal` applies to a request's own keys."""
        check_planned(given.self, "forward")
        return given.self._merged(given, causal=given.causal, sm_scale=given.sm_scale)
