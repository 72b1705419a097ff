"""Checks, when the backend is made, that it supports everything that SGLang is configured to do."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_exec, get_parallel, get_spec

from warpattn.errors import Rules

DRAFTING = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")  # drafts in a chain; the others' form trees or need other masks
HAS = "warpattn's SGLang backend has"


def check_scope(runner: Any) -> int:
    """Return the most new tokens of a decoding request, drafts included. Raises AttentionError if the runner is to do
    anything that the backend does not support."""
    rules, model, parallel, spec = Rules(), runner.model_config, get_parallel(), get_spec()
    algorithm = spec.speculative_algorithm
    known = algorithm is None or algorithm.upper() in DRAFTING
    rules.require(known, f"speculative_algorithm is {algorithm}", f"{HAS} {', '.join(DRAFTING)}")
    if known and algorithm is not None:
        branches = spec.speculative_eagle_topk
        rules.require(branches in (None, 1), f"speculative_eagle_topk is {branches}", f"{HAS} chains of drafts, 1")
        option = "it verifies drafts of another: add --speculative-draft-attention-backend triton"
        rules.require(not runner.is_draft_worker, "the attention backend of the draft model is warpattn", option)
    rules.require(not model.is_encoder_decoder, "the model is an encoder and a decoder", f"{HAS} no cross-attention")
    rules.require(not model.is_local_attention_model, "the model attends in chunks", f"{HAS} windows alone")
    aware = getattr(runner, "prefill_aware_swa", False)
    rules.require(not aware, "the model's windows keep its prompt", f"{HAS} windows that do not")
    for name in ("attn_cp_size", "attn_dcp_size"):
        ranks = getattr(parallel, name)
        rules.require(ranks == 1, f"{name} is {ranks}: ranks share a context", f"{HAS} no such form")
    diffusion = get_exec().dllm.dllm_algorithm
    rules.require(diffusion is None, f"dllm_algorithm is {diffusion}", f"{HAS} models that decode token by token")
    rules.done()
    return 1 if algorithm is None else spec.speculative_num_draft_tokens or 1
