"""Latent decode with queries as the right operands in the simulator: right values, no findings, knock-outs."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn, in_turn
from tests.sim.knocking import knocked_out
from tests.sim.sm90.mla import SCALE, Latent, reason, run, tensors
from tests.sim.sm90.test_mla import MIXED, SCHEDULES, check
from tests.sim.test_latent_query import as_engines_have_them, pages
from warpattn.kernels.sm90.mla import config
from warpattn.masks import Causal, CustomMask, SlidingWindow
from warpattn.scores import SoftCap
from warpattn.sim import Report

LAST_CTA = ("combine.separate_kernel", False)  # adds up the parts of a sequence
ONE = Latent((330,), page=64, invariant=True, swap_ab=True, config=(("schedule.unit", 1),))

CASES = {
    "dense": Latent((130, 130), swap_ab=True),
    "mixed-causal-4": Latent(MIXED, page=64, tokens=4, heads=4, mask=Causal(), swap_ab=True),
    "last-cta": Latent(MIXED, page=64, tokens=2, heads=8, swap_ab=True, config=(LAST_CTA,)),
    "window-sinks": Latent((300, 40), page=16, tokens=2, heads=5, mask=SlidingWindow(70), sinks=True, swap_ab=True),
    "soft-cap-fp16": Latent((130, 70), page=64, score=SoftCap(3.0), dtype=torch.float16, swap_ab=True),
    "gathered": Latent((130, 5), page=3, tokens=16, heads=1, mask=Causal(), swap_ab=True, config=(LAST_CTA,)),
    "invariant": replace(ONE, lengths=(300, 70), config=(*ONE.config, LAST_CTA)),
}


@pytest.mark.parametrize(
    ("name", "schedule", "seed"), in_turn(CASES, ("gathered",), SCHEDULES, each=5)
)
def test_right_and_without_findings(name, schedule, seed):
    assert not check(CASES[name], schedule=schedule, seed=seed).tickets.any()


@pytest.mark.parametrize("page", drawn([0, 64], [64]))
@pytest.mark.parametrize("length", drawn([1, 63, 64, 65, 128, 129, 1000], [1, 64, 65, 1000]))
def test_lengths(page, length):
    check(Latent((length,), page=page, swap_ab=True), 4)


@pytest.mark.full
@pytest.mark.parametrize("page", drawn([1, 8, 16, 48, 128], [48]))
def test_pages(page):
    check(Latent((130, 0, 40), page=page, tokens=2, heads=7, mask=Causal(), swap_ab=True))


@pytest.mark.parametrize("programs", drawn([1, 5, 12], [12]))
def test_any_number_of_programs(programs):
    case = Latent((400, 70, 3), page=64, swap_ab=True)
    check(case, programs, schedule="random", seed=programs)
    check(replace(case, config=(LAST_CTA,)), programs, schedule="random", seed=programs)


@pytest.mark.full
def test_nothing_visible():
    hidden = CustomMask(lambda b, h, q, k: k < 0)
    ran = check(Latent((100, 0), page=64, mask=hidden, swap_ab=True))
    assert not ran.out.any() and torch.isneginf(ran.lse).all()


def test_the_same_bits_under_every_schedule():
    outs = [check(CASES["last-cta"], 5, schedule=schedule, seed=seed).out for schedule, seed in SCHEDULES]
    assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_batch_invariance():
    """A sequence alone, and with other company on another number of CTAs: the same bits."""
    bits = check(ONE, 2)
    many = check(replace(ONE, lengths=(330, 200, 33)), 5, first=tensors(replace(ONE, page=0)))
    assert torch.equal(bits.out[0], many.out[0]) and torch.equal(bits.lse[0], many.lse[0])


@pytest.mark.parametrize("parts", drawn([False, True], [True]))
def test_public_calls_where_it_is_chosen(monkeypatch, parts):
    """Requests with different numbers of tokens, queries in one or two tensors."""
    chosen = []
    tiles = config.swap_ab_tiles
    monkeypatch.setattr(config, "swap_ab_tiles", lambda *problem: chosen.append(tiles(*problem)) or chosen[-1])
    torch.manual_seed(0)
    kv, both = pages(16, (70, 33, 50)), as_engines_have_them(1, 7, 4)
    q = wa.LatentQuery(both.nope[0], both.rope[0])
    seq = wa.Ragged(torch.tensor([0, 4, 5, 7]).int(), max_q=4)
    tail = {"mask": Causal(), "scale": SCALE, "return_lse": True}
    asked = q if parts else q.joined()
    found = wa.attention_paged(asked, kv, seq, **tail, backend="simulate:sm90")
    for one, wanted in zip(found, wa.attention_paged(q, kv, seq, **tail), strict=True):
        assert (one.float() - wanted.float()).abs().max() < 2e-2 * wanted.float().abs().max()
    assert chosen


@pytest.mark.full
@pytest.mark.parametrize("fields", [(), (LAST_CTA,)])
def test_the_kernel_needs_its_synchronisation(fields):
    case = Latent((330, 200, 40, 130, 70), page=64, swap_ab=True, config=fields)
    made = []

    def once(module, schedule) -> Report:
        return run(case, 2, kernel=lambda _: module, schedule=schedule, step_limit=20_000, first_finding=True).report

    run(case, 2, kernel=lambda kernel: made.append(kernel) or kernel)
    results = knocked_out(made[0], once, reason)
    assert sum(found.noticed for found in results) > 0.8 * len(results)
