"""Whole models of transformers with warpattn: logits, generation and gradients' absence against eager attention."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from tests.families import DECODERS, decoder, encoder, enlarged
from warpattn.integrations import transformers as adapter

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
LENGTH = 17


@pytest.fixture(autouse=True, scope="module")
def _registered():
    adapter.register()


def tokens(length=LENGTH, batch=2):
    return torch.randint(1, 61, (batch, length))


def padded(side):
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]])
    return real if side == "right" else real.flip(1)


def both(model, **inputs):
    """Logits (or hidden states) with eager attention and with warpattn."""
    found = []
    with torch.inference_mode():
        for name in ("eager", adapter.NAME):
            model.set_attn_implementation(name)
            found.append(model(**inputs)[0])
    return found


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_with_padding(family, side):
    real = padded(side)
    stock, ours = both(decoder(family), input_ids=tokens(), attention_mask=real.long())
    torch.testing.assert_close(ours[real], stock[real], **CLOSE)


@pytest.mark.parametrize("family", DECODERS)
def test_attention_matters_in_these_models(family):
    """A change of the first token changes the last logits: otherwise the comparisons above would show little."""
    model = decoder(family)
    ids = tokens(5)
    with torch.inference_mode():
        before = model(ids).logits[:, -1]
        ids[:, 0] = ids[:, 0] % 60 + 1
        assert (model(ids).logits[:, -1] - before).abs().max() > 1e-3


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", DECODERS)
def test_generation(family, cache):
    """Greedy, left-padded, past the window: every step's logits and the tokens."""
    model, real = decoder(family), padded("left")
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}
    ids = tokens().masked_fill(~real, 0)
    results = []
    for name in ("eager", adapter.NAME):
        model.set_attn_implementation(name)
        results.append(model.generate(ids, attention_mask=real.long(), **options))
    stock, ours = results
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(stock.logits), **CLOSE)
    assert torch.equal(ours.sequences, stock.sequences)
    assert ours.sequences.shape[1] == LENGTH + 6


def test_compiled_generation():
    """A static cache, the decoding step compiled by transformers: one graph, as on a GPU."""
    torch._dynamo.utils.counters.clear()
    model, ids, real = decoder("llama"), tokens(9), padded("left")[:, -9:]
    compiled = transformers.CompileConfig(backend="eager", mode=None)
    compiled._compile_all_devices = True  # transformers compiles on GPUs only, unless told so
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static", "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}
    stock = model.generate(ids, attention_mask=real.long(), **options)
    model.set_attn_implementation(adapter.NAME)
    ours = model.generate(ids, attention_mask=real.long(), compile_config=compiled, **options)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(stock.logits), **CLOSE)
    counted = torch._dynamo.utils.counters
    assert counted["stats"]["unique_graphs"] >= 1
    assert not counted["graph_break"]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2"])  # gpt-oss does not look at position ids
def test_packed_sequences_by_position_ids(family):
    positions = torch.cat((torch.arange(10), torch.arange(7)))[None]
    model, ids = decoder(family), tokens(batch=1)
    stock, ours = both(model, input_ids=ids, position_ids=positions, use_cache=False)
    torch.testing.assert_close(ours, stock, **CLOSE)
    with torch.inference_mode():
        alone = model(ids[:, 10:], use_cache=False).logits
    torch.testing.assert_close(ours[:, 10:], alone, **CLOSE)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_packed_sequences_by_offsets(family):
    model, ids = decoder(family), tokens(batch=1)
    model.set_attn_implementation(adapter.NAME)
    offsets = torch.tensor([0, 10, LENGTH], dtype=torch.int32)
    names = ("cu_seq_lens_q", "cu_seq_lens_k")
    packed = dict.fromkeys(names, offsets) | {"max_length_q": 10, "max_length_k": 10}
    positions = torch.cat((torch.arange(10), torch.arange(7)))[None]
    with torch.inference_mode():
        ours = model(ids, position_ids=positions, use_cache=False, **packed).logits
        alone = [model(ids[:, rows], use_cache=False).logits for rows in (slice(0, 10), slice(10, LENGTH))]
    torch.testing.assert_close(ours, torch.cat(alone, 1), **CLOSE)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_an_encoder(family, side):
    real = padded(side)
    stock, ours = both(encoder(family), input_ids=tokens(), attention_mask=real.long())
    torch.testing.assert_close(ours[real], stock[real], **CLOSE)


def test_an_encoder_decoder_with_a_position_bias():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = enlarged(transformers.T5ForConditionalGeneration._from_config(config, attn_implementation="eager").eval())
    real = padded("right")
    stock, ours = both(model, input_ids=tokens(), attention_mask=real.long(), decoder_input_ids=tokens(5))
    torch.testing.assert_close(ours, stock, **CLOSE)


def test_a_mask_of_the_users_own_stays_a_tensor():
    allowed = torch.rand(2, 1, LENGTH, LENGTH) > 0.4
    allowed |= torch.eye(LENGTH, dtype=torch.bool)
    added = torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~allowed, torch.finfo(torch.float32).min)
    model, ids = decoder("llama"), tokens()
    with torch.inference_mode():
        stock = model(ids, attention_mask=added).logits
        model.set_attn_implementation(adapter.NAME)
        for mask in (added, allowed):
            torch.testing.assert_close(model(ids, attention_mask=mask).logits, stock, **CLOSE)
