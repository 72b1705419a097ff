"""Decode of latent attention on Hopper in the simulator: right values, no findings, the public calls, knock-outs."""

from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn, in_turn
from tests.sim.knocking import knocked_out
from tests.sim.sm90.mla import DIM_V, SCALE, Latent, reason, run, tensors
from tests.sim.sm90.prefill import error
from warpattn.masks import Causal, CustomMask, SlidingWindow
from warpattn.scores import SoftCap
from warpattn.sim import Report

SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), ("random", 0), ("random", 1)]
MIXED = (130, 0, 64, 5, 200)

CASES = {
    "dense": Latent((130, 130)),
    "mixed-causal-4": Latent(MIXED, page=64, tokens=4, mask=Causal()),
    "group-128": Latent((130, 3), page=64, heads=128),
    "group-128-causal-2": Latent((100, 40), page=16, heads=128, tokens=2, mask=Causal()),
    "window-sinks": Latent((300, 40), page=16, tokens=2, mask=SlidingWindow(70), sinks=True),
    "soft-cap-fp16": Latent((130, 70), page=64, score=SoftCap(3.0), dtype=torch.float16),
    "a-tile-or-two": Latent((33, 3, 32), page=64, heads=40),
    "gathered": Latent((130, 5), page=3, tokens=2, mask=Causal()),
    "invariant": Latent((300, 70), page=64, invariant=True, config=(("schedule.unit", 1),)),
}


def check(case: Latent, programs: int = 3, **options: object):
    """Run a case; right and without findings."""
    ran = run(case, programs, **options)
    assert ran.report.clean, ran.report
    assert ran.out_error < (2e-2 if case.dtype == torch.bfloat16 else 3e-3)
    assert ran.lse_error < 1e-4
    return ran


DRAWN = ("mixed-causal-4",)


@pytest.mark.parametrize(("name", "schedule", "seed"), in_turn(CASES, DRAWN, SCHEDULES, each=5))
def test_right_and_without_findings(name, schedule, seed):
    check(CASES[name], schedule=schedule, seed=seed)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 65, 1000])
@pytest.mark.parametrize("page", drawn([0, 64], [64]))
def test_lengths(page, length):
    check(Latent((length,), page=page), 4)


@pytest.mark.full
@pytest.mark.parametrize("tokens", drawn([1, 2, 3, 4], [3]))
def test_tokens_that_fill_a_tile_or_more(tokens):
    check(Latent((65, 90), page=64, heads=24, tokens=tokens, mask=Causal()))


@pytest.mark.full
@pytest.mark.parametrize("page", drawn([1, 16, 48, 128], [48]))
def test_pages(page):
    check(Latent((130, 0, 40), page=page, tokens=2, mask=Causal()))


@pytest.mark.full
@pytest.mark.parametrize("programs", [1, 5, 12])
def test_any_number_of_programs(programs):
    check(Latent((400, 70, 3), page=64, heads=80), programs, schedule="random", seed=programs)


QUEUES = {  # row tiles of a sequence, each in a work queue of its own
    "one-token": Latent((400, 70, 3, 0, 129), page=64, heads=128),
    "two-tokens": Latent((300, 70, 3, 0, 129), page=16, heads=128, tokens=2, mask=Causal()),
    "three-tiles": Latent((400, 70, 129), page=64, heads=80, tokens=2, mask=SlidingWindow(60)),
    "dense": Latent((330, 330), heads=128),
    "invariant": Latent((400, 70, 129), page=64, heads=128, invariant=True, config=(("schedule.unit", 1),)),
}
QUEUES_DRAWN = [("one-token", 7), ("dense", 12), ("invariant", 4)]


@pytest.mark.parametrize(("name", "programs"), drawn(product(QUEUES, (2, 4, 7, 12)), QUEUES_DRAWN))
def test_queues_of_row_tiles(name, programs):
    """CTAs that no queue needs have nothing to do."""
    check(QUEUES[name], programs, schedule="random", seed=programs)


@pytest.mark.parametrize("longest", drawn([1, 2, 3], [2]))
def test_queues_of_ragged_queries(longest):
    """A token of 128 heads has two row tiles, so there are two queues, however many tokens a sequence has."""
    x = tensors(Latent((200, 70, 130, 3), page=64, heads=128))
    tokens = torch.tensor([0, longest, 0, 1, 1])  # one sequence has none
    q = torch.randn(longest + 2, 128, x.q.shape[-1]).to(x.q.dtype)
    seq = wa.Ragged(tokens.cumsum(0).int(), max_q=longest)
    options = {"seq": seq, "mask": Causal(), "scale": SCALE, "return_lse": True}
    out, lse = wa.attention_paged(q, x.sequence, **options, backend="simulate:sm90")
    want, want_lse = wa.attention_paged(q, x.sequence, **options, backend="reference")
    assert error(out.float(), want.float()) < 2e-2 and error(lse, want_lse) < 1e-4


@pytest.mark.full
def test_nothing_visible():
    ran = check(Latent((100, 0), page=64, mask=CustomMask(lambda b, h, q, k: k < 0)))
    assert not ran.out.any() and torch.isneginf(ran.lse).all()


@pytest.mark.full
def test_the_same_bits_under_every_schedule():
    outs = [check(CASES["mixed-causal-4"], 5, schedule=schedule, seed=seed).out for schedule, seed in SCHEDULES]
    assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_batch_invariance():
    """A sequence alone, and with other company on another number of CTAs: the same bits."""
    alone = Latent((330,), page=64, invariant=True, config=(("schedule.unit", 1),))
    company = replace(alone, lengths=(330, 200, 33))
    bits = check(alone, 2)
    many = check(company, 5, first=tensors(replace(alone, page=0)))
    assert torch.equal(bits.out[0], many.out[0]) and torch.equal(bits.lse[0], many.lse[0])


@pytest.mark.full
@pytest.mark.parametrize("page", drawn([0, 64], [64]))
def test_public_calls(page):
    case = Latent((70, 70), page=page, tokens=2, mask=Causal(), sinks=True)
    x = tensors(case)
    tail = {"mask": case.mask, "sinks": x.sinks, "scale": SCALE, "return_lse": True}
    out = torch.full((*x.q.shape[:3], DIM_V), float("nan"), dtype=case.dtype)
    if page:
        _, lse = wa.attention_paged(x.q, x.sequence, **tail, out=out, backend="simulate:sm90")
    else:
        _, lse = wa.attention(x.q, x.k, x.v, **tail, out=out, backend="simulate:sm90")
    want, want_lse = x.expected(case)
    assert error(out.float(), want.float()) < 2e-2 and error(lse, want_lse) < 1e-4


def test_strides_that_tma_cannot_take_are_copied():
    case = Latent((70,))
    x = tensors(case)
    k = torch.zeros(1, 70, 1, 580, dtype=case.dtype)[..., 2:578].copy_(x.k)
    out = wa.attention(x.q, k, k[..., :DIM_V], scale=SCALE, backend="simulate:sm90")
    assert error(out.float(), x.expected(case)[0].float()) < 2e-2


@pytest.mark.full
def test_the_kernel_needs_its_synchronisation():
    case = Latent((330, 200, 40, 130, 70), page=64)
    made = []

    def once(module, schedule) -> Report:
        return run(case, 2, kernel=lambda _: module, schedule=schedule, step_limit=20_000, first_finding=True).report

    run(case, 2, kernel=lambda kernel: made.append(kernel) or kernel)
    results = knocked_out(made[0], once, reason)
    assert sum(found.noticed for found in results) > 0.8 * len(results)
