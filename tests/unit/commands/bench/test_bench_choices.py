"""bench.choices without a card: the shapes it draws, the configurations it tries, and what it prints and writes."""

import json
import math
import re
from pathlib import Path

import pytest

from bench import choices, rates
from bench.cases import find
from warpattn.kernels.sm90.candidates import described
from warpattn.kernels.sm90.prefill.config import SMEM_LIMIT
from warpattn.kernels.sm90.prefill.rates import RATES, RECORDS
from warpattn.serving.tuning import LEAST_GAIN


def test_drawn_shapes_are_the_same_for_a_seed() -> None:
    first, again, other = ([case.name for case in choices.shapes(6, seed)] for seed in (0, 0, 1))
    assert first == again != other
    assert all(case.seq_q > 16 and case.flops() > 0 for case in choices.shapes(20, 2))


WITHIN = 1 / LEAST_GAIN - 1e-9
CASES = [find("wide-1x256o32k-h32o8-d128-causal"), *choices.shapes(4, 0)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_configuration_fits_and_is_another(case) -> None:
    found = choices.choices(case)
    assert next(iter(found)) == choices.CHOSEN
    assert len(set(map(described, found.values()))) == len(found) > 1
    for choice in found.values():
        config = choice.config
        assert (config.smem_bytes + 512) * config.ctas <= SMEM_LIMIT
        assert config.topology.registers * config.ctas <= 65_536
        assert case.heads_q // case.heads_kv % config.packed == 0
        assert config.split == (choice.partitions > 1)


def test_the_record_has_the_best_beside_the_choice(monkeypatch, capsys, tmp_path) -> None:
    def measured(case, tile, rounds):
        times = {choices.CHOSEN: 10.0, "another": 9.0}
        return {"case": case.asdict(), "chosen": "this", "best": "another", "speed": 0.9, "microseconds": times,
                "wrong": {}}  # fmt: skip

    monkeypatch.setattr(choices, "compile_all", lambda cases, tile, workers: None)
    monkeypatch.setattr(choices, "measured", measured)
    monkeypatch.setattr(choices, "require_card", lambda parser, what: None)
    assert choices.main(["--shapes", "2", "--seed", "0", "1", "--json", str(tmp_path / "record.json")]) == 0
    assert "least 0.900, 4 below 0.93" in capsys.readouterr().out
    entries = json.loads((tmp_path / "record.json").read_text())["cases"]
    assert [entry["best"] for entry in entries] == ["another"] * 4
    assert len({entry["case"]["name"] for entry in entries}) == 4


def test_a_later_record_of_a_tile_renews_the_times_of_that_tile(tmp_path) -> None:
    """As they are on the card of the earlier one: times of the choice, which both have, tell how the cards differ."""

    def written(name: str, tile: str, choice: str, **times: float) -> Path:
        entry = {"case": {"name": "shape"}, "chosen": choice, "best": choices.CHOSEN, "microseconds": times}
        (tmp_path / name).write_text(json.dumps({"settings": {"tile": tile}, "cases": [entry]}))
        return tmp_path / name

    first = written("first", "", "wide", chosen=10.0, half=30.0, narrow=20.0)
    (record,) = choices.read_records([first, written("second", "half", "wide", chosen=11.0, half=8.8)])
    (entry,) = record["cases"]
    assert entry["microseconds"] == pytest.approx({"chosen": 10.0, "half": 8.0, "narrow": 20.0})
    assert entry["best"] == "half" and entry["speed"] == pytest.approx(0.8) and entry["chosen"] == "wide"
    (record,) = choices.read_records([first, written("third", "half", "half", chosen=12.0)])
    assert record["cases"][0]["microseconds"] == {"chosen": 10.0, "half": 12.0, "narrow": 20.0}
    whole = choices.read_records([first, written("fourth", "", "narrow", chosen=7.0)])
    assert [len(record["cases"]) for record in whole] == [0, 1]


def test_every_row_of_the_table_is_near_its_times() -> None:
    """What rates.py says of itself."""
    found = rates.by_row(choices.read_records([Path(record) for record in RECORDS]))
    assert set(found) == {rates.Row(size, tile) for size, tiles in RATES.items() for tile in tiles}
    assert all(rates.root_mean_square(errors) < 0.10 for errors in found.values())


def test_a_fit_finds_the_rates_that_times_were_made_with() -> None:
    """Times by a table whose rates are all a fifth higher, and one that is wrong."""
    slower = {columns: {tile: type(rate)(*(1.2 * x for x in rate)) for tile, rate in tiles.items()}
              for columns, tiles in RATES.items()}  # fmt: skip
    made = [time._replace(microseconds=time.predicted(slower[time.row.columns][time.row.tile]))
            for time in rates.times([json.loads(Path(RECORDS[0]).read_text())])]  # fmt: skip
    fitted = rates.fitted([made[0]._replace(microseconds=9 * made[0].microseconds), *made[1:]])
    errors = [math.log(time.predicted(fitted[time.row.columns][time.row.tile]) / time.microseconds) for time in made]
    assert math.sqrt(sum(error**2 for error in errors) / len(errors)) < 0.03


def test_plans_weighed_by_another_table_weigh_by_their_own_again() -> None:
    own = {columns: dict(tiles) for columns, tiles in RATES.items()}
    record = json.loads(Path(RECORDS[0]).read_text())
    record["cases"] = [entry for entry in record["cases"] if entry["case"]["name"].startswith("46x1114/1114")]
    slow = {128: {tile: rate._replace(key=9.0) for tile, rate in RATES[128].items() if tile.keys == 128}}
    with rates.weighed_by(slow):
        (speed,) = rates.speeds(record).values()
        assert speed is not None and speed < 0.95
    assert own == RATES and set(rates.speeds(record).values()) == {1.0}


@pytest.mark.full
def test_choices_for_records_that_were_left_out(capsys) -> None:
    """What docs/kernels/sm90.md says of them."""
    assert rates.main(["--left-out"]) == 0
    own, tuned, left_out, left_out_tuned = capsys.readouterr().out.splitlines()
    assert "159 shapes with a time: least 0.871" in own and "158 shapes with a time: least 0.777" in left_out
    for line in (tuned, left_out_tuned):
        assert float(re.search(r"15\d shapes with a time: least ([\d.]+)", line)[1]) >= WITHIN


def test_tuned_choices_are_the_best_on_record(capsys) -> None:
    """But for what `tune` takes for noise, in favour of the built-in choice."""
    record = choices.read_records(map(Path, RECORDS))[0]
    speeds = rates.tuned_speeds(record)
    own = rates.speeds(record)
    assert all(speed >= max(WITHIN, own[shape] - 1e-3) for shape, speed in speeds.items() if speed is not None)
    assert all(speed is not None for speed in [*speeds.values(), *own.values()])
    record["cases"] = record["cases"][:1]
    us = record["cases"][0]["microseconds"]
    slow = next(name for name in us if name != choices.CHOSEN)
    us[slow] = 0.5 * min(us.values())
    assert rates.tuned_speeds(record) == {record["cases"][0]["case"]["name"]: 1.0}


def test_the_errors_are_printed(capsys) -> None:
    assert rates.main([RECORDS[1]]) == 0
    assert "to 72 columns, 128x64: 23 times, error 0.0" in capsys.readouterr().out
