"""Latents of 8 bits as left operands in the simulator: right values, no findings, every scale, knock-outs."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn, in_turn
from tests.sim.knocking import knocked_out
from tests.sim.sm90.mla import SCALE, Latent, reason
from tests.sim.sm90.test_mla_eight_bit import PER, SCHEDULES, check, pages_of, run, with_narrow_rope
from tests.sim.test_latent_query import as_engines_have_them
from warpattn.kernels.sm90.mla import config
from warpattn.masks import Causal, SlidingWindow
from warpattn.scores import SoftCap
from warpattn.sim import Report

LAST_CTA = ("combine.separate_kernel", False)  # adds up the parts of a sequence
CASES = {
    "one": Latent((200, 33), page=64, swap_ab=True),
    "mixed-causal-4": Latent((130, 0, 64, 5, 200), page=64, tokens=4, heads=4, mask=Causal(), swap_ab=True),
    "last-cta": Latent((330, 200, 40), page=16, heads=9, swap_ab=True, config=(LAST_CTA,)),
    "window-sinks": Latent((300, 40), page=16, tokens=2, heads=5, mask=SlidingWindow(70), sinks=True, swap_ab=True),
    "soft-cap": Latent((130, 70), page=64, score=SoftCap(3.0), swap_ab=True),
    "small-pages": Latent((70, 41), page=8, swap_ab=True),
    "invariant": Latent((300, 70), page=64, invariant=True, swap_ab=True, config=(("schedule.unit", 1),)),
}


@pytest.mark.parametrize(
    ("name", "schedule", "seed"), in_turn(CASES, ("last-cta",), SCHEDULES, each=5)
)
def test_right_and_without_findings(name, schedule, seed):
    check(CASES[name], schedule=schedule, seed=seed)


@pytest.mark.full
@pytest.mark.parametrize("per", drawn(PER, [None]))
def test_scales(per):
    check(Latent((70, 130), page=64, heads=12, swap_ab=True), per)


@pytest.mark.parametrize("power", drawn([-40, -12, 12], [-40, 12]))
def test_scales_far_apart(monkeypatch, power):
    """Weights have references of each block of columns, so fp16 holds them whatever the scales are."""
    kv, q = pages_of(Latent((70, 130), page=64, seed=3)), as_engines_have_them(2, 1, 3)
    scale = kv.k_scale * 2.0 ** torch.tensor([0.0, power, 0.0, 0.0])
    kv = wa.LatentPages(kv.k_pages, kv.rope, kv.block_table, kv.lengths, scale=scale)
    found, wanted = (wa.attention_paged(q, kv, scale=SCALE, backend=way) for way in ("simulate:sm90", "reference"))
    for one, want in zip(found.float().split(128, -1), wanted.float().split(128, -1), strict=True):
        assert (one - want).abs().max() < 2e-2 * want.abs().max()


@pytest.mark.full
@pytest.mark.parametrize("per", drawn(["tensor", "token", None], ["token"]))
def test_rotary_parts_of_8_bits(per):
    case = Latent((100, 33, 0), page=16, tokens=2, heads=8, mask=Causal(), swap_ab=True)
    outs = [check(case, per, narrow=True, schedule=name, seed=seed) for name, seed in SCHEDULES[::2]]
    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("length", drawn([1, 63, 64, 65, 128, 1000], [1, 65]))
def test_lengths(length):
    check(Latent((length,), page=64, swap_ab=True), programs=4)


@pytest.mark.parametrize("dtype", drawn([torch.float8_e4m3fn, torch.float8_e5m2], [torch.float8_e5m2]))
def test_public_calls_where_it_is_chosen(monkeypatch, dtype):
    """Requests with different numbers of tokens, queries in two tensors."""
    chosen = []
    tiles = config.swap_ab_tiles
    monkeypatch.setattr(config, "swap_ab_tiles", lambda *problem: chosen.append(tiles(*problem)) or chosen[-1])
    torch.manual_seed(0)
    kv, both = pages_of(Latent((70, 33, 50), page=16), "token", dtype), as_engines_have_them(1, 7, 4)
    q = wa.LatentQuery(both.nope[0], both.rope[0])
    seq = wa.Ragged(torch.tensor([0, 4, 5, 7]).int(), max_q=4)
    tail = {"mask": Causal(), "scale": SCALE, "return_lse": True}
    found = wa.attention_paged(q, kv, seq, **tail, backend="simulate:sm90")
    for one, wanted in zip(found, wa.attention_paged(q, kv, seq, **tail), strict=True):
        assert (one.float() - wanted.float()).abs().max() < 2e-2 * wanted.float().abs().max()
    assert chosen


@pytest.mark.full
@pytest.mark.parametrize("narrow", [False, True])
def test_the_kernel_needs_its_synchronisation(narrow):
    case = Latent((330, 200, 40, 130, 70), page=64, swap_ab=True, config=(LAST_CTA,))
    kv, made = pages_of(replace(case, config=()), "token" if narrow else 128), []
    kv = with_narrow_rope(kv) if narrow else kv

    def once(module, schedule) -> Report:
        options = {"schedule": schedule, "step_limit": 20_000, "first_finding": True}
        return run(case, kv, 2, kernel=lambda _: module, **options).report

    run(case, kv, 2, kernel=lambda kernel: made.append(kernel) or kernel)
    results = knocked_out(made[0], once, reason)
    assert sum(found.noticed for found in results) > 0.8 * len(results)
