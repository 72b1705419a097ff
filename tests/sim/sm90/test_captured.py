"""Gradients of what a score captured, by the simulated kernel: every kind of index, without findings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn
from warpattn.scores import CustomScore, Score

ROWS, HEADS = 150, 2

def bucketed(s, b, h, q, k, t):
    return s + t[h, wa.minimum((q - k) // 40, 3)]


SCORES: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], Score]]] = {
    "bias": ((ROWS, ROWS), wa.Bias),
    "bias of heads": ((HEADS, ROWS, ROWS), wa.Bias),
    "slopes": ((HEADS,), wa.ALiBi),
    "keys": ((HEADS, ROWS), lambda t: CustomScore(lambda s, b, h, q, k, t: s + t[h, k], t=t)),
    "rows": ((HEADS, ROWS), lambda t: CustomScore(lambda s, b, h, q, k, t: s * t[h, q], t=t)),
    "distances": ((2 * ROWS,), lambda t: CustomScore(lambda s, b, h, q, k, t: s + t[q - k + 100], t=t)),  # some outside
    "buckets": ((HEADS, 4), lambda t: CustomScore(bucketed, t=t)),
}


def taken(name: str, backend: str, dtype: torch.dtype, ragged: bool) -> torch.Tensor:
    """The gradient of the captured tensor."""
    generator = torch.Generator().manual_seed(0)
    shape, score_of = SCORES[name]
    captured = torch.randn(shape, generator=generator).requires_grad_()
    q, k, v, dout = (torch.randn(1, ROWS, n, 64, generator=generator).bfloat16() for n in (HEADS, 1, 1, HEADS))
    dlse = torch.randn(1, HEADS, ROWS, generator=generator)
    keywords = {"mask": wa.Causal(), "score": score_of(captured), "backend": backend, "return_lse": True}
    if ragged:
        sequence = wa.Ragged(torch.tensor([0, 60, ROWS], dtype=torch.int32))
        out, lse = wa.attention_varlen(q[0].to(dtype), k[0].to(dtype), v[0].to(dtype), sequence, **keywords)
        dout, dlse = dout[0], dlse[0]
    else:
        out, lse = wa.attention(q.to(dtype), k.to(dtype), v.to(dtype), **keywords)
    return torch.autograd.grad((out, lse), captured, (dout.to(dtype), dlse))[0]


CASES = [*((name, False) for name in SCORES), ("rows", True)]


@pytest.mark.parametrize(("name", "ragged"), drawn(CASES, [("buckets", False), ("rows", True)]))
def test_captured_gradients(name, ragged):
    expected = taken(name, "reference", torch.float32, ragged)
    found = taken(name, "simulate:sm90", torch.bfloat16, ragged)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
