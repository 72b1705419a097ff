"""Batches of new tokens over pages: `BatchDecodeWithPagedKVCacheWrapper`.

A method under `drop_in` gets all its arguments as one value, whose attribute `self` is the wrapper.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from warpattn.api import attention_paged
from warpattn.errors import AttentionError, many
from warpattn.inputs import is_tensor, kind_of, number
from warpattn.integrations.flashinfer.layer import (
    BLOCK_SCALES,
    NAMES_OF_PAGES,
    Layer,
    all_of,
    check_output,
    factor_of,
    finished,
    of_layout,
    with_scale,
)
from warpattn.integrations.flashinfer.older import Wrapper, check_planned, layer_of, older_call
from warpattn.integrations.flashinfer.single import single_decode_with_kv_cache
from warpattn.integrations.flashinfer.tables import PageLists, Tables
from warpattn.integrations.signature import Given, drop_in, is_flag

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "single_decode_with_kv_cache",
]

PLAN = (
    "self, indptr: ints, indices: ints, last_page_len: ints, num_qo_heads: count, num_kv_heads: count, "
    "head_dim: count, page_size: count, "
    "pos_encoding_mode='NONE', window_left: whole=-1, logits_soft_cap: number=None, q_data_type='float16', "
    "kv_data_type=None, o_data_type=None, data_type=None, sm_scale: number=None, rope_scale=None, rope_theta=None, "
    "non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None, disable_split_kv=False, "
    "q_len_per_req: count=1, window_right=0, is_causal=None"
)
FORWARD = (
    "self, q: 3, paged_kv_cache, pos_encoding_mode='NONE', q_scale=None, k_scale=None, v_scale=None, "
    "window_left: whole=-1, logits_soft_cap: number=None, sm_scale: number=None, rope_scale=None, rope_theta=None"
)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """Attention of one new token of each request, or of `q_len_per_req`, which see each other causally."""

    @drop_in(
        "self, float_workspace_buffer: tensor, kv_layout='NHD', use_cuda_graph=False, use_tensor_cores=False, "
        "paged_kv_indptr_buffer: ints=None, paged_kv_indices_buffer: ints=None, paged_kv_last_page_len_buffer=None, "
        "backend='auto', jit_args=None, jit_kwargs=None",
        refused=dict.fromkeys(("jit_args", "jit_kwargs"), "kernels of your own are not compiled"),
        hints={"use_tensor_cores", "backend"},
    )
    def __init__(given: Any) -> None:
        """With `use_cuda_graph` the buffers give the largest batch: requests, and pages of all requests."""
        own = given.self
        own.layout, own.device = of_layout(given.kv_layout), given.float_workspace_buffer.device
        own.is_cuda_graph_enabled, fixed = bool(given.use_cuda_graph), None
        if given.use_cuda_graph:
            buffers = (given.paged_kv_indptr_buffer, given.paged_kv_indices_buffer)
            if not all(isinstance(x, Tensor) for x in buffers):
                needs = "paged_kv_indptr_buffer and paged_kv_indices_buffer"
                raise AttentionError(f"use_cuda_graph is True; it needs {needs}")
            fixed = (len(buffers[0]) - 1, len(buffers[1]))
        own.tables, own.layer, own.planned = Tables(fixed), None, given
        own.use_tensor_cores = bool(given.use_tensor_cores)

    @drop_in(
        PLAN,
        refused={"window_right": "no token sees a later one"},
        hints={"q_data_type", "kv_data_type", "data_type", "rope_scale", "rope_theta", "non_blocking", "block_tables",
               "seq_lens", "fixed_split_size", "disable_split_kv"},
    )  # fmt: skip
    def plan(given: Any) -> None:
        """Set the pages of each request. Reads the lists back from a card, as FlashInfer does."""
        own = given.self
        own.layer = None  # nothing is planned until all of it is
        if not (given.is_causal is None or (is_flag(given.is_causal) and given.is_causal)):
            raise AttentionError(f"is_causal is {kind_of(given.is_causal)}; new tokens see each other causally")
        layer = layer_of(given, given.head_dim)
        own.tables.plan(PageLists(given.indptr, given.indices, given.last_page_len, int(given.page_size)), own.device)
        own.layer, own.planned = layer, given

    @drop_in(
        "self, q: 3, paged_kv_cache, q_scale=None, k_scale=None, v_scale=None, out: 3=None, lse: 2=None, "
        "return_lse=False, enable_pdl=None, window_left: whole=None, sinks=None, q_len_per_req: count=None, "
        "skip_softmax_threshold_scale_factor=None, kv_cache_sf=None",
        refused={"skip_softmax_threshold_scale_factor": "every key counts", "kv_cache_sf": BLOCK_SCALES},
        hints={"enable_pdl"},
        names=NAMES_OF_PAGES,
    )
    def run(given: Any) -> Any:
        """q (requests * tokens, Hq, D); out of the same shape, with return_lse also lse (requests * tokens, Hq)."""
        own, q = given.self, given.q
        kv = own.tables.over(given.paged_kv_cache, own.layout, given)
        layer = planned_layer(own, given, kv.k_pages, kv.v_pages)
        tokens = own.planned.q_len_per_req if given.q_len_per_req is None else given.q_len_per_req
        if not tokens or len(q) % tokens:
            raise AttentionError(f"q_len_per_req is {tokens}; it must divide the rows of q, {len(q)}")
        if given.out is not None and given.out.shape[0] != len(q):
            raise AttentionError(f"out has {many(len(given.out), 'row')}; it must have those of q, {len(q)}")
        rows = with_scale("q_scale", given, q.unflatten(0, (-1, tokens)))
        target = None if given.out is None else given.out.unflatten(0, (-1, tokens))
        out, lse = attention_paged(rows, kv, out=target, sinks=given.sinks, **layer.tail())
        out = out.flatten(0, 1) if given.out is None else given.out
        return finished(given, out, lse.transpose(0, 1).flatten(1), kv.v_pages)

    @drop_in(PLAN.replace("non_blocking=True, ", ""))
    def workspace_size(given: Any) -> tuple[int, int]:
        """Bytes that `plan` needs of its caller's two buffers: none."""
        return 0, 0

    begin_forward = plan
    forward, forward_return_lse = older_call(FORWARD, False), older_call(FORWARD, True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The same with the buffers of a captured graph."""

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        buffers = {"paged_kv_indptr_buffer": indptr_buffer, "paged_kv_indices_buffer": indices_buffer}
        super().__init__(workspace_buffer, kv_layout, True, use_tensor_cores, **buffers)


def planned_layer(own: Any, given: Given, k: Any, v: Any) -> Layer:
    """Return the planned layer with a call's changes for `k` and `v`; the window of a call replaces the plan's."""
    check_planned(own, "run")
    factor, *_ = all_of(
        lambda: factor_of(given, k, v),
        lambda: check_output("o_data_type", own.planned.o_data_type, given.q),
        lambda: _check_planned(own.planned, given.q, k),
    )
    window = getattr(given, "window_left", None) if "window_left" in vars(given) else None
    layer = own.layer
    if window is not None:
        layer = layer_of(Given(vars(own.planned) | {"window_left": window}), given.q.shape[-1])
    return layer._replace(scale=layer.scale * factor)


def _check_planned(planned: Given, q: Tensor, k: Any) -> None:
    """Check that the heads of a call are the plan's, from which the scale was made."""
    named = "head_dim" if "head_dim" in vars(planned) else "head_dim_qk"
    found = {"num_qo_heads": ("queries", q.shape[-2]), named: ("queries", q.shape[-1])}
    if is_tensor(k) and k.ndim >= 3:
        found["num_kv_heads"] = ("keys", k.shape[-2])
    broken = [
        f"{name} of the plan is {number(getattr(planned, name))}; {what} of the call have {size}"
        for name, (what, size) in found.items()
        if number(getattr(planned, name)) != size
    ]
    if broken:
        raise AttentionError(*broken)
