"""Gradients from the results of a forward, through kernels and through the reference."""

from __future__ import annotations

import pytest
import torch

import warpattn as wa
from tests.unit.runtime.training.gradient_double import install
from warpattn.problem import Call
from warpattn.runtime.training import captured
from warpattn.runtime.training.from_results import differentiate
from warpattn.runtime.training.gradients import Along, Saved
from warpattn.sequences import Dense


@pytest.mark.parametrize("backend", ["reference", "simulate:sm90"])
def test_captured_tensors_get_theirs_in_the_order_given(backend, monkeypatch):
    """Of two tensors that a score captured and one that it did not."""
    install(monkeypatch)
    q, k, v, dout = (torch.randn(1, 6, 2, 16).bfloat16() for _ in range(4))
    bias, slopes, other = torch.randn(6, 6), torch.rand(2), torch.rand(2, requires_grad=True)
    score = wa.Bias(bias.requires_grad_()) | wa.ALiBi(slopes.requires_grad_())
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = wa.attention(*leaves, score=score, return_lse=True, backend="reference")
    expected = torch.autograd.grad(out, [*leaves, slopes, bias], dout)
    call = Call(q, k, v, Dense(), None, score, None, None, True, None, backend)
    saved, along = Saved(q, k, v, out.detach(), lse.detach(), None), Along(dout, None)
    *found, none = differentiate(call, saved, along, (slopes, bias, other))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), atol=3e-2, rtol=3e-2)
        assert mine.abs().max() > 0.01
    assert none.shape == other.shape and not none.any()
    with pytest.raises(wa.AttentionError, match=r"dout is a torch.float32 tensor .*; it must be a torch.bfloat16"):
        differentiate(call, saved, Along(dout.float(), None))


def test_rows_that_see_no_key_have_no_part_in_the_reference():
    q, k, v, dout = (torch.randn(1, rows, 2, 16) for rows in (6, 4, 4, 6))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = wa.attention(*leaves, mask=wa.Causal(), return_lse=True)
    call = Call(q, k, v, Dense(), wa.Causal(), return_lse=True)
    found = differentiate(call, Saved(q, k, v, out.detach(), lse.detach(), None), Along(dout, None))
    for mine, expected in zip(found, torch.autograd.grad(out, leaves, dout), strict=True):
        torch.testing.assert_close(mine, expected)


def test_reads_outside_of_a_captured_tensor_have_no_gradient():
    """Neither one before the first element nor one past the last."""
    rows, columns = torch.meshgrid(torch.arange(-2, 6), torch.arange(-1, 5), indexing="ij")
    part, total = torch.randn(2, 8, 6), torch.zeros(3, 4)
    captured._add_at(total, [rows, columns], part)
    expected = torch.zeros(3, 4)
    for i in range(8):
        for j in range(6):
            if 0 <= i - 2 < 3 and 0 <= j - 1 < 4:
                expected[i - 2, j - 1] += part[:, i, j].sum()
    torch.testing.assert_close(total, expected)


def test_what_no_row_sees_reaches_no_captured_tensor(monkeypatch):
    """By torch operations: NaN in a hidden value, a slope that is infinite at a hidden key, a row whose scores are all
    -inf."""
    install(monkeypatch)
    q, k, v = (torch.randn(1, 6, 2, 16).bfloat16() for _ in range(3))
    seen, bias, factor = torch.arange(6) % 3 != 1, torch.randn(6, 6), torch.rand(6) + 0.5
    v[:, ~seen], factor[~seen], bias[2] = torch.nan, 0.0, -torch.inf
    leaves, mask = [bias.requires_grad_(), factor.requires_grad_()], wa.Materialized(seen.view(1, 1, 6))
    score = wa.Bias(bias) | wa.CustomScore(lambda s, b, h, q, k, factor: s + wa.log(factor[k]), factor=factor)
    outs = [wa.attention(q, k, v, mask=mask, score=score, backend=x) for x in ("reference", "simulate:sm90")]
    for right, mine in zip(*(torch.autograd.grad(x.float().square().sum(), leaves) for x in outs), strict=True):
        assert right.isfinite().all() and right.abs().max() > 0.1
        torch.testing.assert_close(mine, right, atol=2e-2, rtol=2e-2)
