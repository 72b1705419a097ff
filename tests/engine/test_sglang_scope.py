"""Drafts in SGLang's own classes on the CPU, and what the backend refuses when it is made or a step begins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import warpattn as wa
from tests.engine.conftest import DRAFTING, settings
from tests.engine.test_sglang import DIM, HEADS, HEADS_KV, MODEL, Engine, check, drafts_of
from warpattn.errors import AttentionError

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("window", [-1, 19])
def test_drafts(sglang, drafting, window, captured):
    """Drafts are verified in a chain; the next ones take the slots of those that were not kept."""
    layer = sglang.RadixAttention(HEADS, DIM, 0.2, HEADS_KV, 0, sliding_window_size=window)
    tail = {"mask": wa.Causal() if window < 0 else wa.SlidingWindow(window + 1), "scale": 0.2}
    engine = Engine(sglang)
    engine.backend.init_cuda_graph_state(4, 16)
    check(engine, engine.step(layer, {1: 40, 2: 13, 3: 1}), **tail)
    for count, kept in ((4, 2), (4, 1), (1, 1), (4, 4)):  # 1: SGLang without drafts for a while
        for new in ({1: count, 2: count}, {3: count, 1: count, 2: count}):
            found, texts = engine.verify(layer, new, kept, captured)
            for request, (out, q) in found.items():
                keys, values = (x[None] for x in texts[request])
                expected = wa.attention(q[None], keys, values, backend="reference", **tail)[0]
                torch.testing.assert_close(out, expected)


def test_drafts_have_places_of_their_own(sglang, drafting):
    """What a graph reads stays where it is for every number of drafts; SGLang's mask is one of drafts alone."""
    layer, engine = sglang.RadixAttention(HEADS, DIM, 0.2, HEADS_KV, 0), Engine(sglang)
    assert engine.backend.verify_mask.buffer.numel() == 16
    engine.backend.init_cuda_graph_state(4, 16)
    assert engine.backend.verify_mask.buffer.numel() == 4 * 16 and not engine.backend.verify_mask.is_read
    engine.step(layer, {1: 40, 2: 90})
    places = {4: set(), 1: set()}
    for count in (4, 1, 4, 1):
        engine.verify(layer, {1: count, 2: count}, 1, captured=True)
        step = engine.backend.forward_metadata
        assert step.max_q == count
        places[count].add((step.tables.pages.data_ptr(), step.lengths.data_ptr(), step.cu_q.data_ptr()))
    assert [len(x) for x in places.values()] == [1, 1] and places[4] != places[1]
    engine.backend.update_verify_buffers_to_fill_after_draft(drafts_of(4), None)


@pytest.mark.parametrize(
    ("changed", "runner", "words"),
    [
        ({"speculative_algorithm": "NGRAM"}, {}, "speculative_algorithm is NGRAM"),
        (DRAFTING | {"speculative_eagle_topk": 4}, {}, "speculative_eagle_topk is 4"),
        (DRAFTING, {"is_draft_worker": True}, "add --speculative-draft-attention-backend"),
        ({"attn_cp_size": 2}, {}, "attn_cp_size is 2: ranks share a context"),
        ({"attn_dcp_size": 2}, {}, "attn_dcp_size is 2: ranks share a context"),
        ({"dllm": SimpleNamespace(dllm_algorithm="LowConfidence")}, {}, "dllm_algorithm is LowConfidence"),
        ({}, {"prefill_aware_swa": True}, "windows keep its prompt"),
        ({}, {"model_config": SimpleNamespace(**vars(MODEL) | {"is_encoder_decoder": True})}, "no cross-attention"),
        ({}, {"model_config": SimpleNamespace(**vars(MODEL) | {"is_local_attention_model": True})}, "in chunks"),
    ],
)
def test_what_it_cannot_serve_is_said_when_it_is_made(sglang, changed, runner, words):
    from warpattn.integrations.sglang import scope

    settings(scope, **changed)
    try:
        with pytest.raises(AttentionError, match=words):
            Engine(sglang, **runner)
    finally:
        settings(scope)


@pytest.mark.parametrize("captured", [False, True])
def test_steps_of_other_kinds(sglang, captured):
    """A tree of drafts, an extension of drafts and blocks of a diffusion model are one sentence each."""
    engine = Engine(sglang)
    engine.step(sglang.RadixAttention(HEADS, DIM, 0.2, HEADS_KV, 0), {1: 8})
    engine.backend.init_cuda_graph_state(4, 16)
    init = engine.backend.init_forward_metadata_out_graph if captured else engine.backend.init_forward_metadata
    batch = engine.batch([1], [8], [4], engine.slots(1, 8, 12))
    batch.forward_mode, batch.spec_info = sglang.ForwardMode.TARGET_VERIFY, drafts_of(4, branches=2)
    with pytest.raises(AttentionError, match="drafts have 2 branches"):
        init(batch)
    for name in ("DRAFT_EXTEND_V2", "DLLM_EXTEND"):
        batch.forward_mode = sglang.ForwardMode[name]
        with pytest.raises(AttentionError, match=f"mode {name} is requested"):
            init(batch)
