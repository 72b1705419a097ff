"""bench.ragged: the mixes, what dense call has the same work, and a run on the CPU."""

import json

import pytest
import torch

from bench import ragged


def test_zipf_uses_all_tokens_and_is_in_no_order():
    lengths = ragged.zipf(16384, 4096)
    assert sum(lengths) == 16384 and max(lengths) == 4096 and min(lengths) <= 64
    assert sorted(lengths, reverse=True)[:4] == [4096, 2048, 1365, 1024]
    assert list(lengths) not in (sorted(lengths), sorted(lengths, reverse=True))


def test_dense_has_the_same_work():
    case = ragged.Case("x", (4096, 2048, 1024, 1024))
    batch, length = case.same_work
    work = ragged.flops((length,) * batch, case) / (batch * length)
    assert work == pytest.approx(ragged.flops(case.lengths, case) / case.tokens, rel=1e-3)
    assert ragged.Case("x", (1024,) * 16).same_work == (16, 1024)


def test_one_flop_for_one_score():
    """Causal attention of n rows: n² / 2 visible scores, each with 2 D multiplications and 2 D additions."""
    case = ragged.Case("x", (8,), heads=1, dim=4)
    assert ragged.flops(case.lengths, case) == 8 * 8 / 2 * 4 * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the cases of a CPU")
def test_a_run_on_a_cpu(tmp_path, capsys):
    path = tmp_path / "ragged.json"
    assert ragged.main(["--rounds", "2", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    ways = [sorted(entry["results"]) for entry in record["cases"]]
    assert ways == [["dense", "page16", "ragged"], ["dense", "ragged"]]
    assert "smoke-uneven" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the cases of a CPU")
def test_a_wrong_output_is_not_timed(monkeypatch):
    monkeypatch.setattr(ragged.wa, "attention", lambda q, k, v, **_: torch.zeros_like(q))
    entry = ragged.run_case(ragged.smoke_cases()[0], 1, 0)
    assert entry["results"]["dense"]["status"] == "wrong" and "ms" not in entry["results"]["dense"]
