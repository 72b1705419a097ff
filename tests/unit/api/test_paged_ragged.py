"""attention_paged with ragged queries by the reference: each sequence as it is alone, in any mix."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import warpattn as wa

QUERIES, KEYS = (1, 5, 0, 3, 4), (9, 5, 3, 0, 12)
TABLE = torch.tensor([[3, 8, 1], [0, 2, 99], [4, 99, 99], [99, 99, 99], [5, 9, 7]], dtype=torch.int32)


def step(dtype: torch.dtype = torch.float64):
    """(q, kv, seq) of five sequences over pages of 4 keys."""
    torch.manual_seed(0)
    pages = torch.randn(10, 4, 2, 24, dtype=dtype)
    kv = wa.PagedKV(*pages.split((16, 8), -1), TABLE, torch.tensor(KEYS, dtype=torch.int32))
    cu_q = torch.tensor([0, *torch.tensor(QUERIES).cumsum(0).tolist()], dtype=torch.int32)
    return torch.randn(sum(QUERIES), 4, 16, dtype=dtype), kv, wa.Ragged(cu_q, max_q=5)


TAILS = {
    "causal": {"mask": wa.Causal()},
    "all keys": {},
    "window, sinks": {"mask": wa.SlidingWindow(3), "sinks": torch.randn(4)},
    "scores": {"mask": wa.Causal(), "score": wa.SoftCap(2.0) | wa.ALiBi(4), "scale": 0.3},
}


@pytest.mark.parametrize("name", TAILS)
def test_each_sequence_is_as_it_is_alone(name):
    q, kv, seq = step()
    out, lse = wa.attention_paged(q, kv, seq, return_lse=True, **TAILS[name])
    assert out.shape == (13, 4, 8) and lse.shape == (4, 13)
    for b, (begin, end) in enumerate(pairwise(seq.cu_q.tolist())):
        if begin == end:
            continue
        alone = wa.PagedKV(kv.k_pages, kv.v_pages, kv.block_table[b : b + 1], kv.lengths[b : b + 1])
        wanted, wanted_lse = wa.attention_paged(q[None, begin:end], alone, return_lse=True, **TAILS[name])
        torch.testing.assert_close(out[begin:end], wanted[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(lse[:, begin:end], wanted_lse[0], rtol=0, atol=1e-12)
    assert not out[6:9].any(), "without a key 0, never NaN"


def test_gradients_and_out():
    q, kv, seq = step()
    q.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: wa.attention_paged(x, kv, seq, mask=wa.Causal()), (q,), fast_mode=True)
    out = torch.empty(4, 13, 8, dtype=q.dtype).transpose(0, 1)
    with torch.no_grad():
        assert wa.attention_paged(q, kv, seq, out=out) is out
        assert torch.equal(out, wa.attention_paged(q, kv, seq))


def test_a_batch_without_queries():
    q, kv, _ = step()
    seq = wa.Ragged(torch.zeros(6, dtype=torch.int32))
    out, lse = wa.attention_paged(q[:0], kv, seq, return_lse=True)
    assert out.shape == (0, 4, 8) and lse.shape == (4, 0)
    short = wa.PagedKV(kv.k_pages[..., :8], kv.v_pages, kv.block_table, kv.lengths)
    q = torch.randn(0, 4, 8, dtype=torch.bfloat16)
    short = wa.PagedKV(*(x.bfloat16().contiguous() for x in (short.k_pages, short.v_pages)), *short.indices().values())
    assert wa.attention_paged(q, short, seq, backend="simulate:sm90").shape == (0, 4, 8)


def test_no_offsets_break_one_rule():
    q, kv, _ = step()
    with pytest.raises(wa.AttentionError) as caught:
        wa.attention_paged(q, kv, wa.Ragged(torch.zeros(0, dtype=torch.int32)))
    assert caught.value.reasons == ("seq.cu_q has shape (0,); seq.cu_q must hold batch + 1 offsets",)
