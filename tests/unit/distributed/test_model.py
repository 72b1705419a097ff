"""The model of rings: what it says where the answer is known."""

import pytest

from bench.distributed.ring_model import Rates, Ring, memory, rates, record

SLOW_LINK = Rates({1: 1e15}, 1.0, 1e9)


def test_a_link_that_is_too_slow_bounds_the_ring():
    ring = Ring(1 << 17, 8, heads=16, heads_kv=16)
    attention, transfer = 2.0 * 16 * 128 * (1 << 14) ** 2 / 1e15, 2 * (1 << 14) * 16 * 128 * 2 / 1e9
    assert ring.efficiency(SLOW_LINK, backward=False) == pytest.approx(attention / transfer, rel=1e-2)


def test_longer_parts_hide_more_and_fewer_key_heads_too():
    measured = rates()
    by_ranks = [Ring(1 << 20, ranks).efficiency(measured, backward=True) for ranks in (2, 8, 64, 512)]
    assert by_ranks == sorted(by_ranks, reverse=True) and by_ranks[0] < 1
    wide, narrow = (Ring(1 << 20, 256, heads_kv=heads).efficiency(measured, backward=False) for heads in (32, 8))
    assert wide < narrow


def test_measured_memory_is_within_five_percent_of_the_model():
    measured = [
        (x["case"], x["results"]["memory_gib"])
        for x in record()["cases"]
        if x["case"]["way"] in ("ring", "ulysses") and x["results"]["status"] == "timed"
    ]
    assert {case["tokens"] for case, _ in measured} >= {1 << 17, 1 << 18}
    for case, gib in measured:
        rows = case["tokens"] // case["cards"]
        modelled = memory(case["way"], case["backward"], rows, case["heads"], case["heads_kv"])
        assert modelled == pytest.approx(gib, rel=0.05), case["name"]
