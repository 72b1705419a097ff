"""Models of transformers in training mode: gradients of every parameter, a step, and dropout by its key."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from tests.families import decoder, decoder_config, encoder
from warpattn.errors import AttentionError
from warpattn.integrations import transformers as adapter


@pytest.fixture(autouse=True, scope="module")
def _registered():
    adapter.register()


def gradients(model, name, **inputs):
    model.set_attn_implementation(name)
    model.zero_grad()
    model(**inputs).loss.backward()
    return {key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_every_parameter_of_a_decoder(family, checkpointed):
    model = decoder(family).train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(1, 61, (2, 13))
    real = torch.arange(13) < torch.tensor([[13], [9]])
    inputs = {"input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~real, -100)}
    expected = gradients(model, "eager", **inputs)
    found = gradients(model, adapter.NAME, **inputs)
    assert found.keys() == expected.keys() and any("sinks" in key for key in found) == (family == "gpt_oss")
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-3, atol=1e-5, msg=key)


@pytest.mark.full
def test_the_loss_of_200_steps_follows_that_of_sdpa():
    """In bf16 with fp32 weights; each word's follower is fixed half of the time."""

    def losses(name):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(decoder_config("llama"), attn_implementation=name).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        follower, found = torch.randperm(60) + 1, []
        for _ in range(200):
            first, noise = torch.randint(1, 61, (8, 16)), torch.randint(1, 61, (8, 16))
            ids = torch.stack((first, torch.where(noise < 30, follower[first - 1], noise)), 2).flatten(1)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.detach().float())
        return torch.stack(found)

    found, expected = losses(adapter.NAME), losses("sdpa")
    assert expected[-20:].mean() < expected[:20].mean() - 0.3, "nothing was learnt"
    assert not torch.equal(found, expected), "one was compared with itself"
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)


def test_dropout_is_one_error_that_names_the_key():
    config = decoder_config("llama")
    config.attention_dropout = 0.1
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=adapter.NAME).train()
    ids = torch.randint(1, 61, (1, 5))
    with pytest.raises(AttentionError, match=r"dropout is 0.1; warpattn has none: set config\.attention_dropout to 0"):
        model(input_ids=ids)
    assert model.eval()(input_ids=ids).logits.isfinite().all()


def test_dropout_of_bert_has_another_key():
    model = encoder("bert").train()
    model.set_attn_implementation(adapter.NAME)
    with pytest.raises(AttentionError, match=r"set config\.attention_probs_dropout_prob to 0 to train"):
        model(input_ids=torch.randint(1, 61, (1, 5)))
