"""`qv`: the absorbed query of latent attention, by flash-attn 3's and 4's functions."""

import pytest
import torch

import warpattn as wa
from warpattn.integrations.flash_attn import version3, version4


def truth(q, qv, k, v):
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    q, qv = q.transpose(1, 2), qv.transpose(1, 2)
    scores = (q @ k.mT + qv @ v.mT) * (q.shape[-1] + qv.shape[-1]) ** -0.5
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("one_buffer", [False, True])
def test_the_absorbed_query(one_buffer):
    q, qv, buffer = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 24), torch.randn(2, 9, 1, 32)
    v, k = buffer[..., :24], buffer[..., 24:]
    k = k if one_buffer else k.clone()
    expected = truth(q, qv, k, v)
    torch.testing.assert_close(version3.flash_attn_func(q, k, v, qv=qv), expected)
    torch.testing.assert_close(version4.flash_attn_func(q, k, v, qv)[0], expected)
    lengths = torch.tensor([9, 9], dtype=torch.int32)
    found = version3.flash_attn_with_kvcache(q, k, v, qv=qv, cache_seqlens=lengths)
    torch.testing.assert_close(found, expected)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 6], [0, 9, 18]))
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    found = version3.flash_attn_varlen_func(*rows, cu_q, cu_k, 3, 9, qv=qv.flatten(0, 1))
    torch.testing.assert_close(found, expected.flatten(0, 1))
    found, _ = version4.flash_attn_varlen_func(*rows, qv.flatten(0, 1), cu_q, cu_k, 3, 9)
    torch.testing.assert_close(found, expected.flatten(0, 1))


def test_the_absorbed_query_over_pages():
    q, qv, buffer = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 24), torch.randn(2, 8, 1, 32)
    pages, table = buffer.view(4, 4, 1, 32).flip(0), torch.tensor([[3, 2], [1, 0]], dtype=torch.int32)
    lengths = torch.tensor([8, 8], dtype=torch.int32)
    found, _ = version4.flash_attn_varlen_func(
        q, pages[..., 24:], pages[..., :24], qv, page_table=table, seqused_k=lengths
    )
    torch.testing.assert_close(found, truth(q, qv, buffer[..., 24:], buffer[..., :24]))


def test_the_absorbed_query_alone():
    qv, v = torch.randn(2, 3, 4, 24), torch.randn(2, 9, 1, 24)
    found, _ = version4.flash_attn_func(None, None, v, qv)
    torch.testing.assert_close(found, version4.flash_attn_func(qv, v, v)[0])
    found, _ = version4.flash_attn_varlen_func(None, None, v, qv)
    torch.testing.assert_close(found, version4.flash_attn_func(qv, v, v)[0])


def test_the_absorbed_query_has_a_gradient():
    q, qv, k, v = (torch.randn(1, 5, 2, d, dtype=torch.float64, requires_grad=True) for d in (8, 16, 8, 16))
    found = torch.autograd.grad(version4.flash_attn_func(q, k, v, qv)[0].square().sum(), (q, qv, k, v))
    expected = torch.autograd.grad(truth(q, qv, k, v).square().sum(), (q, qv, k, v))
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right)


X = torch.ones(1, 3, 2, 8)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"qv": 3}, "^qv is 3; with qv it must be a tensor"),
        ({"q": None}, "^q is None; with qv it must be a tensor"),
        ({"qv": X.half()}, "^q is torch.float32 on cpu|^qv is torch.float16 on cpu; with qv it must be like v"),
        ({"qv": X.to("meta")}, "^qv is "),
        ({"k": X[:, :2]}, "^k has shape .1, 2, 2, 8.; with qv it must be that of v but for the head dim"),
    ],
)
@pytest.mark.parametrize("module", [version3, version4])
def test_an_absorbed_query_that_does_not_fit(module, changed, words):
    with pytest.raises(wa.AttentionError, match=words):
        module.flash_attn_func(**({"q": X, "k": X, "v": X, "qv": X} | changed))


def test_a_query_of_another_shape():
    x = torch.randn(1, 3, 2, 8)
    with pytest.raises(wa.AttentionError, match=r"qv has shape \(1, 3, 2, 4\)"):
        version3.flash_attn_func(x, x, x, qv=x[..., :4])
