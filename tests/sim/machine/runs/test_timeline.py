"""The timing of a run: who waits for whom, engines that do one thing at a time, pictures that can be read."""

import json
from itertools import pairwise
from xml.etree import ElementTree

import pytest

pytest.importorskip("triton")

from tests.sim.sm90.prefill import Case, simulated
from warpattn.masks import Causal
from warpattn.sim import SimulationError

CASE = Case(512, 512, heads=1, heads_kv=1, dim=128, mask=Causal())
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def report():
    return simulated(CASE, programs=2, timing=True)[0]


@pytest.fixture(scope="module")
def alone():
    return simulated(Case(256, 1024, heads=1, heads_kv=1, dim=128), programs=1, timing=True)[0]


def test_roles_and_engines_have_lanes(alone):
    assert alone.timing.roles == ("attend_0", "attend_1", "load_role")
    assert {"tensor core", "TMA", "MUFU", "ALU", "issue", "shared memory"} <= set(alone.timing.engines)


def test_nothing_overlaps_on_a_lane(report):
    for lane in (*report.timing.roles, *report.timing.engines):
        assert all(a.end <= b.start + 1e-6 for a, b in pairwise(report.timing.of(lane))), lane


def test_products_take_what_the_tensor_core_needs(alone):
    products = 2 * 8 * 2 * 2 + 2  # tiles, keys, warpgroups, products; each warpgroup starts one of a tile not there
    left = 2 * 8 * 2 * 8 * 4  # products with P, their instructions, and what an operand in registers adds to each
    assert alone.timing.busy("tensor core") == pytest.approx(products * 2 * 64 * 128 * 128 / 4096 + left)


def test_what_binds_is_named_first(alone):
    (first, share), *others = alone.timing.busiest()
    assert first == "tensor core" and share == alone.timing.busy("tensor core") / alone.timing.cycles
    assert len(others) == 2 and all(share >= other for _, other in others)


def test_exponentials_take_what_the_special_function_unit_needs(alone):
    exponentials = 2 * 8 * 128 * 128
    assert alone.timing.busy("MUFU") == pytest.approx(exponentials / 16, rel=0.02)


def test_the_estimate_does_not_depend_on_the_schedule(alone):
    for schedule in ("lazy", "random", "adversarial"):
        other = simulated(Case(256, 1024, heads=1, heads_kv=1, dim=128), 1, schedule=schedule, timing=True)[0]
        assert other.timing.cycles == pytest.approx(alone.timing.cycles, rel=0.01)


def test_values_and_findings_are_as_without_timing(report):
    plain, error, _ = simulated(CASE, programs=2)
    assert plain.clean and report.clean and error < 2e-2
    assert plain.timing is None


def test_consumers_wait_for_the_first_tiles(alone):
    first = next(span for span in alone.timing.of("attend_1") if span.kind == "wait" and span.name == "wait_barrier")
    landed = min(span.end for span in alone.timing.of("TMA"))
    assert first.end > landed  # the bytes, and the latency after them
    assert first.frames[0].file.endswith("pipelines.py")


def test_half_the_tensor_core_makes_it_slower(alone, monkeypatch):
    from dataclasses import replace

    from warpattn.sim.timing import cost, record

    slow = replace(cost.SM90, rates=cost.SM90.rates | {"tensor core": 2048})
    monkeypatch.setitem(cost.CHIPS, "cuda:90", slow)
    record.recorded.cache_clear()
    slower = simulated(Case(256, 1024, heads=1, heads_kv=1, dim=128), programs=1, timing=True)[0]
    record.recorded.cache_clear()
    assert 1.4 < slower.timing.cycles / alone.timing.cycles < 2


def test_picture(alone, tmp_path):
    alone.save_timeline(tmp_path / "t.svg")
    root = ElementTree.parse(tmp_path / "t.svg").getroot()
    text = "".join(root.itertext())
    assert all(name in text for name in ("attend_1", "load_role", "tensor core", "by a model"))
    bars = [r for r in root.iter(f"{SVG}path") if r.find(f"{SVG}title") is not None]
    titles = [r.find(f"{SVG}title").text for r in bars]
    assert any(title.startswith("waits: wait_barrier at pipelines.py:") for title in titles)
    assert any("exp2 at softmax.py:" in title for title in titles)
    assert any("for attend_0" in title for title in titles)
    places = [r.get("d").removeprefix("M").split(" 11h") for r in bars]
    assert all(120 <= float(x) <= 1201 and float(width) > 0 for x, width in places)


def test_picture_of_a_window(alone, tmp_path):
    alone.save_timeline(tmp_path / "t.svg", start=5000, end=7000)
    text = (tmp_path / "t.svg").read_text()
    assert "cycles 5000 to 7000 of" in text
    with pytest.raises(SimulationError, match="are none of the run's 0 to"):
        alone.save_timeline(tmp_path / "t.svg", start=1e9)


def test_a_long_run_is_cut(report, tmp_path):
    report.save_timeline(tmp_path / "t.svg", program=(1, 0, 0))
    text = (tmp_path / "t.svg").read_text()
    assert "cycles 0 to 16000 of" in text and len(text) < 400_000


def test_trace(report, tmp_path):
    report.save_trace(tmp_path / "t.json")
    records = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [record for record in records if record["ph"] == "X"]
    assert len(spans) == len(report.timing.spans)
    assert {record["args"]["name"] for record in records if record["name"] == "process_name"} == {
        "program (0, 0, 0)",
        "program (1, 0, 0)",
    }
    names = {(r["pid"], r["tid"]): r["args"]["name"] for r in records if r["name"] == "thread_name"}
    assert {"attend_0", "tensor core"} <= set(names.values())
    assert all((span["pid"], span["tid"]) in names and span["dur"] >= 0 for span in spans)


def test_a_picture_needs_a_run_with_timing(tmp_path):
    plain = simulated(CASE, programs=1)[0]
    with pytest.raises(SimulationError, match="simulate with timing=True"):
        plain.save_timeline(tmp_path / "t.svg")


def test_a_changed_module_has_no_timing():
    from warpattn.sim.simulate import linked, ttgir_of

    with pytest.raises(SimulationError, match="timing needs a compiled kernel"):
        simulated(CASE, 1, kernel=linked(ttgir_of(CASE.kernel())), timing=True)


def test_a_picture_of_no_program(report, tmp_path):
    with pytest.raises(SimulationError, match=r"no program \(9, 0, 0\)"):
        report.save_timeline(tmp_path / "t.svg", program=(9, 0, 0))
