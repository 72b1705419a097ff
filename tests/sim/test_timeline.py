"""The timeline of a run: waits and engines where they must be, pictures that can be read."""

import json
from collections import defaultdict
from itertools import pairwise
from xml.etree import ElementTree

import pytest

pytest.importorskip("triton")

from tests.sim.prefill import Case, simulated
from warpattn.masks import Causal
from warpattn.sim import SimulationError

CASE = Case(512, 512, heads=1, heads_kv=1, dim=128, mask=Causal())


@pytest.fixture(scope="module")
def report():
    return simulated(CASE, programs=2, schedule="eager", timing=True)[0]


def test_roles_and_engines_have_lanes(report):
    lanes = {event.lane for event in report.events}
    assert lanes == {"attend_0", "attend_1", "load_role", "copies", "tensor core", "prefill_kernel"}


def test_nothing_overlaps_on_a_lane(report):
    lanes = defaultdict(list)
    for event in report.events:
        lanes[event.program, event.lane].append(event)
    for events in lanes.values():
        events.sort(key=lambda event: event.start)
        assert all(a.end <= b.start + 1e-6 for a, b in pairwise(events))


def test_products_take_what_the_tensor_core_needs(report):
    tiles = 2 * 1 + 2 * (2 + 3 + 4)  # 64-row blocks times the 128-key tiles that they see
    products = [event for event in report.events if event.kind == "wgmma"]
    useful = 2 * tiles * (64 * 128 * 128 / 2048)
    extra = 2 * 2 * (64 * 128 * 128 / 2048)  # every warpgroup starts one product more, for a tile that is not there
    assert sum(event.end - event.start for event in products) == pytest.approx(useful + extra)


def test_the_estimate_hardly_depends_on_the_schedule(report):
    lazy = simulated(CASE, programs=2, schedule="lazy", timing=True)[0]
    assert end(lazy) == pytest.approx(end(report), rel=0.1)


def end(report) -> float:
    return max(event.end for event in report.events)


def test_pictures(report, tmp_path):
    report.save_timeline(tmp_path / "t.svg", program=(1, 0, 0))
    root = ElementTree.parse(tmp_path / "t.svg").getroot()
    text = "".join(root.itertext())
    assert "attend_1" in text and "tensor core" in text and "uncalibrated" in text
    report.save_trace(tmp_path / "t.json")
    records = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(record["ph"] == "X" for record in records) == len(report.events)


def test_a_picture_needs_a_run_with_timing(tmp_path):
    plain = simulated(CASE, programs=1)[0]
    with pytest.raises(SimulationError, match="simulate with timing=True"):
        plain.save_timeline(tmp_path / "t.svg")


def test_a_picture_of_no_program(report, tmp_path):
    with pytest.raises(SimulationError, match=r"no program \(9, 0, 0\)"):
        report.save_timeline(tmp_path / "t.svg", program=(9, 0, 0))
