"""Gradients of the reference against the formulas: every mask, score, sequence kind, group, sinks and LSE."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import warpattn as wa
from tests import cases
from tests.cases import MASKS, SCORES, Case
from tests.gradients import GradientsOf, captured_floats, check_gradients, gradients, weights
from tests.oracle import Inputs, plain

BASE = Case(batch=2, seq_q=21, seq_k=25, heads_q=4, heads_kv=2, dim=8, dim_v=16)


def require(inputs: Inputs) -> Inputs:
    """The same with leaves that require gradients, captured float tensors included."""
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    sinks = None if inputs.sinks is None else inputs.sinks.detach().requires_grad_()
    added = None if inputs.mask is None else inputs.mask.additive()
    for score in (inputs.score, added):
        for x in () if score is None else score.program().tensors:
            x.requires_grad_(x.is_floating_point())
    return replace(inputs, q=q, k=k, v=v, sinks=sinks)


def attend(inputs: Inputs, backend: str = "auto") -> tuple[Tensor, Tensor]:
    tail = {"mask": inputs.mask, "score": inputs.score, "sinks": inputs.sinks, "scale": inputs.scale}
    if isinstance(inputs.sequence, wa.Ragged):
        result = wa.attention_varlen(
            inputs.q, inputs.k, inputs.v, inputs.sequence, **tail, return_lse=True, backend=backend
        )
    else:
        result = wa.attention(inputs.q, inputs.k, inputs.v, **tail, return_lse=True, backend=backend)
    assert isinstance(result, tuple)
    return result


def taken(inputs: Inputs, result: tuple[Tensor, Tensor], dout: Tensor, dlse: Tensor | None) -> GradientsOf:
    """The gradients that autograd hands to the leaves."""
    out, lse = result
    captured = captured_floats(inputs, 99)
    leaves = [inputs.q, inputs.k, inputs.v, *([] if inputs.sinks is None else [inputs.sinks]), *captured]
    outputs, along = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    found = list(torch.autograd.grad(outputs, leaves, along))
    q, k, v = found[:3]
    return GradientsOf(q, k, v, None if inputs.sinks is None else found[3], tuple(found[len(leaves) - len(captured) :]))


def compare(case: Case, with_lse: bool = True) -> None:
    inputs = require(case.build())
    dout, dlse = weights(inputs)
    dlse = dlse if with_lse else None
    check_gradients(inputs, taken(inputs, attend(inputs), dout, dlse), dout, dlse)


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask):
    compare(replace(BASE, mask=mask))


@pytest.mark.parametrize("score", SCORES)
def test_scores(score):
    compare(replace(BASE, mask="causal", score=score))


MORE = [*cases.every_combination(BASE), *cases.every_head_count(replace(BASE, mask="causal", sinks=True))]
MORE += [replace(case, mask="causal", score="alibi-slopes") for case in cases.ragged(BASE)]
MORE += [replace(case, mask="window", score="softcap", sinks=True) for case in cases.ragged(BASE)]
MORE += [*cases.every_length(BASE, 16), *cases.every_layout(replace(BASE, dtype=torch.bfloat16))]
MORE += [replace(BASE, dtype=dtype, mask="documents") for dtype in (torch.float16, torch.bfloat16, torch.float64)]


@pytest.mark.parametrize("case", MORE, ids=lambda case: case.name)
def test_more(case):
    compare(case)


def test_without_the_lse():
    compare(replace(BASE, mask="causal", sinks=True), with_lse=False)


INFINITE = {
    "division": (lambda s, b, h, q, k: s / (q - k), ~wa.SlidingWindow(1, 0)),
    "logarithm": (lambda s, b, h, q, k: s + wa.log(wa.to_float(q - k)) * s, wa.Causal() & ~wa.SlidingWindow(1)),
    "captured": (lambda s, b, h, q, k, x: s + x[h] / wa.to_float(q - k), wa.Causal() & ~wa.SlidingWindow(1)),
}


@pytest.mark.parametrize("name", INFINITE)
def test_slopes_that_are_infinite_where_keys_are_hidden(name):
    fn, mask = INFINITE[name]
    score = wa.CustomScore(fn, **({"x": torch.rand(4)} if name == "captured" else {}))
    inputs = require(replace(BASE.build(), score=score, mask=mask))
    dout, dlse = weights(inputs)
    check_gradients(inputs, taken(inputs, attend(inputs), dout, dlse), dout, dlse)


def test_the_formulas_are_autograds():
    """Of the plain oracle, where every row sees a key, so that autograd has no NaN."""
    inputs = require(replace(BASE, dtype=torch.float64, mask="window", score="custom", sinks=True).build())
    dout, dlse = weights(inputs)
    mine = taken(inputs, plain(inputs, torch.float64), dout, dlse)
    truth = gradients(inputs, dout, dlse, torch.float64, captured_floats(inputs, 99))
    for name, expected in truth.named().items():
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(mine.named()[name], expected, rtol=1e-9, atol=1e-9)
