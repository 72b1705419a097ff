"""vLLM's engine on the CPU with a small DeepSeek 2 and our latent attention: chunks, shared prefixes and drafts.

A process of its own: an engine with drafts of n-grams changes later ones in its process (vLLM 0.32, with its
own attention, too).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.test_vllm import N_GRAMS, check, engine, generate, on_cpus, prompts
from tests.families import decoder

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", autouse=True)
def _vllm():
    on_cpus("CPU_MLA", "latent.WarpattnMLABackend")


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
