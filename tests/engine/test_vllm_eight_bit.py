"""vLLM's engine on the CPU with a cache of 8 bits: the scales of a checkpoint, chunks, decode and shared prefixes.

Eager attention rounds keys and values as the cache does. All keys are read from the cache here; by itself the backend
attends to prompts without context as they are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import warpattn as wa
from tests.engine.test_vllm import engine, generate, on_cpus, prompts
from tests.families import decoder

pytestmark = pytest.mark.engine

SCALES = [(0.003, 0.0007), (0.0051, 0.0013)]  # of keys and values of each layer
DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
FLOOR = 2e-3  # of log-probabilities: a value between two of 8 bits may be rounded to either
DECLARED = {
    "quant_method": "compressed-tensors", "config_groups": {}, "format": "float-quantized", "ignore": [],
    "kv_cache_scheme": {
        "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True,
    },
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _vllm():
    on_cpus("CPU_ATTN", "WarpattnBackend")


@pytest.fixture(autouse=True)
def _reads_the_cache(monkeypatch):
    from warpattn.integrations.vllm import metadata

    monkeypatch.setattr(metadata, "is_fresh", lambda common: False)


def rounding(dtype: torch.dtype, scales: list[tuple[float, float]]) -> Any:
    """Eager attention of a model over keys and values that were stored in 8 bits."""

    def attend(module, query, key, value, *others, **named):
        factors = zip((key, value), scales[module.layer_idx], strict=True)
        stored = [wa.quantize(x, dtype, scale=torch.tensor(scale)).dequantized() for x, scale in factors]
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, *stored, *others, **named)

    return attend


def log_probabilities(model: Any, text: list[int], new: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([text + new])).logits[0, len(text) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(new)), new]


def with_scales(folder: Path) -> None:
    """Add scales to a saved model, as checkpoints have them."""
    from safetensors.torch import load_file, save_file

    config, weights = folder / "config.json", folder / "model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": DECLARED}))
    tensors = load_file(weights)
    for layer, pair in enumerate(SCALES):
        for name, scale in zip("kv", pair, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{name}_scale"] = torch.tensor([scale])
    save_file(tensors, weights, {"format": "pt"})


@pytest.mark.parametrize(
    ("family", "kind", "scaled"), [("llama", "fp8", True), ("gpt_oss", "fp8", False), ("llama", "fp8_e5m2", False)]
)
def test_a_cache_of_8_bits(family, kind, scaled, monkeypatch, tmp_path):
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    model = decoder(family, head_dim=32)
    if scaled:
        save = model.save_pretrained
        monkeypatch.setattr(model, "save_pretrained", lambda folder: (save(folder), with_scales(folder)))
    with engine(model, tmp_path, kv_cache_dtype=kind) as llm:
        results = generate(llm, prompts(prefix=20))
        results += generate(llm, prompts(prefix=20))
    AttentionInterface.register("rounding", rounding(DTYPES[kind], SCALES if scaled else [(1.0, 1.0)] * 2))
    AttentionMaskInterface.register("rounding", eager_mask)
    errors, differences = [], []
    for text, result in zip(prompts(prefix=20) * 2, results, strict=True):
        (made,) = result.outputs
        new = list(made.token_ids)
        found = torch.tensor([chosen[token].logprob for chosen, token in zip(made.logprobs, new, strict=True)])
        model.set_attn_implementation("rounding")
        errors.append((found - log_probabilities(model, text, new)).abs())
        model.set_attn_implementation("eager")
        differences.append((found - log_probabilities(model, text, new)).abs())
    error, difference = torch.cat(errors), torch.cat(differences)
    assert error.max() < FLOOR and error.median() < 2e-5
    assert difference.max() > 2 * FLOOR, "a cache of 16 bits would be noticed"
