"""bench.choices without a card: the shapes it draws, the configurations it tries, and what it prints and writes."""

import json
from pathlib import Path

import pytest

from bench import choices, rates
from bench.cases import find
from warpattn.kernels.sm90.prefill.config import SMEM_LIMIT
from warpattn.kernels.sm90.prefill.rates import RATES, RECORDS


def test_drawn_shapes_are_the_same_for_a_seed() -> None:
    first, again, other = ([case.name for case in choices.shapes(6, seed)] for seed in (0, 0, 1))
    assert first == again != other
    assert all(case.seq_q > 16 and case.flops() > 0 for case in choices.shapes(20, 2))


CASES = [find("wide-1x256o32k-h32o8-d128-causal"), *choices.shapes(4, 0)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_configuration_fits_and_is_another(case) -> None:
    found = choices.choices(case)
    assert next(iter(found)) == choices.CHOSEN
    assert len(set(map(choices.described, found.values()))) == len(found) > 1
    for choice in found.values():
        config = choice.config
        assert (config.smem_bytes + 512) * config.ctas <= SMEM_LIMIT
        assert config.topology.registers * config.ctas <= 65_536
        assert case.heads_q // case.heads_kv % config.packed == 0
        assert config.split == (choice.partitions > 1)


def test_the_record_has_the_best_beside_the_choice(monkeypatch, capsys, tmp_path) -> None:
    def measured(case, rounds):
        times = {choices.CHOSEN: 10.0, "another": 9.0}
        return {"case": case.asdict(), "chosen": "this", "best": "another", "speed": 0.9, "microseconds": times,
                "wrong": {}}  # fmt: skip

    monkeypatch.setattr(choices, "compile_all", lambda cases, workers: None)
    monkeypatch.setattr(choices, "measured", measured)
    assert choices.main(["--shapes", "2", "--seed", "0", "1", "--json", str(tmp_path / "record.json")]) == 0
    assert "least 0.900, 4 below 0.93" in capsys.readouterr().out
    entries = json.loads((tmp_path / "record.json").read_text())["cases"]
    assert [entry["best"] for entry in entries] == ["another"] * 4
    assert len({entry["case"]["name"] for entry in entries}) == 4


def test_every_row_of_the_table_is_near_its_times() -> None:
    """What rates.py says of itself."""
    found = rates.by_row(json.loads(Path(record).read_text()) for record in RECORDS)
    assert set(found) == {rates.Row(size, tile) for size, tiles in RATES.items() for tile in tiles}
    for row, errors in found.items():
        large = (row.columns, *row.tile) in {(64, 2, 128, 1), (96, 4, 32, 1)}
        bound = 0.14 if large else 0.07 if row.columns in (80, 192) and row.tile.keys > 32 else 0.12
        assert rates.root_mean_square(errors) <= bound


def test_the_errors_are_printed(capsys) -> None:
    assert rates.main([RECORDS[1]]) == 0
    assert "to 80 columns, 128x64: 4 times, error 0.0" in capsys.readouterr().out
