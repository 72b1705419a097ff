"""Where flash-attn 4's functions return the LSE without `return_lse`, and how it is laid out."""

import pytest
import torch

from warpattn.integrations.flash_attn import version4

B, H, D = 2, 4, 16


@pytest.mark.parametrize("trained", ["q", "k", "v", "learnable_sink"])
def test_version_4_returns_the_lse_where_a_gradient_may_be_wanted(trained):
    given = {"q": torch.randn(B, 7, H, D), "k": torch.randn(B, 11, 2, D), "v": torch.randn(B, 11, 2, D)}
    given["learnable_sink"] = torch.randn(H)
    assert version4.flash_attn_func(**given)[1] is None
    given[trained].requires_grad_()
    packed = given | {name: given[name].flatten(0, 1) for name in "qkv"}
    starts = {f"cu_seqlens_{name}": torch.arange(B + 1, dtype=torch.int32) * given[name].shape[1] for name in "qk"}
    _, lse = version4.flash_attn_func(**given)
    _, packed_lse = version4.flash_attn_varlen_func(**packed, **starts)
    torch.testing.assert_close(lse.transpose(0, 1).flatten(1), packed_lse)


@pytest.mark.parametrize("pages", [False, True])
def test_the_lse_of_a_batch_beside_packed_keys_is_contiguous(pages):
    q, k = torch.randn(B, 7, H, D), torch.randn(B, 8, 2, D)
    used = torch.tensor([8, 5], dtype=torch.int32)
    table = {"page_table": torch.arange(B, dtype=torch.int32)[:, None]} if pages else {}
    _, lse = version4.flash_attn_varlen_func(q, k, k, seqused_k=used, return_lse=True, **table)
    assert lse.shape == (B, H, 7)
    assert lse.is_contiguous()
