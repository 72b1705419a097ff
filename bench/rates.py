"""How far the plan's table of rates is from the times it was fitted to: `python -m bench.rates`

For each row of warpattn/kernels/sm90/prefill/rates.py: how many times its records hold, the root mean square of the
logarithms of measured over predicted times, and the shape that is farthest off. Keys in parts are left out. `--fit`
prints the table that fits the records best. `--left-out` fits it to all records but one, for each of them, and prints
how fast the plan's choices for that one's shapes would have been. Both `--tuned` and `--left-out` print it of `tune`,
too, whose timer then tells the times on record; the same times decide and judge, so that line shows the rule, not how
well a card repeats its times. Needs no card; other records of `bench.choices` may be named.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.cases import Case
from bench.choices import CHOSEN, checked, empty, read_records
from bench.measure.arguments import status
from warpattn.kernels.sm90.candidates import described
from warpattn.kernels.sm90.prefill.choice import (
    Candidate,
    KeyTiles,
    choose,
    columns_of,
    tiling,
    unsplit_microseconds,
    usual_config,
)
from warpattn.kernels.sm90.prefill.config import SM90Config, TileShape
from warpattn.kernels.sm90.prefill.rates import RATES, RECORDS, Rate
from warpattn.problem import Problem
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import BUILT_IN
from warpattn.runtime.tuned.table import configurations
from warpattn.serving.tuning import fastest

NAME = re.compile(r"(\d+)x(\d+) kv(\d+) q(\d+) heads(\d+) parts(\d+)(?: ctas(\d+))?")
RING = re.compile(r" kv\d+")
CONSUMER_ROWS = 64
SLOWEST = 0.93  # of the speed of the best configuration
# The fit. The logarithm of a rate is a sum of a number for all tiles, one for the tile, one for the columns and one for
# the row, so that rows with few times are like those beside them. How far each may be from zero (standard deviations):
FREE, OF_TILE, OF_COLUMNS, OF_ROW = 2.0, 0.5, 0.5, 0.3
OF_SHAPE = 0.05  # that all times of a shape have in common: clocks, what L2 keeps
NOISE = 0.03  # of a time; those that are more than three times as far off count less
START = Rate(8.0, 0.1, 0.03)
ROUNDS, STEP = 6, 1e-4


class Row(NamedTuple):
    """Of the table: the widest head dim, and a tile."""

    columns: int
    tile: TileShape


class Error(NamedTuple):
    """Of one measured time: the shape, and the logarithm of measured over predicted."""

    shape: str
    log: float


class Time(NamedTuple):
    """A measured time of a tile that has a row."""

    row: Row
    problem: Problem
    counts: KeyTiles
    config: SM90Config
    shape: str
    microseconds: float

    def predicted(self, rate: Rate) -> float:
        """The plan's estimate with another rate."""
        candidate: Candidate = self.counts.candidate(tiling(self.config)._replace(rate=rate))
        return unsplit_microseconds(self.problem, candidate, ARCHS["sm90"])

    def slopes(self, rate: Rate) -> list[float]:
        """How its logarithm changes with that of each number of the rate."""
        own = math.log(self.predicted(rate))
        more = (rate._replace(**{name: value * (1 + STEP)}) for name, value in rate._asdict().items())
        return [(math.log(self.predicted(other)) - own) / STEP for other in more]


def configured(problem: Problem, name: str) -> SM90Config | None:
    """The configuration that `bench.choices.described` gave a name; None where keys are in parts."""
    found = NAME.fullmatch(name)
    assert found is not None, name
    rows, keys, kv, q, heads, parts, ctas = (int(x or 1) for x in found.groups())
    usual, _ = usual_config(problem, problem.seq_q)
    config = replace(
        usual, consumers=rows // CONSUMER_ROWS, block_n=keys, kv_stages=kv, q_stages=q, packed=heads, ctas=ctas
    )
    return config if parts == 1 else None


def times(records: Iterable[dict[str, Any]]) -> Iterator[Time]:
    """Every time of a tile that has a row."""
    for entry in (entry for record in records for entry in record["cases"]):
        case = Case(**entry["case"])
        problem = checked(case, empty(case)).problem
        counts = KeyTiles(problem)
        for name, measured in entry["microseconds"].items():
            config = configured(problem, entry["chosen"] if name == CHOSEN else name)
            if config is None:
                continue
            row = Row(columns_of(tiling(config).wide), config.tile_shape)
            if row.tile in RATES[row.columns]:
                yield Time(row, problem, counts, config, case.name, measured)


def by_row(records: Iterable[dict[str, Any]]) -> dict[Row, list[Error]]:
    """The errors of each row that was measured."""
    found: dict[Row, list[Error]] = {}
    for time in times(records):
        predicted = time.predicted(RATES[time.row.columns][time.row.tile])
        error = Error(f"{time.shape}, {time.config.packed} heads", math.log(time.microseconds / predicted))
        found.setdefault(time.row, []).append(error)
    return dict(sorted(found.items()))


def root_mean_square(row: Sequence[Error]) -> float:
    """Of some errors."""
    return math.sqrt(sum(error.log**2 for error in row) / len(row))


class Fit:
    """The logarithms of rates as sums, and what all times of a shape have in common."""

    def __init__(self, shapes: Iterable[str]) -> None:
        self.rows = [Row(columns, tile) for columns, tiles in RATES.items() for tile in tiles]
        spread: dict[object, float] = {"all": FREE}
        for row in self.rows:
            spread |= {row.tile: OF_TILE, row.columns: OF_COLUMNS, row: OF_ROW}
        self.places = {term: n * len(START) for n, term in enumerate(spread)}
        numbers = [size for size in spread.values() for _ in START]
        self.shapes = {shape: len(numbers) + n for n, shape in enumerate(dict.fromkeys(shapes))}
        self.certain = torch.tensor(numbers + [OF_SHAPE] * len(self.shapes), dtype=torch.float64) ** -2
        self.found = torch.zeros_like(self.certain)

    def terms(self, row: Row) -> list[int]:
        """Where the numbers of a row's terms begin."""
        return [self.places[term] for term in ("all", row.tile, row.columns, row)]

    def rate(self, row: Row) -> Rate:
        """Of a row."""
        logs = (sum(self.found[place + n].item() for place in self.terms(row)) for n in range(len(START)))
        return Rate(*(start * math.exp(log) for start, log in zip(START, logs, strict=True)))

    def improve(self, measured: Sequence[Time]) -> None:
        """A step of Gauss and Newton towards some times."""
        slopes = torch.zeros(len(measured), len(self.found), dtype=torch.float64)
        errors = torch.zeros(len(measured), dtype=torch.float64)
        rates = {row: self.rate(row) for row in self.rows}
        for n, time in enumerate(measured):
            own, shape = torch.tensor(time.slopes(rates[time.row])), self.shapes[time.shape]
            for place in self.terms(time.row):
                slopes[n, place : place + len(START)] = own
            slopes[n, shape] = 1
            errors[n] = math.log(time.microseconds / time.predicted(rates[time.row])) - self.found[shape]
        weights = NOISE**-2 / (1 + (errors / (3 * NOISE)) ** 2)
        curvature = (slopes.T * weights) @ slopes + self.certain.diag()
        downhill = slopes.T @ (weights * errors) - self.certain * self.found
        self.found += torch.linalg.solve(curvature, downhill).clamp(-1, 1)


def fitted(measured: Sequence[Time]) -> dict[int, dict[TileShape, Rate]]:
    """The table of rates whose estimates are nearest to some times, for all of its rows."""
    fit = Fit(time.shape for time in measured)
    for _ in range(ROUNDS):
        fit.improve(measured)
    table: dict[int, dict[TileShape, Rate]] = {}
    for row in fit.rows:
        table.setdefault(row.columns, {})[row.tile] = Rate(*(float(f"{x:.3g}") for x in fit.rate(row)))
    return table


@contextmanager
def weighed_by(table: Mapping[int, Mapping[TileShape, Rate]]) -> Iterator[None]:
    """Plans weigh tiles by another table."""
    own = {columns: dict(tiles) for columns, tiles in RATES.items()}
    try:
        _weigh(table)
        yield
    finally:
        _weigh(own)


def _weigh(table: Mapping[int, Mapping[TileShape, Rate]]) -> None:
    for columns, tiles in table.items():
        RATES[columns].update(tiles)
    choose.cache_clear()


def time_of(measured: Mapping[str, float], name: str) -> float | None:
    """The measured time of a configuration, or of the same tile with rings of another depth; None without one."""
    same = (time for other, time in measured.items() if RING.sub("", other) == RING.sub("", name))
    return measured.get(name, next(same, None))


def speed_of(entry: dict[str, Any]) -> float | None:
    """The speed of the plan's choice for a shape on record over that of the best configuration; None of a choice
    without a time."""
    case, measured = Case(**entry["case"]), entry["microseconds"]
    chosen = described(choose(checked(case, empty(case)).problem, ARCHS["sm90"]))
    if chosen == entry["chosen"]:
        return float(entry["speed"])  # of rounds
    time = time_of(measured, chosen)
    return measured[entry["best"]] / time if time is not None else None


def speeds(record: dict[str, Any]) -> dict[str, float | None]:
    """By shape, `speed_of`."""
    return {entry["case"]["name"]: speed_of(entry) for entry in record["cases"]}


def tuned_speeds(record: dict[str, Any]) -> dict[str, float | None]:
    """By shape, the speed of what `tune` would choose by the times on record, over that of the best configuration;
    None of a choice without a time."""
    found: dict[str, float | None] = {}
    for entry in record["cases"]:
        case, measured = Case(**entry["case"]), dict(entry["microseconds"])
        measured[entry["chosen"]] = measured.pop(CHOSEN)
        names = configurations(checked(case, empty(case)).problem)
        known = {name: measured[name] for name in names.others if name in measured}
        found[case.name] = None
        if (built_in := time_of(measured, names.built_in)) is not None:
            known[BUILT_IN] = built_in
            found[case.name] = min(measured.values()) / known[fastest(known)]
    return found


class LeftOut(NamedTuple):
    """Speeds by shape, of the plan's choices and of what `tune` makes of them."""

    chosen: dict[str, float | None]
    tuned: dict[str, float | None]


def left_out(records: Sequence[dict[str, Any]]) -> LeftOut:
    """The same for all shapes, with the rates that the other records give."""
    found = LeftOut({}, {})
    for one in records:
        with weighed_by(fitted(list(times(record for record in records if record is not one)))):
            found.chosen.update(speeds(one))
            found.tuned.update(tuned_speeds(one))
    return found


def summary(found: Mapping[str, float | None]) -> str:
    """The lowest speeds, in a line."""
    known = sorted((speed, shape) for shape, speed in found.items() if speed is not None)
    slow = ", ".join(f"{speed:.3f} ({shape})" for speed, shape in known if speed < SLOWEST)
    return (
        f"{len(known)} shapes with a time: least {known[0][0]:.3f}, 5 % {known[len(known) // 20][0]:.3f}, mean "
        f"{sum(speed for speed, _ in known) / len(known):.4f}, below {SLOWEST}: {slow or 'none'}; without a time: "
        f"{', '.join(shape for shape, speed in found.items() if speed is None) or 'none'}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each row, or the table of the fit, or the speeds of choices."""
    parser = argparse.ArgumentParser(prog="python -m bench.rates", description=__doc__)
    parser.add_argument("records", nargs="*", type=Path, default=[Path(record) for record in RECORDS])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--fit", action="store_true", help="print the table of the best fit")
    what.add_argument("--left-out", action="store_true", help="speeds of choices for records that were not fitted")
    what.add_argument("--tuned", action="store_true", help="speeds of choices, and of what tune would choose")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    records = read_records(args.records)
    if args.fit:
        for columns, tiles in fitted(list(times(records))).items():
            print(f"    {columns}: {{")
            for tile, rate in tiles.items():
                shape = ", ".join(map(str, tile if tile.ctas > 1 else tile[:2]))
                print(f"        TileShape({shape}): Rate({', '.join(f'{x:g}' for x in rate)}),")
            print("    },")
    elif args.left_out or args.tuned:
        print("today's table:", summary({shape: x for record in records for shape, x in speeds(record).items()}))
        print("tuned:", summary({shape: x for record in records for shape, x in tuned_speeds(record).items()}))
        if args.left_out:
            found = left_out(records)
            print("left out:", summary(found.chosen))
            print("left out, tuned:", summary(found.tuned))
    else:
        for row, found in by_row(records).items():
            worst = max(found, key=lambda error: abs(error.log))
            two = f" ctas{row.tile.ctas}" * (row.tile.ctas > 1)
            tile = f"{row.tile.consumers * CONSUMER_ROWS}x{row.tile.keys}{two}"
            print(
                f"to {row.columns} columns, {tile}: {len(found)} times, error {root_mean_square(found):.3f}, "
                f"most {math.exp(worst.log):.2f} x ({worst.shape})"
            )
    return 0


if __name__ == "__main__":
    sys.exit(status(main))
