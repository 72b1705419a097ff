"""The property: a simulated kernel of any architecture gives what the oracle says, whatever is drawn for it."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests import random_calls
from tests.cases import Case
from tests.drawn import drawn
from tests.random_calls import Drawn, draw, wrong
from warpattn.problem.backends import LIMITS

pytestmark = pytest.mark.slow

SEEDS = 60
KEPT = [*((arch, 7) for arch in LIMITS), ("gfx942", 33), ("sm90", 3)]  # no row sees a key of a page; ragged over pages
CASES = drawn(((arch, seed) for arch in LIMITS for seed in range(SEEDS)), KEPT)


@pytest.mark.parametrize(("arch", "seed"), CASES)
def test_a_random_call(arch, seed):
    call = draw(arch, seed)
    found = wrong(arch, call)
    assert not found, f"{found}: {call.how}, {call.case.name}"


def test_draws_repeat_and_differ():
    calls = [draw("sm90", seed) for seed in range(40)]
    assert calls == [draw("sm90", seed) for seed in range(40)]
    assert len({call.case.mask for call in calls}) > 15
    assert {call.case.kind for call in calls} == {"dense", "ragged", "paged", "paged-ragged"}
    assert any(call.trains for call in calls) and any(call.stored for call in calls)


def test_a_mask_that_hides_more_keys_is_seen(monkeypatch):
    attend = random_calls.attend
    narrower = lambda x, _: attend(replace(x, mask=wa.SlidingWindow(45)), "reference")  # noqa: E731
    monkeypatch.setattr(random_calls, "attend", narrower)
    case = Case(batch=1, seq_q=50, seq_k=50, dtype=torch.bfloat16, mask="causal")
    assert "error" in wrong("sm90", Drawn(case, "as drawn"))
