"""`python -m warpattn tune`: wrong lines, no card, what is listed and forgotten."""

import json

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from warpattn.cli.app import app
from warpattn.problem.launch import BUILT_IN
from warpattn.runtime import kernel_cache
from warpattn.runtime.tuned import rows
from warpattn.serving import tuning

CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}


def invoke(*arguments, exit_code=0):
    result = CliRunner().invoke(app, ["tune", *arguments])
    assert result.exit_code == exit_code, result.output
    return result.output


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WARPATTN_CACHE_DIR", str(tmp_path / "cache"))


def row(**fields):
    return rows.Row(**{
        "key": "k", "call": "2x8/8x4/4x64/64 bfloat16", "card": "Stand-in (132 SMs)", "candidate": "192x64",
        "built_in": "128x128", "microseconds": {BUILT_IN: 12.0, "192x64": 10.0}, "refused": {}, "rounds": 15,
        "date": "2026-11-23", "kernels": kernel_cache.version(), "triton": "3.9.0",
    } | fields)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing is given; tune takes one of CONFIG, --shape, --list and --forget"),
        (["--list", "--forget"], "--list and --forget are given"), (["--shape", "1x64"], "shape is '1x64'"),
        (["--shape", "1x64x8x64", "--dtype", "fp8"], "tune takes fp16 and bf16"),
        (["--shape", "1x64x8x64", "--mask", "triangle"], "mask is 'triangle'"),
        (["--shape", "1x64x8x64", "--page-size", "-1"], "page-size is -1"),
        (["--shape", "1x1/100x8x64", "--page-size", "16"], "keys is 100; over pages of 16"),
        (["--shape", "1x64x8x64", "--rounds", "0"], "rounds is 0"), (["/nowhere"], "config '/nowhere' cannot be read"),
        (["--shape", "1x64x8x1024"], "1024"),
        (["--shape", "1x64x8x64", "--length", "9"], "length is 9 and --shape is given"),
        (["CONFIG", "--mask", "full"], "mask is 'full' and CONFIG is given"),
        (["CONFIG", "--mask", "causal"], "mask is 'causal' and CONFIG is given"),  # the default, yet written
        (["--list", "--rounds", "3"], "rounds is 3 and --list is given, which takes no other option"),
        (["--forget", "--page-size", "16"], "page-size is 16 and --forget is given, which takes no other option"),
    ],
)  # fmt: skip
def test_wrong_lines_are_one_sentence(arguments, message):
    text = invoke(*arguments, exit_code=1)
    assert text.startswith("error: ") and message in text and text.count("\n") == 1


@pytest.mark.parametrize("given", ["shape", "config"])
def test_without_a_card_it_is_one_sentence(given, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arguments = ["--shape", "1x64x8x64"] if given == "shape" else [str(tmp_path)]
    if not tuning.torch.cuda.is_available():
        assert "this machine has no card; tune measures on CUDA capability 9.0" in invoke(*arguments, exit_code=1)


def test_what_was_tuned_is_listed_and_forgotten():
    assert invoke("--list") == invoke("--forget") == "no tuned choices\n"
    rows.add(rows.path(), [row(), row(key="old", kernels="0badc0de")])
    text = invoke("--list")
    assert "tuned on Stand-in (132 SMs), 2026-11-23: 192x64, 1.20 x as fast as the built-in choice 128x128" in text
    assert "is ignored: it was made by kernels 0badc0de" in text and "2 tuned choices in" in text
    assert "tuned    2 choices" in CliRunner().invoke(app, ["cache", "info"]).output
    assert invoke("--forget") == "removed 2 tuned choices\n" and invoke("--list") == "no tuned choices\n"


def test_a_damaged_file_is_one_sentence_until_it_is_forgotten():
    rows.add(rows.path(), [row()])
    rows.path().write_bytes(b"no rows")
    assert "are not used: it is damaged; `python -m warpattn tune --forget` removes it" in invoke("--list", exit_code=1)
    invoke("--forget")
    assert not rows.path().exists() and invoke("--list") == "no tuned choices\n"


def test_results_are_printed_with_what_was_refused(monkeypatch):
    def tune(calls, **_):
        (call,) = calls
        found = row(refused={"256x32": "its output differs by 1.1"})
        return (tuning.Tuned(call, found, found.words),)

    monkeypatch.setattr(tuning, "tune", tune)
    text = invoke("--shape", "2x8x4x64", "--mask", "window:4")
    assert "2x8/8x4/4x64/64 bfloat16, SlidingWindow(" in text and "1.20 x as fast" in text
    assert "  not used: 256x32: its output differs by 1.1" in text
