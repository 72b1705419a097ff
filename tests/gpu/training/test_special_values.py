"""What is not finite in keys and values reaches the gradients of what sees it and no others, on a card."""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.sim.backward import tolerances
from tests.sim.special_gradients import NAMES, SPOILS, expected, unlike
from tests.sim.test_special_gradients import CASES, WIDE

pytestmark = pytest.mark.gpu
DENSE = [name for name in WIDE if "ragged" not in name]
NAMED = ["window", "window, 96", "window, 128", "causal", "causal, 128", "holes", *DENSE]


@cache
def allowed_of(name: str) -> dict[str, float]:
    """The largest error for each gradient: of a few thousand numbers one draw's largest is chance, so of four draws."""
    case = (CASES | WIDE)[name]
    drawn = [case.inputs(number) for number in range(4)]
    of_each = [tolerances(case, clean, expected(case, clean)) for clean in drawn]
    return {name: max(allowed[name] for allowed in of_each) for name in NAMES}


@pytest.mark.parametrize("how", SPOILS)
@pytest.mark.parametrize("name", NAMED)
def test_what_is_not_finite_reaches_what_sees_it_alone(name, how):
    case = (CASES | WIDE)[name]
    x = case.inputs()
    SPOILS[how](case, x)
    q, k, v = (x[key].cuda().requires_grad_() for key in "qkv")
    found = torch.autograd.grad(wa.attention(q, k, v, mask=case.mask), (q, k, v), x["dout"].cuda())
    allowed, right = allowed_of(name), expected(case, x)
    wrong = [unlike(n, dx.cpu(), right[n], allowed[n]) for n, dx in zip(NAMES, found, strict=True)]
    assert not any(wrong), wrong
