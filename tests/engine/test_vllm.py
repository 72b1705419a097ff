"""A real engine: vLLM on the CPU with small models, whose steps our backend attends for (`make test-engine`).

vLLM's CPU platform takes the class of its own backend from the registry, so registering ours under that name is all. In
fp32, the log-probabilities of what it generates are compared with transformers' eager attention over the whole text.
"""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.families import WINDOW, decoder

pytestmark = pytest.mark.engine

ENGINE = {  # prompts above 32 tokens come in chunks beside decoding requests
    "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "block_size": 16,
    "max_num_batched_tokens": 32, "enable_prefix_caching": True, "enforce_eager": True,
}  # fmt: skip
LENGTHS = (3, 50, 90, 17, 33, 1, 64, 100)
TOKENS = 8
CLOSE = 2e-5  # of log-probabilities in fp32
N_GRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "bloom")


def on_cpus(name: str, path: str) -> None:
    """Put a class of ours in the place of one of vLLM's."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum[name], f"warpattn.integrations.vllm.{path}")


@pytest.fixture(scope="module", autouse=True)
def _vllm():
    on_cpus("CPU_ATTN", "WarpattnBackend")


@pytest.fixture
def steps(monkeypatch):
    """(tokens, longest number of new tokens, whether no sequence has context) of every layer of every step."""
    from warpattn.integrations.vllm import WarpattnImpl

    seen, forward = [], WarpattnImpl.forward

    def noted(self, layer, query, key, value, kv_cache, metadata, *rest, **named):
        if metadata is not None:
            seen.append((metadata.num_actual_tokens, metadata.max_query_len, metadata.fresh))
        return forward(self, layer, query, key, value, kv_cache, metadata, *rest, **named)

    monkeypatch.setattr(WarpattnImpl, "forward", noted)
    return seen


@contextlib.contextmanager
def engine(model: Any, folder: Path, **options: Any):
    """A vLLM engine that serves a model."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    model.save_pretrained(folder)
    llm = LLM(model=str(folder), **ENGINE | options)
    yield llm
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def prompts(prefix: int = 0) -> list[list[int]]:
    """Prompts with so many first tokens in common."""
    chance = torch.Generator().manual_seed(3)
    common = torch.randint(1, 60, (prefix,), generator=chance).tolist()
    return [common + torch.randint(1, 60, (n,), generator=chance).tolist() for n in LENGTHS]


def generate(llm: Any, texts: list[list[int]]) -> list[Any]:
    """What the engine makes of all prompts at once."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=1)
    return llm.generate([{"prompt_token_ids": text} for text in texts], greedy, use_tqdm=False)


def check(model: Any, texts: list[list[int]], results: list[Any], mask_of: Any = lambda *sizes: None) -> None:
    """Every generated token's log-probability is that of eager attention, with the mask for (prompt, all tokens)."""
    for text, result in zip(texts, results, strict=True):
        (made,) = result.outputs
        new = list(made.token_ids)
        with torch.inference_mode():
            mask = mask_of(len(text), len(text) + len(new))
            logits = model(torch.tensor([text + new]), attention_mask=mask).logits[0, len(text) - 1 : -1]
        expected = logits.log_softmax(-1)[torch.arange(len(new)), new]
        found = torch.tensor([chosen[token].logprob for chosen, token in zip(made.logprobs, new, strict=True)])
        torch.testing.assert_close(found, expected, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_decode_and_shared_prefixes(family, steps, tmp_path):
    model = decoder(family, head_dim=32)
    with engine(model, tmp_path) as llm:
        check(model, prompts(), generate(llm, prompts()))
        assert len(steps) % model.config.num_hidden_layers == 0
        assert any(longest == 1 for _, longest, _ in steps), "steps of decode"
        assert any(tokens == 32 and not fresh for tokens, _, fresh in steps), "chunks with context"
        assert any(fresh for *_, fresh in steps), "prompts without context"
        check(model, prompts(prefix=40), generate(llm, prompts(prefix=40)))
        again = generate(llm, prompts(prefix=40))
        check(model, prompts(prefix=40), again)
        assert all(result.num_cached_tokens >= 32 for result in again)


def images_of(prompt: int) -> list[tuple[int, int]]:
    """First and last positions of a prompt's images, no longer than the window: vLLM leaves out longer ones."""
    return [(prompt // 4, prompt // 4 + WINDOW - 1), (prompt // 2, prompt // 2 + 3)] if prompt >= 30 else []


def mask_with_images(window: int | None, prompt: int, tokens: int) -> torch.Tensor:
    """What is added to the scores of a text whose images see both directions."""
    q, k = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    seen = (k <= q) & (q - k < (window or tokens))
    for first, last in images_of(prompt):
        seen |= (q >= first) & (q <= last) & (k >= first) & (k <= last)
    return torch.zeros(1, 1, tokens, tokens).masked_fill(~seen, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_images_see_both_directions(family, steps, monkeypatch, tmp_path):
    """A text model that is declared to have images, and vLLM's runner finds them in its requests: one prompt in chunks,
    decode beside others. What an image's tokens are made of is not attention's business."""
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

    def mask_of(prompt, tokens):
        if family == "llama":
            return mask_with_images(None, prompt, tokens)
        return {"full_attention": mask_with_images(None, prompt, tokens),
                "sliding_attention": mask_with_images(WINDOW, prompt, tokens)}  # fmt: skip

    monkeypatch.setattr(CachedRequestState, "__post_init__", with_images)
    monkeypatch.setattr(ImageRanges, "write", noted)
    model = decoder(family, head_dim=32)
    model.config.is_mm_prefix_lm = True
    with engine(model, tmp_path, max_num_batched_tokens=256, enable_prefix_caching=False) as llm:
        check(model, prompts(), generate(llm, prompts()), mask_of)
    assert sum(written) >= 2 * sum(length >= 30 for length in LENGTHS), "every image, in every group of layers"
    assert any(longest > 1 and not fresh for _, longest, fresh in steps)


def test_speculation(steps, tmp_path):
    """Drafts that repeat the text: requests have up to four new tokens in a step. The last test here: an engine with
    drafts of n-grams changes later ones in its process (vLLM 0.32, with its own attention, too)."""
    model = decoder("llama", head_dim=32)
    texts = [text[:12] * 4 for text in prompts()]
    with engine(model, tmp_path, speculative_config=N_GRAMS) as llm:
        check(model, texts, generate(llm, texts))
    assert any(1 < longest <= 4 for _, longest, _ in steps)
