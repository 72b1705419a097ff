"""A real engine: vLLM on the CPU with small models, whose steps our backend attends for (`make test-engine`).

vLLM's CPU platform takes the class of its own backend from the registry, so registering ours under that name is all. In
fp32, the log-probabilities of what it generates are compared with transformers' eager attention over the whole text.
"""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import decoder

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


@pytest.fixture(scope="module", autouse=True)
def _vllm():
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "warpattn.integrations.vllm.WarpattnBackend")
    register_backend(AttentionBackendEnum.CPU_MLA, "warpattn.integrations.vllm.latent.WarpattnMLABackend")


@pytest.fixture
def steps(monkeypatch):
    """(tokens, longest number of new tokens, whether nobody has context) of every layer of every step."""
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
    llm = LLM(model=str(folder), **ENGINE, **options)
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


def check(model: Any, texts: list[list[int]], results: list[Any]) -> None:
    """Every generated token's log-probability is that of eager attention."""
    for text, result in zip(texts, results, strict=True):
        (made,) = result.outputs
        new = list(made.token_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([text + new])).logits[0, len(text) - 1 : -1]
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


def test_speculation(steps, tmp_path):
    """Drafts that repeat the text: requests have up to four new tokens in a step."""
    model = decoder("llama", head_dim=32)
    texts = [text[:12] * 4 for text in prompts()]
    with engine(model, tmp_path, speculative_config=N_GRAMS) as llm:
        check(model, texts, generate(llm, texts))
    assert any(1 < longest <= 4 for _, longest, _ in steps)


@pytest.fixture
def latent_steps(monkeypatch):
    """Calls of our latent attention: "new", "context" or "decode".

    vLLM turns chunks and shared prefixes off where the CPU has no AMX, for its own kernels; while it decides, this one
    has it. Its rotation on CPUs is wrong for columns of a larger tensor, as latent queries are (log-probabilities are
    off by up to 1e-2, with its own attention, too): its other one is taken.
    """
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
    from vllm.platforms.cpu import CpuPlatform

    from warpattn.integrations.vllm.latent import WarpattnMLAImpl, WarpattnMLAPrefill

    decide, seen = CpuPlatform.check_and_update_config, []

    def with_amx(config):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
            decide(config)

    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_native)
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(with_amx))
    places = {"new": (WarpattnMLAPrefill, "run_prefill_new_tokens"), "decode": (WarpattnMLAImpl, "forward_mqa")}
    for what, (owner, name) in (places | {"context": (WarpattnMLAPrefill, "run_prefill_context_chunk")}).items():
        monkeypatch.setattr(owner, name, noting(seen, what, getattr(owner, name)))
    return seen


def noting(seen: list[str], what: str, function: Any) -> Any:
    """The function, which notes its calls."""

    def noted(*arguments: Any, **named: Any) -> Any:
        seen.append(what)
        return function(*arguments, **named)

    return noted


@pytest.mark.parametrize("drafts", [None, N_GRAMS])
def test_latent_attention(drafts, latent_steps, tmp_path):
    model = decoder("deepseek_v2")
    texts = [text[:12] * 4 for text in prompts()] if drafts else prompts()
    with engine(model, tmp_path, speculative_config=drafts) as llm:
        check(model, texts, generate(llm, texts))
        again = generate(llm, texts)
        check(model, texts, again)
    assert set(latent_steps) == {"new", "context", "decode"}
    assert any(result.num_cached_tokens for result in again)
