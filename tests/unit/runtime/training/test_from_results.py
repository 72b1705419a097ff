"""Gradients from the results of a forward, through kernels and through the reference."""

from __future__ import annotations

import pytest
import torch

import warpattn as wa
from tests.unit.runtime.training.gradient_double import install
from warpattn.problem import Call
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
