"""Small diffusion transformers of diffusers with `swapped()`: the same picture as with torch's attention."""

from __future__ import annotations

import pytest
import torch

from warpattn.integrations import torch_sdpa

pytestmark = pytest.mark.engine

HEADS, DIM = 2, 64


def dit():
    """(model, its inputs): class-conditioned, both directions."""
    import diffusers

    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=HEADS, attention_head_dim=DIM, in_channels=4, out_channels=4, num_layers=2, sample_size=16,
        patch_size=2, num_embeds_ada_norm=10,
    )  # fmt: skip
    inputs = {"hidden_states": torch.randn(2, 4, 16, 16), "timestep": torch.tensor([3, 700])}
    return model, inputs | {"class_labels": torch.tensor([1, 7])}


def flux():
    """(model, its inputs): text and picture in one sequence, with rotary positions."""
    import diffusers

    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=HEADS, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    inputs = {"hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 8, 32)}
    inputs |= {"pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([1.0])}
    return model, inputs | {"img_ids": torch.randn(16, 3), "txt_ids": torch.randn(8, 3)}


@pytest.mark.parametrize("family", [dit, flux])
def test_the_same_result_with_our_attention(family, monkeypatch):
    torch.manual_seed(0)
    model, inputs = family()
    model.eval()
    calls = []
    attention = torch_sdpa.attention

    def noted(q, k, v, **tail):
        calls.append(q.shape)
        return attention(q, k, v, **tail)

    with torch.inference_mode():
        stock = model(**inputs).sample
        monkeypatch.setattr(torch_sdpa, "attention", noted)
        with torch_sdpa.swapped():
            ours = model(**inputs).sample
    assert len(calls) == 2, "one call a layer"
    torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-4)
