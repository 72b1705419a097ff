"""vLLM's engine on a card whose CUDA graphs hold prompts beside decoding requests, and drafts.

Not for `make test-engine`, whose vLLM is the one for CPUs. On a machine with a card and vLLM, each test in a process of
its own, since vLLM reads its environment once:

    python -m pytest -m engine -W default tests/engine/test_vllm_graphs.py -k 'mixed and full and runner1'

`runner1` and `runner2` are vLLM's two model runners. The second one takes drafts of a model only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from tests.engine.test_vllm import TOKENS, generate, prompts
from tests.engine.test_vllm_card import CARD, attentive, error_allowed, on_the_card, started
from tests.families import decoder

pytestmark = [pytest.mark.engine, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")]

DRAFTS = 3
SIZES = [1, 2, 4, 8, 16, 32, 64]  # tokens of captured steps
GRAPHS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {  # vLLM's options, and its environment
    "full": ({"mode": 0, "cudagraph_mode": "FULL"}, {}),
    "breaks": ({"mode": 0, "cudagraph_mode": "FULL_AND_PIECEWISE"}, {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}),
    "default": ({}, {}),  # FULL_AND_PIECEWISE, compiled by Inductor
}
RUNNERS = [pytest.param("0", id="runner1"), pytest.param("1", id="runner2")]


class Step(NamedTuple):
    """Tokens of a step, the most of one request, and graphs that were replayed for it."""

    tokens: int
    longest: int
    replays: list[None]

    @property
    def mixed(self) -> bool:
        return 1 + DRAFTS < self.longest < self.tokens


class Repeats:
    """Drafts that repeat the tokens before: vLLM makes one of the path that `speculative_config` names."""

    def __init__(self, config: Any) -> None:
        pass

    def propose(self, sampled: list[list[int]], lengths: Any, tokens: Any, **_: Any) -> list[list[int]]:
        """For each request that got a token."""
        rows = zip(sampled, lengths, tokens, strict=False)
        return [row[max(0, n - DRAFTS) : n].tolist() if new else [] for new, n, row in rows]


@pytest.fixture
def steps(monkeypatch):
    """Of all engines, in turn."""
    from warpattn.integrations.vllm.metadata import WarpattnMetadataBuilder

    seen: list[Step] = []
    build, replay = WarpattnMetadataBuilder.build, torch.cuda.CUDAGraph.replay

    def noted(self, common_prefix_len, common_attn_metadata, *rest, **named):
        seen.append(Step(common_attn_metadata.num_actual_tokens, common_attn_metadata.max_query_len, []))
        return build(self, common_prefix_len, common_attn_metadata, *rest, **named)

    def counted(self):
        if seen:
            seen[-1].replays.append(None)
        replay(self)

    monkeypatch.setattr(WarpattnMetadataBuilder, "build", noted)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return seen


def check(graphs: str, runner: str, texts: list[list[int]], steps: list[Step], folder: Path, **options: Any) -> None:
    """An engine with such graphs gives right log-probabilities."""
    compilation, environment = GRAPHS[graphs]
    backend = on_the_card(VLLM_USE_V2_MODEL_RUNNER=runner, **environment)
    chosen = CARD | {"compilation_config": compilation | {"cudagraph_capture_sizes": SIZES}}
    model = attentive()
    with started(model, folder, backend, chosen, max_num_batched_tokens=SIZES[-1], **options) as llm:
        steps.clear()
        first = generate(llm, texts)
        again = generate(llm, texts)  # prefixes come from the cache
    for text, *results in zip(texts, first, again, strict=True):
        for result in results:
            error_allowed(model, text, result)
    assert all(result.num_cached_tokens for text, result in zip(texts, again, strict=True) if len(text) > 32)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("graphs", GRAPHS)
def test_mixed_steps(graphs, runner, steps, tmp_path):
    """Chunks of prompts beside decoding requests, every step of at most 64 tokens by replaying graphs."""
    check(graphs, runner, prompts(), steps, tmp_path)
    assert sum(step.mixed for step in steps) >= 3
    assert all(step.replays for step in steps)
    if graphs == "full":
        assert all(len(step.replays) == 1 for step in steps)


@pytest.mark.parametrize("graphs", GRAPHS)
def test_drafts(graphs, steps, tmp_path):
    """Requests have up to four new tokens in a step, some of them accepted, beside prompts and without."""
    drafts = {"method": "custom_class", "model": f"{__name__}.{Repeats.__name__}", "num_speculative_tokens": DRAFTS}
    texts = [text[:1] * len(text) for text in prompts()]
    check(graphs, "0", texts, steps, tmp_path, speculative_config=drafts)
    assert sum(step.mixed for step in steps) >= 3
    assert any(step.longest == 1 + DRAFTS for step in steps)
    assert all(step.replays for step in steps)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("graphs", GRAPHS)
def test_drafts_of_a_model(graphs, runner, steps, tmp_path):
    """As above, from a layer of random weights that reads the model's hidden states (EAGLE): few are accepted."""
    target, folder = tmp_path / "target", tmp_path / "draft"
    drafts = {"method": "eagle", "model": str(drafting(folder)), "num_speculative_tokens": DRAFTS}
    check(graphs, runner, prompts(), steps, target, speculative_config=drafts)
    assert sum(step.mixed for step in steps) >= 3
    assert sum(step.longest == 1 + DRAFTS for step in steps) >= TOKENS - 1 - DRAFTS


def drafting(folder: Path) -> Path:
    """A folder with a drafting layer for the small Llama."""
    model = decoder("llama", head_dim=64)
    config = model.config.to_dict() | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, default=str))
    weights = {
        name.removeprefix("model."): weight.contiguous()
        for name, weight in model.state_dict().items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    hidden = config["hidden_size"]
    weights["fc.weight"] = torch.randn(hidden, 2 * hidden) / hidden**0.5
    save_file(weights, folder / "model.safetensors")
    return folder
