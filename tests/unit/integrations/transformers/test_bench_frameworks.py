"""bench.frameworks: what is timed and what is not, and transformers' smoke test on the CPU (others: tests/engine)."""

import json

import pytest
import torch

from bench.frameworks import timing
from bench.frameworks.__main__ import MODULES, main
from bench.frameworks.timing import Case, Way, largest_error, line_of, measured, nothing

CPU = torch.device("cpu")


def case(**found):
    """Each implementation's result; the exact one is 1."""
    exact = torch.ones(2)

    def way(value):
        def call():
            if isinstance(value, Exception):
                raise value
            return torch.full((2,), value)

        return Way(nothing, call)

    return Case({name: way(value) for name, value in found.items()}, lambda x: largest_error(x, exact), tokens=10)


def test_a_wrong_result_is_not_timed():
    entry = measured(case(sdpa=1.001, other=float("nan"), warpattn=1.05), CPU, 2, 0)
    assert {name: found["status"] for name, found in entry.items()} == {
        "sdpa": "timed", "other": "wrong", "warpattn": "wrong"
    }  # fmt: skip
    assert "ms" not in entry["warpattn"] and "speed" not in entry["sdpa"]
    assert "0.05 of the largest value; at most 0.018" in entry["warpattn"]["reason"]


def test_twice_the_error_of_the_peer_is_allowed():
    assert measured(case(sdpa=1.02, warpattn=1.05), CPU, 1, 0)["warpattn"]["status"] == "timed"


def test_what_cannot_run_says_why_and_the_others_are_timed():
    entry = measured(case(flex=NotImplementedError("no sinks\nmore"), warpattn=1.0), CPU, 1, 0)
    assert entry["flex"] == {"status": "failed", "reason": "NotImplementedError: no sinks"}
    assert entry["warpattn"]["speed"]["median"] == 1
    line = line_of("title", entry, 10)
    assert line.startswith("title: flex failed: NotImplementedError: no sinks; warpattn ") and "tokens/s" in line


def test_choosing_the_implementation_comes_before_every_sample(monkeypatch):
    order = []
    way = Way(lambda: order.append("prepare"), lambda: order.append("call"))
    sample = timing.WallSample(way, CPU)
    sample.start()
    assert order == ["prepare", "call"] * 3 and sample.milliseconds() >= 0


def smoke(tmp_path, framework, *cases):
    path = tmp_path / "record.json"
    chosen = [argument for name in cases for argument in ("--case", name)]
    assert main(["--smoke", "--only", framework, "--rounds", "1", "--json", str(path), *chosen]) == 0
    record = json.loads(path.read_text())
    assert not record["left_out"]
    return record["cases"]


def statuses(cases):
    return {name: {way: found["status"] for way, found in one["results"].items()} for name, one in cases.items()}


def test_models_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    cases = smoke(tmp_path, "transformers", "prefill", "8 x 4k", "training")
    assert len(cases) == 8 and {tuple(found) for found in statuses(cases).values()} == {
        ("sdpa", "warpattn"), ("eager", "warpattn")
    }  # fmt: skip
    assert all(set(found.values()) == {"timed"} for found in statuses(cases).values())
    assert cases["transformers: Llama 3 8B, 2 layers: prefill 1 x 16k"]["tokens"] == 128


@pytest.mark.full
@pytest.mark.slow
def test_continuous_batching_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    ((_, found),) = statuses(smoke(tmp_path, "transformers", "generate_batch")).items()
    assert found == {"sdpa": "timed", "warpattn": "timed"}


def test_a_framework_that_is_not_installed_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(MODULES, "keras_of_old", "bench.frameworks.keras")
    assert main(["--smoke", "--only", "keras_of_old", "--json", str(tmp_path / "record.json")]) == 0
    left_out = json.loads((tmp_path / "record.json").read_text())["left_out"]
    assert left_out == {"keras_of_old": "ImportError: keras_of_old is not installed"}
    assert "keras_of_old is left out" in capsys.readouterr().out


def test_an_unknown_framework_is_one_sentence(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "keras"])
    assert "--only has keras; it takes transformers, diffusers, sglang" in capsys.readouterr().err
