"""The oracle itself: it must pass what is right and refuse what only looks right."""

from __future__ import annotations

import pytest
import torch

from tests import cases, oracle
from tests.cases import Case
from warpattn.api import attention

CASES = cases.kernel_cases(64, torch.bfloat16)


def wrong(out: torch.Tensor) -> dict[str, torch.Tensor]:
    """Ways to be wrong."""
    one = torch.zeros_like(out)
    one[0, -1, 0, 0] = 1.0
    return {
        "zeros": out * 0,
        "unwritten": oracle.poisoned(tuple(out.shape), out.dtype),
        "one NaN": out.masked_fill(one == 1, torch.nan),
        "one row of zeros": out.masked_fill(one.amax(-1, keepdim=True) == 1, 0.0),
        "one infinity": out.masked_fill(one == 1, torch.inf),
        "one element": out + one * out.abs().max() / 8,
        "scaled": out * 1.1,
        "rows shifted": out.roll(1, 1),
        "heads swapped": out.flip(2),
        "narrower": out[..., :-1],
    }


@pytest.mark.parametrize("how", list(wrong(torch.zeros(1, 1, 1, 1))))
def test_wrong_results_are_refused(how):
    inputs = Case(seq_q=80, seq_k=80, dim=64, dtype=torch.bfloat16, mask="causal", score="softcap").build()
    out = attention(inputs.q, inputs.k, inputs.v, mask=inputs.mask, score=inputs.score)
    oracle.check(inputs, out)
    with pytest.raises(AssertionError):
        oracle.check(inputs, wrong(out)[how])


def test_a_wrong_lse_is_refused():
    inputs = Case(mask="dense-mask", dtype=torch.bfloat16).build()
    out, lse = attention(inputs.q, inputs.k, inputs.v, mask=inputs.mask, return_lse=True)
    oracle.check(inputs, out, lse)
    for bad in (lse / 0.6931, lse + 0.01, lse.nan_to_num(neginf=0.0), lse.roll(1, -1), lse.transpose(1, 2)):
        with pytest.raises(AssertionError):
            oracle.check(inputs, out, bad)


def test_hidden_rows_must_be_zero():
    inputs = Case(mask="dense-mask", dtype=torch.bfloat16).build()
    out = attention(inputs.q, inputs.k, inputs.v, mask=inputs.mask)
    hidden = out.clone()
    hidden[:, 0] = 1e-6
    with pytest.raises(AssertionError):
        oracle.check(inputs, hidden)


def test_names_are_unique_and_builds_repeat():
    assert len({case.name for case in CASES}) == len(CASES)
    first, again = (Case(mask="causal", score="bias", dtype=torch.float16).build() for _ in range(2))
    assert torch.equal(first.q, again.q) and torch.equal(first.score.bias, again.score.bias)


def test_kernel_cases_hold_on_the_cpu():
    for case in CASES[::5]:
        inputs = case.build()
        out = oracle.poisoned((*inputs.q.shape[:-1], inputs.v.shape[-1]), case.dtype)
        tail = {"mask": inputs.mask, "score": inputs.score, "sinks": inputs.sinks, "scale": inputs.scale}
        _, lse = attention(inputs.q, inputs.k, inputs.v, out=out, return_lse=True, **tail)
        oracle.check(inputs, out, lse)
