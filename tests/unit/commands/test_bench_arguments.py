"""Arguments that benchmarks have in common mean the same and are refused alike."""

import importlib

import pytest

from bench.measure.arguments import timed_cases

TIMED = ("bench.ragged", "bench.decode.__main__", "bench.eight_bit.__main__", "bench.eight_bit.prefill")


@pytest.mark.parametrize("module", [*TIMED, "bench.backward.__main__", "bench.choices", "bench.ladder.__main__"])
def test_no_round_is_refused(module, capsys):
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(module).main(["--rounds", "0"])
    assert "argument --rounds: must be at least 1" in capsys.readouterr().err


def test_the_arguments_of_timed_cases(tmp_path):
    words = ["--only", "a", "--rounds", "3", "--json", str(tmp_path)]
    given = timed_cases("bench.x", "What it does.").parse_args(words)
    assert (given.only, given.rounds, given.seed, given.json) == ("a", 3, 0, tmp_path)
