"""What programs written for torch and flash-attn pass: causal biases, autocast, other head counts, pages by index."""

import functools

import pytest
import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import warpattn as wa
from warpattn.integrations.flash_attn import version3, version4
from warpattn.integrations.torch_sdpa import scaled_dot_product_attention, swapped


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_a_causal_bias_is_a_causal_mask(make):
    q, k, v = normal(1, 2, 5, 16), normal(1, 2, 9, 16), normal(1, 2, 9, 16)
    wanted = functional.scaled_dot_product_attention(q, k, v, attn_mask=make(5, 9))
    with swapped():
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=make(5, 9))
    torch.testing.assert_close(found, wanted)
    with pytest.raises(wa.AttentionError, match=r"CausalBias for \(4, 9\)"):
        scaled_dot_product_attention(q, k, v, attn_mask=make(4, 9))


def test_the_dtype_of_an_autocast_region():
    q, k, v = normal(1, 2, 5, 16), normal(1, 2, 9, 16).bfloat16(), normal(1, 2, 9, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = functional.scaled_dot_product_attention(q, k, v, attn_mask=normal(5, 9) * 0)
        with swapped():
            found = functional.scaled_dot_product_attention(q, k, v, attn_mask=normal(5, 9) * 0)
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=0)


@pytest.mark.parametrize(("heads_k", "heads_v"), [(4, 2), (2, 4), (8, 1)])
def test_key_and_value_have_different_numbers_of_heads(heads_k, heads_v):
    q, k, v = normal(1, 8, 5, 16), normal(1, heads_k, 6, 16), normal(1, heads_v, 6, 8)
    wanted = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, enable_gqa=True), wanted)


@pytest.mark.parametrize("transposed", [False, True])
def test_results_are_laid_out_as_torch_does(transposed):
    q = normal(2, 6, 4, 16).transpose(1, 2) if transposed else normal(2, 4, 6, 16)
    wanted, found = functional.scaled_dot_product_attention(q, q, q), scaled_dot_product_attention(q, q, q)
    assert found.stride() == wanted.stride()
    (found.transpose(1, 2) if transposed else found).view(-1)


def test_pages_by_index_and_left_padding():
    q, pages = normal(2, 1, 2, 16), normal(8, 4, 2, 16)
    table = torch.randperm(8, dtype=torch.int32).view(4, 2)
    rows, lengths, first = (torch.tensor(x, dtype=torch.int32) for x in ([3, 1], [7, 5], [2, 1]))
    new = normal(2, 1, 2, 16)
    angles = {"rotary_cos": normal(16, 8), "rotary_sin": normal(16, 8), "rotary_seqlens": lengths - 1}
    for more in ({}, {"k": new, "v": new}, {"k": new, "v": new, **angles}):
        options = {"cache_seqlens": lengths, "cache_leftpad": first, "causal": True, **more}
        paged, dense = pages.clone(), pages[table.long()].flatten(1, 2)
        attend = functools.partial(version3.flash_attn_with_kvcache, q, cache_batch_idx=rows, **options)
        found, wanted = attend(paged, paged.clone(), page_table=table), attend(dense, dense.clone())
        torch.testing.assert_close(found, wanted)


def test_version_4_combines():
    out, lse = normal(3, 2, 5, 4, 16), normal(3, 2, 5, 4)
    wanted, wanted_lse = version3.flash_attn_combine(out, lse)
    found, found_lse = version4.flash_attn_combine(out, lse)
    assert torch.equal(found, wanted) and torch.equal(found_lse, wanted_lse)
    assert version4.flash_attn_combine(out, lse, return_lse=False)[1] is None


def test_version_4_has_scheduler_metadata():
    q, cu = normal(5, 2, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
    made = version4.get_scheduler_metadata(3, 3, 2, 2, 16, 1, cu_seqlens_q=cu)
    plain, _ = version4.flash_attn_varlen_func(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu)
    passed, _ = version4.flash_attn_varlen_func(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, scheduler_metadata=made)
    assert torch.equal(plain, passed)
    assert made.tile_count_semaphore is None
    assert isinstance(made.cu_total_m_blocks, torch.Tensor)
    with pytest.raises(wa.AttentionError, match="one of them must be given"):
        version4.get_scheduler_metadata(3, 3, 2, 2, 16, 1)


def test_a_loss_of_the_lse_alone_gives_values_a_gradient_of_zero():
    q, k, v = (normal(1, 5, 2, 16).requires_grad_() for _ in range(3))
    _, lse = version4.flash_attn_func(q, k, v, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    assert dq.any()
    assert dk.any()
    assert torch.equal(dv, torch.zeros_like(v))


def test_positions_of_a_rotation_without_angles_are_passed_by_programs():
    q, cache, at = normal(2, 1, 2, 16), normal(2, 8, 2, 16), torch.tensor([3, 5], dtype=torch.int32)
    new = normal(2, 1, 2, 16)
    attend = functools.partial(version3.flash_attn_with_kvcache, q, k=new, v=new, cache_seqlens=at)
    found, wanted = attend(cache.clone(), cache.clone(), rotary_seqlens=at // 2), attend(cache.clone(), cache.clone())
    assert torch.equal(found, wanted)
