"""Wrong calls over the whole public API: every argument replaced by what it cannot be ends in a result or one
AttentionError, never in a traceback of another kind."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import warpattn as wa
from warpattn.api import attention_backward
from warpattn.integrations import flashinfer, flex, torch_sdpa
from warpattn.integrations.flash_attn import bert_padding, version2, version3, version4
from warpattn.serving.layers import layers_of

B, HQ, HKV, D = 2, 4, 2, 16
AT_ONCE = 3  # wrong values of an argument that make test tries; make test-full tries all
LONGEST = 400  # characters of a sentence
ENDINGS = ("result", "AttentionError")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Silent:
    """Neither prints nor compares."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __eq__(self, other: object) -> bool:
        raise ValueError("no truth")

    __hash__ = None  # pyright: ignore[reportAssignmentType]


WRONG: dict[str, Any] = {
    "silent": Silent(),
    "None": None, "an int": 3, "a negative int": -1, "a float": 1.5, "a huge int": 10**400, "a str": "abc",
        "a list": [1, 2],
    "a dict": {}, "an object": object(), "a class": wa.Causal, "0-dim": torch.tensor(1.0), "empty": torch.empty(0),
    "rank 1": normal(3), "rank 2": normal(2, 3), "other sizes": normal(1, 2, 3, 5), "rank 5": normal(1, 1, 1, 1, 1),
    "bools": torch.ones(2, 5, dtype=torch.bool), "complex": torch.zeros(2, 5, HQ, D, dtype=torch.complex64),
    "8 bits": torch.zeros(2, 5, HQ, D).to(torch.float8_e4m3fn), "sparse": torch.eye(4).to_sparse(),
    "meta": torch.empty(2, 5, HQ, D, device="meta"), "NumPy's": np.zeros((2, 5, HQ, D)), "indices": ints(0, -4, 9),
    "int64": torch.tensor([0, 2**40, 5]), "no rows": torch.zeros(2, 0, HQ, D), "no columns": torch.zeros(2, 5, HQ, 0),
    "nested": torch.nested.nested_tensor([normal(3, 4), normal(2, 4)], layout=torch.jagged), "a mask": wa.Causal(),
}  # fmt: skip
TAIL = {"mask": None, "score": None, "sinks": None, "scale": None, "return_lse": False, "out": None, "backend": "auto"}
SHORT = {"mask": None, "score": None, "sinks": None, "scale": None}
DENSE = {"q": normal(B, 5, HQ, D), "k": normal(B, 7, HKV, D), "v": normal(B, 7, HKV, D)}
ROWS = {"q": normal(9, HQ, D), "k": normal(12, HKV, D), "v": normal(12, HKV, D)}
CU_Q, CU_K, TABLE, LENGTHS = ints(0, 4, 9), ints(0, 5, 12), torch.arange(8, dtype=torch.int32).view(2, 4), ints(9, 14)
PAGES = {"k_pages": normal(8, 4, HKV, D), "v_pages": normal(8, 4, HKV, D)}
TOKEN, NEW = normal(B, 1, HQ, D), {"k": normal(B, 1, HKV, D), "v": normal(B, 1, HKV, D)}
KV, RAGGED = wa.PagedKV(*PAGES.values(), TABLE, LENGTHS), wa.Ragged(CU_Q, CU_K)
ANGLES = {"cos": normal(16, 4), "sin": normal(16, 4)}
LATENTS = {"latents": normal(8, 4, 1, 512).to(torch.float8_e4m3fn), "rope": normal(8, 4, 1, 64).bfloat16(),
           "block_table": TABLE, "lengths": LENGTHS}  # fmt: skip
ABSORBED, BYTES = normal(B, 1, HQ, 576).bfloat16(), torch.zeros(8, 4, 1, 656, dtype=torch.uint8)
OUT, LSE = wa.attention(*DENSE.values(), return_lse=True)
HEADS_FIRST = {"query": normal(B, HQ, 5, D), "key": normal(B, HQ, 7, D), "value": normal(B, HQ, 7, D)}


def masked(make: Callable[..., Any], **given: Any) -> Any:
    return wa.attention(*DENSE.values(), mask=make(*given.values()))


def scored(make: Callable[..., Any], **given: Any) -> Any:
    return wa.attention(*DENSE.values(), score=make(*given.values()))


def cached(**given: Any) -> Any:
    return wa.attention_paged(TOKEN, wa.PagedKV(**given))


def ragged(**given: Any) -> Any:
    return wa.attention_varlen(*ROWS.values(), wa.Ragged(**given))


def config(**given: Any) -> Any:
    return layers_of(given)


def merged(out: Any, lse: Any, **given: Any) -> Any:
    return wa.merge_states([(out, lse), (OUT, LSE)], **given)


def of_latents(q: Any, scale: Any, **given: Any) -> Any:
    return wa.attention_paged(q, wa.LatentPages(*given.values(), scale=scale))


def in_parts(**given: Any) -> Any:
    keys = torch.ones(B, 7, 1, D + 4)
    return wa.attention(wa.LatentQuery(**given), keys, keys[..., :D])


def planned_parts(**given: Any) -> Any:
    kv, q = wa.LatentPages(*LATENTS.values()), torch.ones(B, 1, HQ, 576).bfloat16()
    plan = wa.DecodePlan(wa.LatentQuery(q[..., :512].contiguous(), q[..., 512:].contiguous()), kv)
    return plan(wa.LatentQuery(**given), kv)


def of_bytes(q: Any, **given: Any) -> Any:
    return wa.attention_paged(q, wa.LatentPages.of_bytes(**given))


def planned_latents(q: Any, kv: Any) -> Any:
    return wa.DecodePlan(ABSORBED, wa.LatentPages(*LATENTS.values()))(q, kv)


def decoded(**given: Any) -> Any:
    return wa.DecodePlan(TOKEN, KV)(**given)


def prefilled(**given: Any) -> Any:
    return wa.PrefillPlan(*ROWS.values(), RAGGED)(**given)


def stepped(**given: Any) -> Any:
    return wa.StepPlan(ROWS["q"], KV, wa.Ragged(CU_Q))(**given)


def updated(**given: Any) -> Any:
    return wa.StepPlan(ROWS["q"], KV, wa.Ragged(CU_Q)).update(**given)


def planned(run: bool, **given: Any) -> Any:
    """FlashInfer's decode: `plan`, or `run` of a planned wrapper."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(8))
    wrapper.plan(**LISTS | ({} if run else given))
    return wrapper.run(**RUN | (given if run else {}))


def prompts(kind: Any, over: dict[str, Any], **given: Any) -> Any:
    """FlashInfer's prefill: `plan`, then `run`."""
    wrapper = kind(torch.empty(8))
    wrapper.plan(**given, q_data_type=torch.float32)
    return wrapper.run(**over)


SIZES = {"num_qo_heads": HQ, "num_kv_heads": HKV}
LISTS = {"indptr": ints(0, 2, 5), "indices": ints(0, 1, 2, 3, 4), "last_page_len": ints(3, 2), **SIZES, "head_dim": D,
         "page_size": 4, "q_data_type": torch.float32, "window_left": -1, "logits_soft_cap": None,
             "sm_scale": None}  # fmt: skip
RUN = {"q": normal(B, HQ, D), "paged_kv_cache": tuple(PAGES.values()), "out": None, "lse": None, "return_lse": False}
PROMPTS = {"qo_indptr": CU_Q, "paged_kv_indptr": ints(0, 2, 5), "paged_kv_indices": ints(0, 1, 2, 3, 4),
           "paged_kv_last_page_len": ints(3, 2), **SIZES, "head_dim_qk": D, "page_size": 4, "causal": True,
               "sm_scale": None}  # fmt: skip
FLASH = {**DENSE, "softmax_scale": None, "causal": False, "softcap": 0.0, "deterministic": False}
FLASH_ROWS = {**ROWS, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": 5, "max_seqlen_k": 7}
CACHE = {"q": TOKEN, "k_cache": normal(B, 9, HKV, D), "v_cache": normal(B, 9, HKV, D), **NEW,
    "cache_seqlens": ints(3, 4)}
TURNED = {"rotary_cos": ANGLES["cos"], "rotary_sin": ANGLES["sin"], "rotary_interleaved": True}
PAGED = {"q": TOKEN, "k_cache": PAGES["k_pages"], "v_cache": PAGES["v_pages"], "cache_seqlens": ints(3, 4)}
USED = {"seqused_q": ints(2, 3), "seqused_k": ints(4, 5)}
PARTS = {"out_partial": normal(3, B, 5, HQ, D), "lse_partial": normal(3, B, 5, HQ), "out": None, "out_dtype": None}
STATES = {"v": normal(5, HQ, D), "s": normal(5, HQ), "v_other": normal(5, HQ, D), "s_other": normal(5, HQ),
    "mask": None}

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "attention": (wa.attention, DENSE | TAIL),
    "attention_varlen": (wa.attention_varlen, {**ROWS, "seq": RAGGED, **TAIL}),
    "attention_paged": (wa.attention_paged, {"q": TOKEN, "kv": KV, "seq": None, **TAIL}),
    "attention_paged, ragged": (wa.attention_paged, {"q": ROWS["q"], "kv": KV, "seq": wa.Ragged(CU_Q), **TAIL}),
    "attention_backward": (attention_backward, {"dout": OUT, **DENSE, "out": OUT, "lse": LSE, "seq": None,
        "mask": None}),
    "PagedKV": (cached, {**PAGES, "block_table": TABLE, "lengths": LENGTHS, "k_scale": None, "shared_pages": 0}),
    "Ragged": (ragged, {"cu_q": CU_Q, "cu_k": CU_K, "max_q": None, "max_k": None}),
    "append_paged": (wa.append_paged, {**PAGES, "block_table": TABLE, "lengths": LENGTHS, "k_new": normal(B, 2, HKV, D),
                                       "v_new": normal(B, 2, HKV, D), **ANGLES, "interleaved": True, "k_scale": None}),
    "append_slots": (wa.append_slots, {"k": normal(3, HKV, D), "v": normal(3, HKV, D), **PAGES, **ANGLES,
                                       "slot_mapping": ints(1, 5, 9), "positions": ints(1, 2, 3),
                                           "interleaved": False}),
    "merge_states": (merged, {"out": OUT, "lse": LSE, "backend": "auto"}),
    "quantize": (wa.quantize, {"x": DENSE["k"], "dtype": torch.float8_e4m3fn, "per": "tensor", "scale": None,
                               "rotation": None, "transposed": False}),
    "Hadamard": (lambda x: wa.Hadamard().applied(x), {"x": DENSE["k"]}),
    "Quantized": (lambda **given: wa.Quantized(**given).dequantized(), {"values": DENSE["k"].to(torch.float8_e4m3fn),
                                                                        "scale": torch.ones(HKV)}),
    "LatentQuery": (in_parts, {"nope": DENSE["q"], "rope": normal(B, 5, HQ, 4)}),
    "LatentQuery, plan": (planned_parts, {"nope": normal(B, 1, HQ, 512).bfloat16(), "rope": normal(B, 1, HQ,
        64).bfloat16()}),
    "LatentPages": (of_latents, {"q": ABSORBED, "scale": None, **LATENTS}),
    "LatentPages, bytes": (of_bytes, {"q": ABSORBED, "cache": BYTES, "block_table": TABLE, "lengths": LENGTHS}),
    "LatentPages, plan": (planned_latents, {"q": ABSORBED, "kv": wa.LatentPages(*LATENTS.values())}),
    "DecodePlan": (wa.DecodePlan, {"q": TOKEN, "kv": KV, **SHORT, "return_lse": False, "batch_invariant": False}),
    "DecodePlan()": (decoded, {"q": TOKEN, "kv": KV, "out": None}),
    "PrefillPlan": (wa.PrefillPlan, {**ROWS, "seq": RAGGED, **SHORT, "return_lse": False}),
    "PrefillPlan()": (prefilled, {**ROWS, "seq": RAGGED, "out": None}),
    "StepPlan": (wa.StepPlan, {
        "q": ROWS["q"], "kv": KV, "seq": wa.Ragged(CU_Q), **SHORT, "batch_invariant": False, "workspace": None,
    }),
    "StepPlan()": (stepped, {"q": ROWS["q"], "kv": KV, "seq": wa.Ragged(CU_Q), "out": None, "sinks": None}),
    "StepPlan.update": (updated, {"cu_q": CU_Q, "lengths": LENGTHS, "block_table": TABLE}),
    "Backend": (wa.Backend, {"name": "auto", "deterministic": None}),
    "warm": (wa.warm, {"model": [wa.Layer(4, 2, 64, 64)], "arch": "none", "calls": "all", "processes": 1}),
    "layer": (wa.Layer, {"heads_q": 4, "heads_kv": 2, "dim_qk": 64, "dim_v": 64, "dtype": torch.float16, "window": 4,
              "soft_cap": 3.0, "sinks": True, "latent": 0}),
    "config": (config, {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256, "sliding_window": 4,
               "layer_types": ["full_attention"], "attn_logit_softcapping": 3.0, "dtype": "float16",
               "text_config": {}, "head_dim": 64}),
    "config, latent": (config, {"num_attention_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
                       "qk_nope_head_dim": 128, "v_head_dim": 128, "model_type": "deepseek_v3"}),
    "largest step": (wa.LargestStep, {"requests": 2, "tokens": 8, "length": 64, "page_size": 16, "drafts": 0}),
    "SlidingWindow": (partial(masked, wa.SlidingWindow), {"left": 3, "right": 0}),
    "Chunked": (partial(masked, wa.Chunked), {"size": 3}),
    "Prefix": (partial(masked, wa.Prefix), {"lengths": 3}),
    "Padding": (partial(masked, wa.Padding), {"lengths": ints(3, 4)}),
    "Document": (partial(masked, wa.Document), {"ids": torch.zeros(B, 7, dtype=torch.int32), "runs": False}),
    "Materialized": (partial(masked, wa.Materialized), {"mask": torch.ones(B, HQ, 5, 7, dtype=torch.bool)}),
    "CustomMask": (partial(masked, wa.CustomMask), {"keep": lambda b, h, q, k: k <= q}),
    "a mask and another": (partial(masked, lambda other: wa.Causal() & other), {"other": wa.Causal()}),
    "ALiBi": (partial(scored, wa.ALiBi), {"slopes": HQ}),
    "Bias": (partial(scored, wa.Bias), {"bias": normal(5, 7)}),
    "SoftCap": (partial(scored, wa.SoftCap), {"cap": 3.0}),
    "CustomScore": (partial(scored, wa.CustomScore), {"apply": lambda s, b, h, q, k: s}),
    "torch's SDPA": (torch_sdpa.scaled_dot_product_attention, {**HEADS_FIRST, "attn_mask": None, "dropout_p": 0.0,
                                                               "is_causal": False, "scale": None, "enable_gqa": False}),
    "FlexAttention": (flex.flex_attention, {**HEADS_FIRST, "score_mod": None, "block_mask": None, "scale": None}),
    "flash-attn 2": (version2.flash_attn_func, {**FLASH, "window_size": (-1, -1), "alibi_slopes": normal(HQ)}),
    "flash-attn 3": (version3.flash_attn_func, {**FLASH, "window_size": (-1, -1), "attention_chunk": 0,
        "k_descale": None}),
    "flash-attn 4": (version4.flash_attn_func, {**FLASH, "window_size": (None, None), "learnable_sink": normal(HQ)}),
    "flash-attn 2, packed": (version2.flash_attn_qkvpacked_func, {"qkv": normal(B, 5, 3, HQ, D)}),
    "flash-attn 2, keys packed": (version2.flash_attn_kvpacked_func, {"q": DENSE["q"], "kv": normal(B, 7, 2, HKV, D)}),
    "flash-attn 3, packed": (version3.flash_attn_qkvpacked_func, {"qkv": normal(B, 5, 8, D), "num_heads_q": 4}),
    "flash-attn 2, varlen": (version2.flash_attn_varlen_func, FLASH_ROWS),
    "flash-attn 3, varlen": (version3.flash_attn_varlen_func, FLASH_ROWS | USED),
    "flash-attn 4, varlen": (version4.flash_attn_varlen_func, FLASH_ROWS | USED),
    "flash-attn 4, pages": (version4.flash_attn_varlen_func, {"q": ROWS["q"], "k": PAGES["k_pages"],
        "v": PAGES["v_pages"],
                            "cu_seqlens_q": CU_Q, "page_table": TABLE, "seqused_k": LENGTHS, "max_seqlen_q": 5}),
    "flash-attn 4, functions": (version4.flash_attn_func, {**DENSE, "mask_mod": lambda b, h, i, j: i >= j, "score_mod":
                                lambda s, b, h, i, j, a: s + a[0][h], "aux_tensors": [normal(HQ)]}),
    "flash-attn 3, absorbed": (version3.flash_attn_func, {"q": DENSE["q"], "k": normal(B, 7, 1, D), "v": normal(B, 7,
        1, 32),
                                                          "qv": normal(B, 5, HQ, 32)}),
    "flash-attn 2, cache": (version2.flash_attn_with_kvcache, {**CACHE, **TURNED, "window_size": (-1, -1)}),
    "flash-attn 3, cache": (version3.flash_attn_with_kvcache, {**CACHE, **TURNED, "rotary_seqlens": ints(1, 2)}),
    "flash-attn 2, pages": (version2.flash_attn_with_kvcache, {**PAGED, "block_table": TABLE,
        "cache_leftpad": ints(0, 1)}),
    "flash-attn 3, pages": (version3.flash_attn_with_kvcache, {**PAGED, "page_table": TABLE,
        "cache_batch_idx": ints(1, 0)}),
    "flash-attn 3, ragged": (version3.flash_attn_with_kvcache, {**PAGED, **TURNED, "q": normal(3, HQ, D),
        "page_table": TABLE,
                             "k": normal(3, HKV, D), "v": normal(3, HKV, D), "cu_seqlens_q": ints(0, 1, 3),
                             "cu_seqlens_k_new": ints(0, 1, 3), "max_seqlen_q": 2, "rotary_seqlens": ints(1, 2)}),
    "flash-attn 3, combine": (version3.flash_attn_combine, PARTS),
    "flash-attn 4, combine": (version4.flash_attn_combine, PARTS | {"seqused": None}),
    "flash-attn 4, metadata": (version4.get_scheduler_metadata, {"max_seqlen_q": 3, "max_seqlen_k": 3, "nheads": 2,
                               "nheads_kv": 2, "headdim": 16, "num_splits": 1, "cu_seqlens_q": CU_Q}),
    "unpad_input": (bert_padding.unpad_input, {"hidden_states": normal(B, 5, 8), "attention_mask": torch.ones(B,
        5).int()}),
    "index_first_axis": (bert_padding.index_first_axis_residual, {"input": normal(5, 8), "indices": ints(0, 3)}),
    "index_put_first_axis": (bert_padding.index_put_first_axis, {"values": normal(2, 8), "indices": ints(0, 3),
        "first_axis_dim": 5}),
    "unpad_input, several": (bert_padding.unpad_input_for_concatenated_sequences, {"hidden_states": normal(B, 5, 8),
        "attention_mask_in_length": torch.ones(B, 5).int()}),
    "FlashInfer, append": (flashinfer.append_paged_kv_cache, {"append_key": normal(2, HKV, D), "append_value": normal(2,
        HKV, D), "batch_indices": ints(0, 0), "positions": ints(0, 1), "paged_kv_cache": tuple(PAGES.values()),
        "kv_indices": ints(1), "kv_indptr": ints(0, 1), "kv_last_page_len": ints(2)}),
    "FlashInfer, places": (flashinfer.get_batch_indices_positions, {"append_indptr": ints(0, 2), "seq_lens": ints(3),
        "nnz": 2}),
    "FlashInfer, lengths": (flashinfer.get_seq_lens, {"kv_indptr": ints(0, 2), "kv_last_page_len": ints(3),
        "page_size": 4}),
    "pad_input": (bert_padding.pad_input, {"hidden_states": normal(10, 8), "indices": torch.arange(10), "batch": B,
        "seqlen": 5}),
    "FlashInfer, plan": (partial(planned, False), LISTS),
    "FlashInfer, run": (partial(planned, True), RUN),
    "FlashInfer, pages": (partial(prompts, flashinfer.BatchPrefillWithPagedKVCacheWrapper,
                          {"q": ROWS["q"], "paged_kv_cache": tuple(PAGES.values())}), PROMPTS),
    "FlashInfer, ragged": (partial(prompts, flashinfer.BatchPrefillWithRaggedKVCacheWrapper, ROWS),
                           {"qo_indptr": CU_Q, "kv_indptr": CU_K, **SIZES, "head_dim_qk": D, "causal": True}),
    "FlashInfer, one decode": (flashinfer.single_decode_with_kv_cache, {"q": normal(HQ, D), "k": normal(7, HKV, D),
                               "v": normal(7, HKV, D), "q_scale": None}),
    "FlashInfer, one prompt": (flashinfer.single_prefill_with_kv_cache, {"q": normal(5, HQ, D), "k": normal(7, HKV, D),
                               "v": normal(7, HKV, D), "causal": False, "custom_mask": None}),
    "FlashInfer, states": (flashinfer.merge_state_in_place, STATES),
}  # fmt: skip


def replaced(call: str, given: dict[str, Any], most: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each argument of a call replaced by up to `most` wrong values: what is wrong, and all arguments."""
    chance = random.Random(zlib.crc32(call.encode()))
    for name in given:
        for kind in chance.sample(sorted(WRONG), min(most, len(WRONG))):
            copies = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
            yield f"{name} is {kind}", copies | {name: WRONG[kind]}


def ending(function: Callable[..., Any], given: dict[str, Any]) -> str:
    """How a call ends: "result", "AttentionError", or otherwise than it should."""
    try:
        with torch.no_grad():
            function(**given)
    except wa.AttentionError as error:
        long = [x for x in error.reasons if len(x) > LONGEST]
        return f"{long[0][:80]} ... is long" if long else "AttentionError"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:LONGEST]
    return "result"


def amiss(call: str, most: int) -> list[str]:
    """What ended otherwise than it should."""
    function, given = CALLS[call]
    ended = ((what, ending(function, arguments)) for what, arguments in replaced(call, given, most))
    return [f"{what}: {how}" for what, how in ended if how not in ENDINGS]


@pytest.mark.parametrize("call", [name for name in CALLS if name != "warm"])
def test_the_call_itself_is_right(call):
    function, given = CALLS[call]
    function(**{n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in given.items()})


@pytest.mark.parametrize("call", CALLS)
def test_one_sentence(call):
    assert not amiss(call, AT_ONCE)


@pytest.mark.full
@pytest.mark.parametrize("call", CALLS)
def test_one_sentence_for_every_value(call):
    assert not amiss(call, len(WRONG))
