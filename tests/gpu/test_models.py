"""Whole models of transformers on the card: fp16 and bf16, prefill and generation, against eager attention in fp32.

The rule is the one for kernels: at most twice the error that eager attention makes in the same dtype, against fp32, and
a floor where that error is small by chance. Twins of tests/unit/integrations/transformers/test_transformers_models.py.
"""

import copy
import sys

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from tests.families import DECODERS, batches_of, decoder, encoder
from warpattn.integrations import transformers as adapter

pytestmark = pytest.mark.gpu

LENGTH = 200
FLOOR = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest logit: two roundings of the dtype
DTYPES = list(FLOOR)


@pytest.fixture(autouse=True, scope="module")
def _registered():
    adapter.register()


def tokens(length=LENGTH, batch=2):
    return torch.randint(1, 61, (batch, length), device="cuda")


def padded(side):
    real = torch.arange(LENGTH, device="cuda") < torch.tensor([[LENGTH], [77]], device="cuda")
    return real if side == "right" else real.flip(1)


def run(model, dtype, implementation, **inputs):
    """Logits (or hidden states) in fp32."""
    model = copy.deepcopy(model).to("cuda", dtype)
    model.set_attn_implementation(implementation)
    with torch.inference_mode():
        return model(**inputs)[0].float()


def check(ours, eager, exact, dtype):
    allowed = 2 * (eager - exact).abs().max() + FLOOR[dtype] * exact.abs().max()
    assert torch.isfinite(ours).all()
    assert (ours - exact).abs().max() <= allowed


@pytest.mark.parametrize(("side", "dtype"), [("right", torch.float16), ("left", torch.bfloat16)], ids=["fp16", "bf16"])
@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder(family, side, dtype):
    model, real = decoder(family, head_dim=32), padded(side)
    inputs = {"input_ids": tokens(), "attention_mask": real.long()}
    exact = run(model, torch.float32, "eager", **inputs)
    eager, ours = (run(model, dtype, name, **inputs) for name in ("eager", adapter.NAME))
    check(ours[real], eager[real], exact[real], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16"])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_an_encoder(family, dtype):
    model, real = encoder(family), padded("right")
    inputs = {"input_ids": tokens(), "attention_mask": real.long()}
    exact = run(model, torch.float32, "eager", **inputs)
    eager, ours = (run(model, dtype, name, **inputs) for name in ("eager", adapter.NAME))
    check(ours[real], eager[real], exact[real], dtype)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", DECODERS)
def test_generation(family, cache):
    """The logits of every step, with the tokens that eager attention in fp32 chose."""
    model, real, new = decoder(family, head_dim=32), padded("left"), 6
    prompt = tokens().masked_fill(~real, 0)
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {"return_dict_in_generate": True, "output_logits": True, "cache_implementation": cache}
    if cache == "static":
        options["disable_compile"] = True  # torch 2.11's compiler writes code for its own Triton, not for 3.9
    exact_model = copy.deepcopy(model).cuda()
    chosen = exact_model.generate(prompt, attention_mask=real.long(), **options)
    steps = chosen.sequences[:, LENGTH:]
    forced = {"prefix_allowed_tokens_fn": lambda b, ids: [int(steps[b, len(ids) - LENGTH])]}
    found = []
    for name in ("eager", adapter.NAME):
        half = copy.deepcopy(model).to("cuda", torch.bfloat16)
        half.set_attn_implementation(name)
        found.append(half.generate(prompt, attention_mask=real.long(), **options, **forced))
    eager, ours = (torch.stack(result.logits).float() for result in found)
    assert torch.equal(found[1].sequences, chosen.sequences)
    check(ours, eager, torch.stack(chosen.logits), torch.bfloat16)


@pytest.mark.parametrize("family", DECODERS)
def test_continuous_batches(family, monkeypatch):
    """`generate_batch` in bf16, one prompt in chunks: every token is a best one by fp32's eager attention, within the
    error that eager attention makes in bf16."""
    module, calls = sys.modules[adapter.attend.__module__], []
    attend = module.attention_varlen

    def noted(q, k, v, seq, **tail):
        calls.append(len(seq.cu_q) - 1)
        return attend(q, k, v, seq, **tail)

    monkeypatch.setattr(module, "attention_varlen", noted)
    model = decoder(family, head_dim=32)
    options = transformers.GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    prompts = [tokens(n, 1)[0].tolist() for n in (3, 70, 9, 31)]
    ours = copy.deepcopy(model).to("cuda", torch.bfloat16)
    ours.set_attn_implementation(adapter.NAME)
    found = ours.generate_batch(prompts, generation_config=options, continuous_batching_config=batches_of(48))
    assert ours.config._attn_implementation == adapter.NAME
    assert max(calls) >= 3 and len(calls) % model.config.num_hidden_layers == 0
    for prompt, made in zip(prompts, found.values(), strict=True):
        text = {"input_ids": torch.tensor([prompt + made.generated_tokens], device="cuda")}
        exact, eager = (run(model, dtype, "eager", **text)[0] for dtype in (torch.float32, torch.bfloat16))
        allowed = 2 * (eager - exact).abs().max() + FLOOR[torch.bfloat16] * exact.abs().max()
        logits = exact[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(made.generated_tokens, device="cuda")[:, None])[:, 0]
        assert len(chosen) == 12 and (logits.amax(1) - chosen <= 2 * allowed).all()


def test_packed_sequences_by_position_ids():
    positions = torch.cat((torch.arange(150), torch.arange(LENGTH - 150))).cuda()[None]
    inputs = {"input_ids": tokens(batch=1), "position_ids": positions, "use_cache": False}
    model = decoder("mistral", head_dim=64)
    exact = run(model, torch.float32, "eager", **inputs)
    eager, ours = (run(model, torch.float16, name, **inputs) for name in ("eager", adapter.NAME))
    check(ours, eager, exact, torch.float16)
