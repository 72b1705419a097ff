"""`backend="simulate:sm90"` and the others give gradients on CPU tensors: kernels as autograd calls them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

import warpattn as wa
from tests.cases import Case
from tests.drawn import drawn
from tests.gradients import check_gradients, weights
from tests.oracle import visible
from tests.unit.api.test_gradients import attend, require, taken

pytest.importorskip("triton")

BASE = Case(batch=1, seq_q=70, seq_k=140, heads_q=2, heads_kv=1, dim=64, dtype=torch.bfloat16, mask="causal")
CASES = [
    replace(BASE, score="alibi-slopes", sinks=True),
    replace(BASE, dim=40, mask="window", score="softcap", layout="sliced", dtype=torch.float16),
    replace(BASE, kind="ragged", batch=3, lens_q=(30, 0, 70), lens_k=(40, 9, 70), score="alibi-slopes", sinks=True),
]
ARCHS = ["sm90", "sm100", "gfx942", "gfx950"]
WIDE = replace(BASE, dim=192, dim_v=128, mask="window", score="softcap", sinks=True)
PAIRS = [*product(ARCHS, CASES), ("sm90", WIDE), ("sm100", WIDE)]
DRAWN = [("gfx942", CASES[2]), ("gfx950", CASES[1])]


@pytest.mark.parametrize(("arch", "case"), drawn(PAIRS, DRAWN), ids=lambda x: getattr(x, "name", x))
def test_gradients(case, arch):
    inputs = require(case.build())
    dout, dlse = weights(inputs)
    check_gradients(inputs, taken(inputs, attend(inputs, f"simulate:{arch}"), dout, dlse), dout, dlse)


DOCUMENTS = replace(BASE, score="custom", mask="documents")
SLOPES = replace(BASE, score="alibi-slopes", mask="window")  # slopes by a kernel of their own
ADDED = replace(BASE, seq_q=2, mask="causal-added")  # its gradient by torch operations
SPOILED = [*((arch, DOCUMENTS) for arch in ARCHS), ("sm90", SLOPES), ("sm100", SLOPES), ("gfx942", ADDED)]
KEPT = [("gfx950", DOCUMENTS), ("gfx942", ADDED)]  # others are in the tests of their backwards


@pytest.mark.parametrize(("arch", "case"), drawn(SPOILED, KEPT), ids=lambda x: getattr(x, "name", x))
def test_hidden_keys_and_values_reach_no_gradient(arch, case):
    inputs = require(case.build())
    dark = ~visible(inputs, 0, range(case.seq_q), case.seq_q, case.seq_k).flatten(0, 1).any(0)
    assert dark.any()
    k, v = inputs.k.detach().clone(), inputs.v.detach().clone()
    k[:, dark], v[:, dark] = torch.nan, torch.inf
    spoiled = replace(inputs, k=k.requires_grad_(), v=v.requires_grad_())
    dout, dlse = weights(inputs)
    check_gradients(inputs, taken(spoiled, attend(spoiled, f"simulate:{arch}"), dout, dlse), dout, dlse)


@pytest.mark.parametrize("arch", drawn(ARCHS, ["gfx942"]))
def test_a_score_of_each_sequence(arch):
    """A CTA goes from the key tiles of one sequence to those of the next one."""
    q, k, v = (torch.randn(2, n, 2, 64).bfloat16() for n in (17, 140, 140))
    bias, dout, found = 5 * torch.randn(2, 2, 17, 140), torch.randn(2, 17, 2, 64).bfloat16(), []
    for backend in (f"simulate:{arch}", "reference"):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        wa.attention(*given, score=wa.Bias(bias), backend=backend).backward(dout)
        found.append([x.grad.float() for x in given])
    for gradient, expected in zip(*found, strict=True):
        torch.testing.assert_close(gradient, expected, atol=0.1, rtol=0.05)


def test_a_module_that_is_trained():
    """Views of one projection, a loss of the output alone, and gradients that reach the weight."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 3 * 64).bfloat16()
    x = torch.randn(1, 50, 64).bfloat16()
    found = []
    for backend in ("simulate:sm90", "reference"):
        linear.zero_grad()
        q, k, v = linear(x).unflatten(-1, (3, 1, 64)).unbind(2)
        wa.attention(q, k, v, mask=wa.Causal(), backend=backend).float().square().sum().backward()
        assert linear.weight.grad is not None
        found.append(linear.weight.grad.float())
    assert (found[0] - found[1]).norm() < 0.02 * found[1].norm()


def test_what_has_no_gradient_yet_is_one_error():
    for arch, most in (("gfx942", 128), ("sm100", 256)):
        q = torch.randn(1, 8, 1, most + 8).bfloat16().requires_grad_()
        rule = f"q, k and v require gradients; the backward of the {arch} backend takes head dims up to {most}"
        with pytest.raises(wa.AttentionError, match=rule):
            wa.attention(q, q, q, backend=f"simulate:{arch}")


@pytest.mark.parametrize(
    ("arch", "dim", "dtype"),
    drawn(
        [*((arch, 64, torch.bfloat16) for arch in ARCHS), ("sm90", 128, torch.float16)],
        [("sm90", 64, torch.bfloat16), ("sm100", 64, torch.bfloat16)],
    ),
    ids=str,
)
def test_a_head_that_copies_a_token(arch, dim, dtype):
    """One key has nearly all of a row's weight, in the first key tile or another, and dout is along the output: then dq
    is a small difference, and had up to 3.9 times the error of torch's when the weight of that key was rounded."""
    torch.manual_seed(0)
    k = 8 * torch.nn.functional.normalize(torch.randn(1, 384, 1, dim), dim=-1)
    q = (dim / 64) ** 0.5 * k.roll(127, 1) + 0.3 * torch.randn(1, 384, 1, dim)
    x = [y.to(dtype).requires_grad_() for y in (q, k, torch.randn(1, 384, 1, dim))]
    exact = [y.detach().double().requires_grad_() for y in x]
    out = wa.attention(*exact, mask=wa.Causal(), backend="reference")
    dout = (4 * out.detach() + torch.randn_like(out)).to(dtype)
    (right,) = torch.autograd.grad(out, exact[:1], dout.double())
    (mine,) = torch.autograd.grad(wa.attention(*x, mask=wa.Causal(), backend=f"simulate:{arch}"), x[:1], dout)
    rows = torch.nn.functional.scaled_dot_product_attention(*(y.transpose(1, 2) for y in x), is_causal=True)
    (theirs,) = torch.autograd.grad(rows, x[:1], dout.transpose(1, 2))
    assert (mine.double() - right).norm() <= 1.5 * (theirs.double() - right).norm()
