"""How far the plan's table of rates is from the times it was fitted to: `python -m bench.rates`

For each row of warpattn/kernels/sm90/prefill/rates.py: how many times its records hold, the root mean square of the
logarithms of measured over predicted times, and the shape that is farthest off. Keys in parts are left out. Needs no
card; other records of `bench.choices` may be named.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bench.cases import Case
from bench.choices import CHOSEN, checked, empty
from warpattn.kernels.sm90.prefill.choice import KeyTiles, tile_shape, tiling, unsplit_microseconds
from warpattn.kernels.sm90.prefill.config import SM90Config, usual_config
from warpattn.kernels.sm90.prefill.rates import RATES, RECORDS, TileShape, columns_of
from warpattn.problem import Problem
from warpattn.problem.arch import ARCHS

NAME = re.compile(r"(\d+)x(\d+) kv(\d+) q(\d+) heads(\d+) parts(\d+)(?: ctas(\d+))?")
CONSUMER_ROWS = 64


class Row(NamedTuple):
    """Of the table: the widest head dim, and a tile."""

    columns: int
    tile: TileShape


class Error(NamedTuple):
    """Of one measured time: the shape, and the logarithm of measured over predicted."""

    shape: str
    log: float


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


def errors(records: Iterable[dict[str, Any]]) -> Iterator[tuple[Row, Error]]:
    """Of every time of a tile that has a row."""
    for entry in (entry for record in records for entry in record["cases"]):
        case = Case(**entry["case"])
        problem = checked(case, empty(case)).problem
        counts = KeyTiles(problem)
        for name, measured in entry["microseconds"].items():
            config = configured(problem, entry["chosen"] if name == CHOSEN else name)
            if config is None or tile_shape(config) not in RATES[columns_of(config.wide)]:
                continue
            predicted = unsplit_microseconds(problem, counts.candidate(tiling(config)), ARCHS["sm90"])
            row = Row(columns_of(config.wide), tile_shape(config))
            yield row, Error(f"{case.name}, {config.packed} heads", math.log(measured / predicted))


def by_row(records: Iterable[dict[str, Any]]) -> dict[Row, list[Error]]:
    """The errors of each row that was measured."""
    found: dict[Row, list[Error]] = {}
    for row, error in errors(records):
        found.setdefault(row, []).append(error)
    return dict(sorted(found.items()))


def root_mean_square(row: Sequence[Error]) -> float:
    """Of some errors."""
    return math.sqrt(sum(error.log**2 for error in row) / len(row))


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each row."""
    paths = (sys.argv[1:] if argv is None else argv) or RECORDS
    for row, found in by_row(json.loads(Path(path).read_text()) for path in paths).items():
        worst = max(found, key=lambda error: abs(error.log))
        tile = f"{row.tile.consumers * CONSUMER_ROWS}x{row.tile.keys}" + f" ctas{row.tile.ctas}" * (row.tile.ctas > 1)
        print(
            f"to {row.columns} columns, {tile}: {len(found)} times, error {root_mean_square(found):.3f}, "
            f"most {math.exp(worst.log):.2f} x ({worst.shape})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
