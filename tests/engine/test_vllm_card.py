"""vLLM's engine on a card with small models: images that see both directions, and batch invariance.

Not for `make test-engine`, whose vLLM is the one for CPUs. On a machine with a card and vLLM:

    python -m pytest -m engine -W default tests/engine/test_vllm_card.py -k images
    python -m pytest -m engine -W default tests/engine/test_vllm_card.py -k invariance

Each in a process of its own: vLLM reads its environment once. `-W default`: warnings of its packages are no errors.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.test_vllm import engine, generate, images_of, mask_with_images, prompts
from tests.families import decoder

pytestmark = [pytest.mark.engine, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")]

CARD = {
    "dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.05, "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]},
}  # fmt: skip
LOUDER = 16.0  # weights around attention
FLOOR = 3e-2  # of log-probabilities, whose logits are bf16


def attentive() -> Any:
    """A small model whose log-probabilities depend on attention by far more than bf16 rounds."""
    model = decoder("llama", head_dim=64)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("v_proj", "o_proj", "lm_head")):
                weight.mul_(LOUDER)
    return model


def on_the_card(**environment: str) -> str:
    """The name of our backend in a vLLM with these variables."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"} | environment
    from warpattn.integrations import vllm_plugin

    vllm_plugin.register()
    from warpattn.integrations.vllm import WarpattnBackend

    return WarpattnBackend.get_name()


def started(model: Any, folder: Path, backend: str, card: dict[str, Any] = CARD, **options: Any) -> Any:
    """An engine on the card."""
    return engine(model, folder, **card, attention_config={"backend": backend}, **options)


def log_probabilities(model: Any, dtype: torch.dtype, text: list[int], new: list[int], images: bool) -> torch.Tensor:
    """Of new tokens after a text, by eager attention, with or without images that see both directions."""
    mask = mask_with_images(None, len(text), len(text) + len(new)) if images else None
    model = model.to("cuda", dtype)
    with torch.inference_mode():
        given = torch.tensor([text + new], device="cuda")
        mask = None if mask is None else mask.to("cuda", dtype).clamp_min(torch.finfo(dtype).min)
        logits = model(given, attention_mask=mask).logits[0, len(text) - 1 : -1].float()
    return logits.log_softmax(-1)[torch.arange(len(new)), new].cpu()


def found_in(result: Any) -> tuple[list[int], torch.Tensor]:
    """A request's new tokens and their log-probabilities."""
    (made,) = result.outputs
    new = list(made.token_ids)
    return new, torch.tensor([chosen[token].logprob for chosen, token in zip(made.logprobs, new, strict=True)])


def error_allowed(model: Any, text: list[int], result: Any, images: bool = False) -> float:
    """Twice that of bf16's eager attention, and a floor; an AssertionError where a request's is larger."""
    new, found = found_in(result)
    exact = log_probabilities(model, torch.float32, text, new, images)
    half = log_probabilities(model, torch.bfloat16, text, new, images)
    allowed = 2 * (half - exact).abs().max() + FLOOR
    assert (found - exact).abs().max() <= allowed
    return float(allowed)


def test_images_see_both_directions(monkeypatch, tmp_path):
    """As on the CPU (`test_vllm.py`): the runner finds images in its requests. Prompts beside decoding requests."""
    backend = on_the_card(VLLM_USE_V2_MODEL_RUNNER="0")
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    from warpattn.integrations.vllm.images import ImageRanges

    written, write, begin = [], ImageRanges.write, CachedRequestState.__post_init__

    def with_images(state):
        begin(state)
        place = SimpleNamespace(extract_embeds_range=lambda: images_of(len(state.prompt_token_ids)))
        state.mm_features = [SimpleNamespace(modality="image", mm_position=place)]

    def noted(self, starts, found):
        written.append(len(found))
        write(self, starts, found)

    monkeypatch.setattr(CachedRequestState, "__post_init__", with_images)
    monkeypatch.setattr(ImageRanges, "write", noted)
    model = attentive()
    model.config.is_mm_prefix_lm = True
    with started(model, tmp_path, backend, max_num_batched_tokens=256, enable_prefix_caching=False) as llm:
        results = generate(llm, prompts())
    seen = 0.0
    for text, result in zip(prompts(), results, strict=True):
        allowed = error_allowed(model, text, result, images=True)
        new, _ = found_in(result)
        exact, hidden = (log_probabilities(model, torch.float32, text, new, images) for images in (True, False))
        seen = max(seen, float((hidden - exact).abs().max()) / allowed)
    assert seen > 2, "a mask without images would not be noticed"
    assert sum(written) >= 2 * sum(bool(images_of(len(text))) for text in prompts())


def test_batch_invariance(tmp_path):
    """A request alone and among others, its prompt in chunks there: the same tokens and bits of log-probabilities."""
    backend = on_the_card(VLLM_BATCH_INVARIANT="1")
    options = {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
    with started(attentive(), tmp_path, backend, **options) as llm:
        together = [found_in(result) for result in generate(llm, prompts())]
        alone = [found_in(generate(llm, [text])[0]) for text in prompts()]
    for (tokens, found), (expected, bits) in zip(together, alone, strict=True):
        assert tokens == expected
        assert torch.equal(found, bits)
