"""`qv`: the absorbed query of latent attention, by flash-attn 3's functions."""

import pytest
import torch

import warpattn as wa
from warpattn.integrations.flash_attn import version3


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
    torch.testing.assert_close(version3.flash_attn_func(q, k, v, qv=qv), truth(q, qv, k, v))
    lengths = torch.tensor([9, 9], dtype=torch.int32)
    found = version3.flash_attn_with_kvcache(q, k, v, qv=qv, cache_seqlens=lengths)
    torch.testing.assert_close(found, truth(q, qv, k, v))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 6], [0, 9, 18]))
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    found = version3.flash_attn_varlen_func(*rows, cu_q, cu_k, 3, 9, qv=qv.flatten(0, 1))
    torch.testing.assert_close(found, truth(q, qv, k, v).flatten(0, 1))


def test_a_query_of_another_shape():
    x = torch.randn(1, 3, 2, 8)
    with pytest.raises(wa.AttentionError, match=r"qv has shape \(1, 3, 2, 4\)"):
        version3.flash_attn_func(x, x, x, qv=x[..., :4])
