"""flash-attn's functions, torch's operators and FlexAttention's functions on a card, against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import attention as registry
from torch.nn import functional as F

import warpattn as wa
from tests.oracle import Inputs, check
from warpattn.integrations import flash_attn, torch_sdpa
from warpattn.integrations.flex import flex_attention, mask_of, score_of

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
B, H, HKV, D = 2, 8, 2, 64


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE, dtype=torch.int32)


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


SLOPES = (0.5, 0.25, 0.125, 0.0625, 0.03, 0.02, 0.01, 0.005)
COMPOSED = {
    "sine": lambda s: torch.sin(s * 3.0),
    "cosine, erf": lambda s: torch.cos(s) + torch.erf(s),
    "rounding": lambda s: torch.round(s * 4.0) * 0.25 + torch.frac(s) + torch.fmod(s, 0.7),
    "gelu": lambda s: F.gelu(s) + F.softplus(s),
    "powers": lambda s: (torch.abs(s) + 0.1) ** 0.3 + torch.logaddexp(s, 2.0 * s),
    "sigmoid, relu": lambda s: torch.special.expit(s * 40.0) + F.relu(s) + F.silu(s),
}
OPTIONS = {
    "nothing": ({}, {}),
    "causal": ({"causal": True}, {"mask": wa.Causal()}),
    "window": ({"window_size": (100, 30)}, {"mask": wa.SlidingWindow(101, 30)}),
    "causal window": ({"causal": True, "window_size": (64, 0)}, {"mask": wa.SlidingWindow(65)}),
    "soft cap": ({"softcap": 2.0}, {"score": wa.SoftCap(2.0), "soft_cap": True}),
    "scale": ({"softmax_scale": 0.2}, {"scale": 0.2}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("given", "meaning"), OPTIONS.values(), ids=OPTIONS)
def test_dense_attention_of_every_version(given, meaning, dtype):
    q, k, v = (normal(B, n, h, D, dtype=dtype) for n, h in ((300, H), (517, HKV), (517, HKV)))
    for version in (2, 3, 4):
        flash_attn.install(version)
    try:
        import flash_attn as two
        import flash_attn.cute as four
        import flash_attn_interface as three

        results = [
            two.flash_attn_func(q, k, v, return_attn_probs=True, **given)[:2],
            three.flash_attn_func(q, k, v, return_attn_probs=True, **given),
            four.flash_attn_func(q, k, v, return_lse=True, **given),
        ]
    finally:
        flash_attn.uninstall()
    for out, lse in results:
        check(Inputs(q, k, v, **meaning), out, lse)


def test_alibi_and_sinks():
    from warpattn.integrations.flash_attn import version2, version4

    q, k, v = (normal(B, n, h, D) for n, h in ((300, H), (517, HKV), (517, HKV)))
    slopes = torch.tensor(SLOPES, device=DEVICE)
    out, lse, _ = version2.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, return_attn_probs=True)
    check(Inputs(q, k, v, mask=wa.Causal(), score=wa.ALiBi(slopes)), out, lse)
    sinks = normal(H)
    out, lse = version4.flash_attn_func(q, k, v, causal=True, learnable_sink=sinks, return_lse=True)
    check(Inputs(q, k, v, mask=wa.Causal(), sinks=sinks), out, lse)


def test_ragged_attention():
    from warpattn.integrations.flash_attn import version2, version3

    cu_q, cu_k = ints(0, 100, 100, 333, 400), ints(0, 250, 300, 333, 700)
    q, k, v = normal(400, H, D), normal(700, HKV, D), normal(700, HKV, D)
    out, lse, _ = version2.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 233, 367, causal=True, return_attn_probs=True
    )  # fmt: skip
    check(Inputs(q, k, v, wa.Ragged(cu_q, cu_k), mask=wa.Causal()), out, lse)
    used = ints(200, 0, 33, 367)
    out = version3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 233, 367, seqused_k=used, causal=True)
    rows = torch.cat([torch.arange(a, a + n) for a, n in zip((0, 250, 300, 333), used.tolist(), strict=True)])
    ends = ints(0, *used.cumsum(0).tolist())
    inputs = Inputs(q, k[rows.to(DEVICE)], v[rows.to(DEVICE)], wa.Ragged(cu_q, ends), mask=wa.Causal())
    check(inputs, out)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("page", [0, 16], ids=["one tensor", "pages"])
def test_a_cache_that_grows(tokens, page):
    """Steps of decoding: the cache in place, rotary embedding, window; the CPU's reference does the same beside it."""
    from warpattn.integrations.flash_attn import version2

    capacity, steps = 320, 3
    lengths = ints(250, 7, 64)
    shape = (3 * capacity // page, page, HKV, D) if page else (3, capacity, HKV, D)
    caches = normal(*shape), normal(*shape)
    table = torch.randperm(shape[0], device=DEVICE).to(torch.int32).view(3, -1) if page else None
    angle = torch.rand(capacity, D // 4)
    cos, sin = (x.to(DEVICE, torch.bfloat16) for x in (angle.cos(), angle.sin()))
    on_cpu = [x.cpu() for x in caches]
    for step in range(steps):
        q, k, v = normal(3, tokens, H, D), normal(3, tokens, HKV, D), normal(3, tokens, HKV, D)
        at = lengths + step * tokens
        options = {"causal": True, "window_size": (100, 0)}
        out = version2.flash_attn_with_kvcache(
            q, *caches, k, v, cos, sin, cache_seqlens=at, block_table=table, **options
        )  # fmt: skip
        expected = version2.flash_attn_with_kvcache(
            q.cpu(), *on_cpu, k.cpu(), v.cpu(), cos.cpu(), sin.cpu(), cache_seqlens=at.cpu(),
            block_table=None if table is None else table.cpu(), **options,
        )  # fmt: skip
        assert (out != 0).any()
        torch.testing.assert_close(out.cpu(), expected, atol=2e-2, rtol=2e-2)
    for mine, theirs in zip(caches, on_cpu, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, atol=2e-2, rtol=2e-2)


def test_gradients_of_flash_attn_and_of_torchs_registry():
    from warpattn.integrations.flash_attn import version2

    tensors = [normal(2, 100, heads, D).requires_grad_() for heads in (4, 2, 2)]
    on_cpu = [x.detach().cpu().float().requires_grad_() for x in tensors]
    expected = torch.autograd.grad(wa.attention(*on_cpu, mask=wa.Causal()).square().sum(), on_cpu)
    found = [torch.autograd.grad(version2.flash_attn_func(*tensors, causal=True).float().square().sum(), tensors)]
    torch_sdpa.register()
    registry.activate_flash_attention_impl("warpattn")
    try:
        with registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(*heads_first(*tensors), is_causal=True, enable_gqa=True)
        found.append(torch.autograd.grad(out.float().square().sum(), tensors))
    finally:
        registry.restore_flash_attention_impl()
    for gradients in found:
        for mine, theirs in zip(gradients, expected, strict=True):
            assert (mine.cpu().float() - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize("is_causal", [False, True])
def test_torchs_registry(is_causal):
    q, k, v = (normal(B, 300, H, D) for _ in range(3))
    torch_sdpa.register()
    registry.activate_flash_attention_impl("warpattn")
    try:
        with torch.no_grad(), registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(*heads_first(q, k, v), is_causal=is_causal).transpose(1, 2)
            cu = ints(0, 200, 600)
            flat = [x.flatten(0, 1) for x in (q, k, v)]
            from torch.nn.attention.varlen import varlen_attn

            ragged = varlen_attn(*flat, cu, cu, 400, 400, window_size=(-1, 0) if is_causal else (-1, -1))
    finally:
        registry.restore_flash_attention_impl()
    mask = wa.Causal() if is_causal else None
    own, _ = wa.attention(q, k, v, mask=mask, return_lse=True)  # as torch's operators do
    assert torch.equal(out, own), "the same kernel has the same bits"
    check(Inputs(q, k, v, mask=mask), out)
    check(Inputs(*flat, wa.Ragged(cu, cu), mask=mask), ragged)


def test_swapped_in():
    layer = torch.nn.MultiheadAttention(256, 4, batch_first=True, device=DEVICE, dtype=torch.float16)
    x = normal(2, 100, 256, dtype=torch.float16)
    mask = torch.rand(100, 100, device=DEVICE) > 0.2  # of this layer: True is hidden
    mask.fill_diagonal_(False)
    with torch.no_grad():
        expected = layer(x, x, x, need_weights=False, attn_mask=mask)[0]
        with torch_sdpa.swapped():
            out = layer(x, x, x, need_weights=False, attn_mask=mask)[0]
    torch.testing.assert_close(out, expected, atol=5e-3, rtol=5e-3)


def test_jagged_tensors():
    starts = torch.tensor([0, 100, 333, 400], device=DEVICE)
    values = [normal(400, H, D) for _ in range(3)]
    nested = [torch.nested.nested_tensor_from_jagged(x, starts).transpose(1, 2) for x in values]
    out = torch_sdpa.scaled_dot_product_attention(*nested, is_causal=True)
    cu = starts.to(torch.int32)
    check(Inputs(*values, wa.Ragged(cu, cu), mask=wa.Causal()), out.transpose(1, 2).values())


@pytest.mark.parametrize("name", ["documents", "window", "table"])
def test_functions_for_flex_attention(name):
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    size = 500
    document = torch.arange(size, device=DEVICE) // 170
    table, cap = torch.randn(H, 2 * size, device=DEVICE), torch.tensor(20.0, device=DEVICE)

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    mask_mod = {
        "documents": and_masks(causal, lambda b, h, q, k: document[q] == document[k]),
        "window": lambda b, h, q, k: (q - k).abs() < 40 * (h + 1),
        "table": causal,
    }[name]

    def score_mod(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh((score + table[h, q_idx - kv_idx - 1]) / cap)

    q, k, v = (normal(B, size, h, D) for h in (H, HKV, HKV))
    blocks = create_block_mask(mask_mod, None, H, size, size, device=DEVICE)
    score = score_mod if name == "table" else None
    with torch.no_grad():
        out = flex_attention(*heads_first(q, k, v), score_mod=score, block_mask=blocks, enable_gqa=True)
    inputs = Inputs(
        q, k, v, mask=mask_of(blocks), score=None if score is None else score_of(score), soft_cap=score is not None
    )
    check(inputs, out.transpose(1, 2))


@pytest.mark.parametrize("name", COMPOSED)
def test_functions_that_the_language_composes(name):
    """Values and gradients beside the same torch functions of a score matrix."""
    size, function = 200, COMPOSED[name]
    q, k, v = (normal(B, H, size, D).requires_grad_() for _ in range(3))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = flex_attention(q, k, v, score_mod=lambda s, b, h, q_idx, kv_idx: function(s))
    expected = function(wide[0] @ wide[1].mT * D**-0.5).softmax(-1) @ wide[2]
    dout = normal(B, H, size, D)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)
    for ours, exact in zip(gradients, torch.autograd.grad(expected, wide, dout.double()), strict=True):
        assert (ours - exact).norm() < 1e-2 * exact.norm()
