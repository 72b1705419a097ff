"""generate_batch (continuous batching) of small models with warpattn: the tokens of generate, no other attention."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers.generation.continuous_batching import continuous_api

from tests.drawn import left_out
from tests.families import DECODERS, batches_of, decoder
from warpattn.errors import AttentionError
from warpattn.integrations import transformers as adapter

PROMPTS = (3, 9, 30, 2)  # the third is longer than a step, so it comes in chunks
TOKENS = 6


@pytest.fixture(autouse=True, scope="module")
def _registered():
    adapter.register()


@pytest.fixture
def calls(monkeypatch):
    """The offsets of queries of every call that attends."""
    module, seen = sys.modules[adapter.attend.__module__], []
    attend = module.attention_varlen

    def noted(q, k, v, seq, **tail):
        seen.append(seq.cu_q.tolist())
        return attend(q, k, v, seq, **tail)

    monkeypatch.setattr(module, "attention_varlen", noted)
    return seen


@pytest.mark.parametrize("family", [x if x in ("gemma2", "gpt_oss") else left_out(x) for x in DECODERS])
def test_tokens_of_generate(family, calls):
    model = decoder(family)
    chance = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 60, (n,), generator=chance).tolist() for n in PROMPTS]
    options = transformers.GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=60, pad_token_id=0)
    alone = [model.generate(torch.tensor([x]), generation_config=options)[0, len(x) :].tolist() for x in prompts]
    model.set_attn_implementation(adapter.NAME)
    found = model.generate_batch(prompts, generation_config=options, continuous_batching_config=batches_of(24))
    assert [x.generated_tokens for x in found.values()] == alone
    assert model.config._attn_implementation == adapter.NAME
    assert max(map(len, calls)) > 3 and len(calls) % model.config.num_hidden_layers == 0


@pytest.mark.parametrize("name", ["flash_attn_2", "flash_attn_3"])
def test_where_flash_attn_is_installed_only_other_implementations_are_replaced(name, monkeypatch):
    other = f"is_{'flash_attn_2' if name.endswith('3') else 'flash_attn_3'}_available"
    monkeypatch.setattr(continuous_api, f"is_{name}_available", lambda **_: True)
    monkeypatch.setattr(continuous_api, other, lambda **_: False)
    chosen = []
    model = SimpleNamespace(_supports_flash_attn=True, set_attn_implementation=chosen.append)
    for implementation in (adapter.NAME, "sdpa"):
        model.config = SimpleNamespace(_attn_implementation=implementation)
        continuous_api.ContinuousBatchingManager.switch_to_cb_friendly_attn(SimpleNamespace(), model)
    assert [implementation.removeprefix("paged|") for implementation in chosen] == [f"flash_attention_{name[-1]}"]


def test_a_block_table_is_one_error():
    q = torch.randn(1, 4, 3, 16)
    cache = SimpleNamespace(update=None)
    with pytest.raises(AttentionError, match="cache is a block table"):
        adapter.attend(torch.nn.Module(), q, q, q, None, cache=cache, block_table=torch.zeros(1, 1, 1))
