"""Arguments of drop-ins that were accepted and meant nothing, or something else than they say: now one sentence."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch

import warpattn as wa
from tests.unit.api.test_wrong_calls import CALLS, PAGED, TABLE, Silent, ints, normal
from warpattn.integrations import flashinfer

FLOATS, BOOLS = torch.tensor([0.0, 1.0, 3.0]), torch.tensor([[True, False], [False, True]])
LONG = torch.tensor([1, 2**32 + 3])  # the last 32 bits are a 3
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("flash-attn 3, combine", {"out": torch.zeros(1).expand(2, 5, 4, 16)}, r"and strides \(0, 0, 0, 0\); each of its"),
    ("flash-attn 4, combine", {"out_dtype": Silent()}, "out_dtype is a Silent; it must be one of"),
    ("flash-attn 3, ragged", {"cu_seqlens_q": FLOATS}, "cu_seqlens_q has dtype torch.float32; it must be torch.int32"),
    ("flash-attn 3, ragged", {"cu_seqlens_q": ints(0, 1, 2)}, "cu_seqlens_q divides 2 rows; .* must divide 3 rows"),
    ("flash-attn 3, ragged", {"cu_seqlens_k_new": ints(1, 2, 4)}, "cu_seqlens_k_new divides 3 rows; its first offset"),
    ("flash-attn 3, ragged", {"cu_seqlens_k_new": FLOATS}, "cu_seqlens_k_new has dtype torch.float32"),
    ("flash-attn 2, cache", {"cache_seqlens": LONG}, "cache_seqlens has the element 4294967299; it must be of 32 bits"),
    ("flash-attn 3, pages", {"cache_batch_idx": LONG}, "cache_batch_idx has the element 4294967299"),
    ("flash-attn 4, pages", {"seqused_k": LONG}, "seqused_k has the element 4294967299"),
    ("flash-attn 4, varlen", {"seqused_q": LONG}, "seqused_q has the element 4294967299"),
    ("flash-attn 4, varlen", {"seqused_q": ints(1, 2**31 - 1)}, "seqused_q gives .* 2147483647 rows; .* 0 .. 9"),
    ("flash-attn 3, varlen", {"seqused_k": ints(1, 2**31 - 1)}, "seqused_k gives .* 2147483647 rows; .* 0 .. 12"),
    ("flash-attn 3, ragged", {"page_table": BOOLS}, "page_table has dtype torch.bool"),
    ("flash-attn 3, ragged", {"cache_seqlens": torch.tensor([1.5, 2.0])}, "cache_seqlens has dtype torch.float32"),
    ("flash-attn 3, varlen", {"cu_seqlens_q": FLOATS}, "cu_seqlens_q has dtype torch.float32"),
    ("flash-attn 4, varlen", {"seqused_k": torch.tensor([1.0, 2.0])}, "seqused_k has dtype torch.float32"),
    ("flash-attn 4, pages", {"page_table": TABLE.float()}, "page_table has dtype torch.float32"),
    ("flash-attn 4, pages", {"q": normal(10, 4, 16), "cu_seqlens_q": ints(0, 4, 10)}, "max_seqlen_q is 5; sequence 1"),
    ("flash-attn 4, pages", {"q": normal(10, 4, 16), "cu_seqlens_q": ints(1, 2, 10)}, r"cu_seqlens_q\[0\] is 1"),
    ("flash-attn 2, pages", {"cache_leftpad": ints(0, 1, 2)}, "cache_leftpad must have 2 elements for 2 sequences"),
    ("flash-attn 2, pages", {"cache_leftpad": torch.zeros(2)}, "cache_leftpad has dtype torch.float32"),
    ("flash-attn 3, pages", {"cache_batch_idx": torch.ones(2)}, "cache_batch_idx has dtype torch.float32"),
    ("flash-attn 3, combine", {"out": normal(2, 5, 4, 16).cfloat()}, "out has dtype torch.complex64"),
    ("flash-attn 4, combine", {"out_dtype": torch.float8_e5m2}, "out_dtype is torch.float8_e5m2; it must be one of"),
    ("FlashInfer, plan", {"page_size": 3}, "paged_kv_cache has 8 pages of 4 rows; the plan was made for pages of 3"),
    ("FlashInfer, plan", {"page_size": 0}, "page_size is 0; it must be an int from 1 on"),
    ("FlashInfer, plan", {"head_dim": 8}, "head_dim of the plan is 8; queries of the call have 16"),
    ("FlashInfer, plan", {"num_qo_heads": 8}, "num_qo_heads of the plan is 8; queries of the call have 4"),
    ("FlashInfer, plan", {"num_kv_heads": None}, "num_kv_heads is None; it must be an int from 0 on"),
    ("FlashInfer, plan", {"indptr": ints(1, 2, 5)}, "indptr begins with 1; it must begin with 0"),
    ("FlashInfer, plan", {"indptr": torch.tensor([0.0, 2.5, 5.0])}, "indptr has dtype torch.float32"),
    ("FlashInfer, plan", {"last_page_len": ints(5, 2)}, "last_page_len holds 5; its elements must be within 0 .. 4"),
    ("FlashInfer, plan", {"last_page_len": ints(-1, 2)}, "last_page_len holds -1; its elements must be within 0 .. 4"),
    ("FlashInfer, plan", {"indices": ints(0, 1, 2, 3, 9)}, "8 pages of 4 rows; .* 10 of them at least"),
    ("FlashInfer, plan", {"indices": ints(0, 1, -2, 3, 4)}, "indices holds -2; its elements must be within 0 .."),
    ("FlashInfer, plan", {"window_left": math.nan}, "window_left is nan; it must be an int"),
    ("FlashInfer, plan", {"logits_soft_cap": math.nan}, "cap is nan; SoftCap takes a number"),
    ("FlashInfer, pages", {"head_dim_qk": 3}, "head_dim_qk of the plan is 3; queries of the call have 16"),
    ("FlashInfer, ragged", {"num_kv_heads": 1}, "num_kv_heads of the plan is 1; keys of the call have 2"),
    ("FlashInfer, ragged", {"qo_indptr": torch.tensor([0.0, 4.0, 9.0])}, "qo_indptr has dtype torch.float32"),
    ("StepPlan.update", {"cu_q": torch.tensor([0, 4, 2**40])}, "cu_q has dtype torch.int64; it must be torch.int32"),
    ("StepPlan.update", {"block_table": normal(2, 3)}, "block_table has dtype torch.float32"),
    ("config", {"num_key_value_heads": "2"}, "num_key_value_heads is '2'; in a transformers config it must be an int"),
    ("config", {"sliding_window": [4]}, r"sliding_window is \[4\]; in a transformers config it must be an int"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "wrong", "sentence"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_one_sentence(call, wrong, sentence):
    function, given = CALLS[call]
    copies = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    with pytest.raises(wa.AttentionError, match=sentence):
        function(**copies | wrong)


@pytest.mark.parametrize("kind", [wa.DecodePlan, wa.PrefillPlan, wa.StepPlan])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_plans_are_not_copied(kind, copied):
    function, given = CALLS[kind.__name__]
    plan = function(**given)
    with pytest.raises(wa.AttentionError, match=f"an? {kind.__name__} is copied or pickled; it holds addresses"):
        copied(plan)


def test_latent_pages_are_frozen():
    _, given = CALLS["LatentPages"]
    pages = wa.LatentPages(*(given[name] for name in ("latents", "rope", "block_table", "lengths")))
    with pytest.raises(AttributeError, match="cannot assign to field 'rope'"):
        pages.rope = pages.rope[..., ::2]


def test_lengths_of_64_bits_are_the_same():
    function, given = CALLS["flash-attn 2, pages"]
    assert torch.equal(function(**given | {"cache_seqlens": given["cache_seqlens"].long()}), function(**given))


def test_requests_without_pages_may_have_any_last_page():
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(8))
    wrapper.plan(ints(0, 0, 3), ints(4, 1, 2), ints(99, 2), 4, 2, 16, 4, q_data_type=torch.float32)
    out = wrapper.run(normal(2, 4, 16), (PAGED["k_cache"], PAGED["v_cache"]))
    assert not out[0].any() and out[1].any()
