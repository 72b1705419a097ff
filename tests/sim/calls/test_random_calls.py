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
# No row sees a key of a page, on each maker's cards.
KEPT = [("gfx942", 7), ("gfx942", 33)]
KEPT += [("sm100", 4), ("sm90", 19), ("gfx942", 43)]  # latents; products of 8 bits; scales of columns
CASES = drawn(((arch, seed) for arch in LIMITS for seed in range(SEEDS)), KEPT)
CASES += [("sm100", 30054)]  # products of 8 bits, scales of blocks of keys, hidden special values
CASES += [("sm90", 31076)]  # infinities whose weights fp16 rounds to 0


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
    assert {call.has_lse for call in calls if not call.trains} == {True, False}
    many = [draw(arch, seed) for arch in LIMITS for seed in range(SEEDS)]
    assert {len(call.stored) for call in many} == {0, 1, 2, 3}, "products of 8 bits and latents among them"
    assert {per for call in many for per in call.stored} >= {"tensor", "head", "token", 64, 128, "128 rows"}


@pytest.mark.parametrize(
    ("stored", "latent"), [((), False), ((64, "token"), False), (("head",) * 3, False), ((128,), True)]
)
def test_a_mask_that_hides_more_keys_is_seen(stored, latent, monkeypatch):
    attend = random_calls.attend
    narrower = lambda x, *_: attend(replace(x, mask=wa.SlidingWindow(45)), "reference")  # noqa: E731
    monkeypatch.setattr(random_calls, "attend", narrower)
    case = Case(batch=1, seq_q=50, seq_k=50, dim=64, dtype=torch.bfloat16, mask="causal")
    if latent:
        case = replace(case, kind="paged", heads_kv=1, dim=576, dim_v=512, lens_k=(50,), page_size=8)
    found = wrong("sm100", Drawn(case, "as drawn", stored, latent=latent))
    assert "off" in found or "error" in found
