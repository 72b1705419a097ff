"""The transformers adapter: masks stay masks, and a model gives what it gives with stock attention."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.masking_utils import (  # noqa: E402
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_overlay,
)

from warpattn.check import AttentionError  # noqa: E402
from warpattn.integrations import transformers as adapter  # noqa: E402
from warpattn.masks import Causal, CustomMask, Full, Materialized, Padding  # noqa: E402

RIGHT = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.bool)
LEFT = RIGHT.flip(1)
HOLES = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)


@pytest.fixture(autouse=True, scope="module")
def _registered():
    adapter.register()


def _kept(mask, queries, keys):
    pictures = [mask.picture(queries, keys, b=b).text.splitlines() for b in range(2)]
    return torch.tensor([[[cell == "■" for cell in row] for row in rows] for rows in pictures])


@pytest.mark.parametrize("padding", [None, RIGHT, LEFT, HOLES], ids=["none", "right", "left", "holes"])
@pytest.mark.parametrize("function", [causal_mask_function, bidirectional_mask_function])
@pytest.mark.parametrize("queries", [5, 2])
def test_masks_by_formula_show_what_transformers_shows(function, padding, queries):
    sizes = {"batch_size": 2, "q_length": queries, "kv_length": 5, "q_offset": 5 - queries}
    mask = adapter.build_mask(**sizes, mask_function=function, attention_mask=padding)
    theirs = sdpa_mask(**sizes, mask_function=function, attention_mask=padding, allow_is_causal_skip=False)
    assert not isinstance(mask, Materialized)
    assert torch.equal(_kept(mask, queries, 5), theirs[:, 0].expand(2, -1, -1))


def test_padding_behind_the_tokens_is_lengths_and_other_padding_is_not():
    assert isinstance(adapter._padding(RIGHT), Padding)
    assert isinstance(adapter._padding(LEFT), CustomMask)


@pytest.mark.parametrize(
    ("function", "keys"),
    [(and_masks(causal_mask_function, sliding_window_overlay(2)), 5), (causal_mask_function, 8)],
    ids=["private function", "static cache"],
)
def test_what_has_no_formula_is_materialized(function, keys):
    mask = adapter.build_mask(2, 5, keys, mask_function=function)
    theirs = sdpa_mask(2, 5, keys, mask_function=function, allow_is_causal_skip=False)
    assert isinstance(mask, Materialized)
    assert torch.equal(mask.mask, theirs)


def test_no_mask_means_what_the_module_says():
    module = torch.nn.Module()
    assert isinstance(adapter._as_mask(module, None, None), Causal)
    module.is_causal = False
    assert isinstance(adapter._as_mask(module, None, None), Full)
    assert isinstance(adapter._as_mask(module, None, True), Causal)


@pytest.mark.parametrize("option", [{"dropout": 0.1}, {"position_bias": torch.zeros(1)}])
def test_what_would_change_the_result_is_refused(option):
    x = torch.randn(1, 1, 2, 8)
    with pytest.raises(AttentionError, match=next(iter(option))):
        adapter.attend(torch.nn.Module(), x, x, x, None, **option)


def _both(config, **inputs):
    """Outputs of one small random model with stock attention and with warpattn."""
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        stock = model(**inputs).last_hidden_state
        model.set_attn_implementation(adapter.NAME)
        return stock, model(**inputs).last_hidden_state


@pytest.mark.parametrize("padding", [RIGHT, LEFT], ids=["right", "left"])
def test_bert(padding):
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    stock, ours = _both(config, input_ids=torch.randint(50, (2, 5)), attention_mask=padding.long())
    torch.testing.assert_close(ours[padding], stock[padding], atol=2e-6, rtol=1e-5)


def test_a_causal_model_with_grouped_heads():
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
    )
    stock, ours = _both(config, input_ids=torch.randint(50, (2, 5)), attention_mask=RIGHT.long())
    torch.testing.assert_close(ours[RIGHT], stock[RIGHT], atol=2e-6, rtol=1e-5)


def test_a_model_with_sinks_and_windows():
    config = transformers.GptOssConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=3,
    )
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    for layer in model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    ids = torch.randint(50, (2, 9))
    with torch.inference_mode():
        stock = model(input_ids=ids).last_hidden_state
        model.set_attn_implementation(adapter.NAME)
        ours = model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(ours, stock, atol=2e-6, rtol=1e-5)
