"""Random lines of every command: each ends with what it was to do, or with one sentence, never with a traceback.

The work itself does not begin: what computes, compiles or starts a process is replaced.
"""

from __future__ import annotations

import json
import os
import random
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("triton")

import typer
from typer.testing import CliRunner

from warpattn.cli import demo, layer, run
from warpattn.cli.app import app

LINES = [8, *(pytest.param(number, marks=pytest.mark.full) for number in (20, 150))]  # of each command
WORK = {
    "run": (run, "attention"),
    "Triton": ("warpattn.runtime.kernel_cache.require_triton",),
    "processes": ("subprocess.run",),
    "models": (demo, "embed_both"),
    "training": (demo, "train_both"),
    "a layer": (layer, "simulated_layer"),
}
NUMBERS = ("-1", "0", "1", "2", "2.5", "nan", "inf", "-inf", "1e9", "1e400", "0x10", "9" * 20, "9" * 5000, "１")
SHAPES = ("1x64x2x64", "1x64x4/2x64", "1x0x2x64", "-1x64x2x64", "1x64x2x0", "1x64x2x99999999999", "1x64x8x576/512")
NAMES = ("sm90", "sm100", "sm103", "gfx942", "cuda", "cpu", "bf16", "fp16", "fp8", "fp32", "e4m3", "int8", "eager",
         "all")  # fmt: skip
MODIFIERS = ("causal", "window:5", "window:-1", "window:", "causal&", "~causal|window:3", "padding:3", "softcap:0",
             "softcap:30", "alibi", "(" * 3000, "custom:lambda")  # fmt: skip
FILES = ("/nonexistent/a/b", "/dev/null", "/dev/full", ".", "..", "config.json", "broken.json", "list.json",
         "deep.json", "empty", "pipe", "program.py", "x.npz", "x.svg", "x.html", "x.safetensors", "a\0b",
         "a" * 300)  # fmt: skip
TEXTS = ("", " ", "é🙂", "\udcff", "a b", "--", "%s", "{}", "[bold]", "1,2,3", "1:2", "\n")
VALUES = (*NUMBERS, *SHAPES, *NAMES, *MODIFIERS, *FILES, *TEXTS)


class BegunError(BaseException):
    """A line was accepted."""


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))


def line(path: tuple[str, ...], chance: random.Random) -> list[str]:
    """One line of a command: up to five of its options and arguments, with values of any kind."""
    words, options = list(path), COMMANDS[path].params
    for option in chance.sample(options, min(len(options), chance.randint(0, 5))):
        if option.param_type_name == "argument":
            words += chance.choices(VALUES, k=chance.choice((1, 1, 2)))
        elif option.is_flag:
            words.append(chance.choice(option.opts + option.secondary_opts))
        else:
            words += [chance.choice(option.opts), chance.choice(VALUES)]
    return words


def amiss(words: list[str]) -> str:
    """What is wrong with the end of a line, or nothing."""
    try:
        result = CliRunner().invoke(app, words)
    except BegunError:
        return ""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return "".join(traceback.format_exception(result.exception)[-2:])
    if "Traceback" in result.output:
        return result.output
    if result.exit_code == 1 and not result.stdout and not result.stderr.startswith("error: "):
        return f"no sentence: {result.stderr}"
    return "" if result.exit_code in (0, 1, 2) else f"exit status {result.exit_code}"


@pytest.fixture
def _no_work(monkeypatch, tmp_path):
    def begun(*_: object, **__: object) -> None:
        raise BegunError

    for place in WORK.values():
        monkeypatch.setattr(*place, begun)
    monkeypatch.setenv("WARPATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    layers = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(layers))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "empty").touch()
    (tmp_path / "program.py").write_text("print('nothing')\n")
    os.mkfifo(tmp_path / "pipe")


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("lines", LINES)
def test_no_line_ends_in_a_traceback(path, lines):
    chance = random.Random(f"{' '.join(path)} {lines}")
    ended = ((words, amiss(words)) for words in (line(path, chance) for _ in range(lines)))
    found = [f"{words}: {what}" for words, what in ended if what]
    assert not found, "\n".join(found)
