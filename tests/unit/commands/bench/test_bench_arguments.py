"""Arguments that benchmarks have in common mean the same and are refused alike; their processes can start."""

import ast
import importlib
import re
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import run
from bench.backward import __main__ as backward
from bench.measure.arguments import require_card, timed_cases

MAINS = sorted((Path(__file__).parents[4] / "bench").rglob("__main__.py"))
TIMED = ("bench.ragged", "bench.decode.__main__", "bench.eight_bit.__main__", "bench.eight_bit.prefill")


@pytest.mark.parametrize("module", [*TIMED, "bench.backward.__main__", "bench.choices", "bench.ladder.__main__"])
def test_no_round_is_refused(module, capsys):
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(module).main(["--rounds", "0"])
    assert "argument --rounds: must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["--group", "d12"], ["--group", "smoke", "--peers", "x"], ["--group", "smoke", "--rounds", "0"]]
)
def test_bad_arguments_are_named(argv, capsys):
    with pytest.raises(SystemExit):
        run.main(argv)
    assert "known: " in (message := capsys.readouterr().err) or "at least 1" in message


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--peers", "cudnn,fa5"], r"unknown peers: fa5 \(known: warpattn, "),
        (["--masks", "causal,none"], r"unknown masks: none \(known: full, "),
        (["--dims", "64,D128"], "dims are '64,D128'; write head dims"),
        (["--dims", "0"], "dims are '0'; write head dims"),
        (["--only", "5x5"], "no case has '5x5' in its name"),
        ([], "gradients are timed on a card: torch sees no CUDA GPU"),
    ],
)
def test_gradients_are_refused_before_anything_is_compiled(argv, message, capsys, monkeypatch):
    monkeypatch.setattr("bench.measure.arguments.no_gpu", lambda: "torch sees no CUDA GPU")
    with pytest.raises(SystemExit, match="2"):
        backward.main(argv)
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("module", "argv", "message"),
    [
        ("step", [], "steps are timed on a card: torch sees no CUDA GPU"),
        ("choices", ["--shapes", "1"], "choices are timed on a card: torch sees no CUDA GPU"),
        ("choices", [], "there is nothing to time: give --shapes, --case or --again"),
        ("engine.__main__", [], "engines are timed on a card: torch sees no CUDA GPU"),
    ],
)
def test_a_card_is_missed_before_anything_is_timed(module, argv, message, capsys, monkeypatch):
    monkeypatch.setattr("bench.measure.arguments.no_gpu", lambda: "torch sees no CUDA GPU")
    monkeypatch.setattr("sys.argv", ["bench", *argv])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(f"bench.{module}").main()
    assert message in capsys.readouterr().err


def test_a_missing_package_is_named(capsys, monkeypatch):
    monkeypatch.setattr("bench.measure.arguments.no_gpu", lambda: None)
    with pytest.raises(SystemExit, match="2"):
        require_card(ArgumentParser(), "engines", "argparse", "no_such_engine")
    assert "engines need no_such_engine, which is not installed" in capsys.readouterr().err


def test_the_arguments_of_timed_cases(tmp_path):
    words = ["--only", "a", "--rounds", "3", "--json", str(tmp_path)]
    given = timed_cases("bench.x", "What it does.").parse_args(words)
    assert (given.only, given.rounds, given.seed, given.json) == ("a", 3, 0, tmp_path)


def given_to_processes(tree: ast.Module) -> Iterator[str]:
    """Names of functions that a module hands to processes."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            functions = [keyword.value for keyword in call.keywords if keyword.arg == "target"]
            if isinstance(call.func, ast.Attribute) and call.func.attr in ("submit", "map"):
                functions += call.args[:1]
            yield from (function.id for function in functions if isinstance(function, ast.Name))


@pytest.mark.parametrize("path", MAINS, ids=lambda path: path.parent.name)
def test_processes_get_functions_that_they_can_import(path):
    """A process that is spawned does not run a package's `__main__`, so it has none of the functions there."""
    tree = ast.parse(path.read_text())
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert own.isdisjoint(given_to_processes(tree))
