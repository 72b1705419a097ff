"""Scores of any size on a card, whose fused instructions round otherwise than the simulator."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.large_scores import operands, wrong

pytestmark = pytest.mark.gpu

SCALES = [2.0**n for n in (-12, 0, 4, 5, 6, 7, 8, 9, 10.6, 14, 20, 40)]  # largest scores up to 2^61
DIMS = ((64, 64), (128, 128), (96, 96), (192, 128), (256, 256), (512, 512))


@pytest.mark.parametrize("mask", [None, wa.Causal()], ids=["full", "causal"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_prefill(dims, mask):
    q, k, v = (x.cuda() for x in operands(dims, (300, 700), (4, 2), torch.float16))
    for scale in SCALES:
        assert not wrong(wa.attention(q, k, v, scale=scale, mask=mask, return_lse=True), (q, k, v), scale, mask), scale


@pytest.mark.parametrize("heads", [(4, 1), (32, 1), (8, 8)], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_decode(dims, heads):
    q, k, v = (x.cuda() for x in operands(dims, (3, 3000), heads, torch.bfloat16))
    for scale in SCALES:
        found = wa.attention(q, k, v, scale=scale, mask=wa.Causal(), return_lse=True)
        assert not wrong(found, (q, k, v), scale, wa.Causal()), scale


@pytest.mark.parametrize("score", [None, wa.SoftCap(1e30)], ids=["plain", "score"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_products_of_8_bits(dim, score):
    tensors = [wa.quantize(x.cuda()) for x in operands((dim, dim), (300, 700), (4, 2), torch.float16)]
    q, k, v = (x.dequantized() for x in tensors)
    for scale in SCALES:
        found = wa.attention(*tensors, scale=scale, mask=wa.Causal(), score=score, return_lse=True)
        assert not wrong(found, (q, k, v), scale, wa.Causal(), 0.1), scale


@pytest.mark.parametrize("heads", [16, 128])
def test_latent(heads):
    q, k, _ = (x.cuda() for x in operands((576, 512), (2, 2000), (heads, 1), torch.bfloat16))
    k[..., 1:] = torch.randn_like(k[..., 1:])
    for scale in SCALES:
        found = wa.attention(q, k, k[..., :512], scale=scale, mask=wa.Causal(), return_lse=True)
        values = k[..., :512].clone()
        values[..., 0] = 0
        found[0][..., 0] = 0
        assert not wrong(found, (q, k, values), scale, wa.Causal()), scale
