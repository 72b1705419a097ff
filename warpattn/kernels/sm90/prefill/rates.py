"""Tiles of Hopper's dense prefill that the plan may choose from, and how long an SM takes for each.

The numbers are a fit to the 360 times of `python -m bench.choices --shapes 30` (one H200, 2026-11-22, record
bench/results/h200/2026-11-22-choices.json) and those of experiments 117, 119, 121 and 123 in bench/notes.md: the time
of a call is that of the SM that ends last, plus `LAUNCH_US`. Errors are 3 to 9 % for each tile (root mean square).
"""

from __future__ import annotations

from typing import NamedTuple

LAUNCH_US = 3.0
ALONE = 1.2  # times its rate that a tile takes from its start to its end: others fill the gaps of its chain


class Rate(NamedTuple):
    """Nanoseconds that an SM takes for a row of a tile: once, for each key, and more for each key of a masked tile."""

    row: float
    key: float
    masked: float


class TileShape(NamedTuple):
    """Warpgroups of 64 rows, keys of a tile, CTAs on an SM."""

    consumers: int
    keys: int
    ctas: int = 1


# by the wider head dim, up to so many columns
RATES: dict[int, dict[TileShape, Rate]] = {
    64: {
        TileShape(1, 64, 2): Rate(8.4, 0.112, 0.021),
        TileShape(2, 32): Rate(5.2, 0.105, 0.023),
        TileShape(2, 64): Rate(4.5, 0.081, 0.021),
        TileShape(2, 128): Rate(7.1, 0.070, 0.022),
        TileShape(3, 32): Rate(6.3, 0.081, 0.022),
        TileShape(3, 64): Rate(7.2, 0.065, 0.026),
        TileShape(3, 128): Rate(10.5, 0.0565, 0.016),
        TileShape(4, 32): Rate(7.5, 0.070, 0.022),
        TileShape(4, 64): Rate(8.3, 0.063, 0.022),
    },
    96: {
        TileShape(1, 64, 2): Rate(10.2, 0.155, 0.034),
        TileShape(2, 32): Rate(7.6, 0.145, 0.045),
        TileShape(2, 64): Rate(10.3, 0.096, 0.063),
        TileShape(2, 128): Rate(15.8, 0.084, 0.051),
        TileShape(3, 32): Rate(8.2, 0.130, 0.023),
        TileShape(3, 64): Rate(13.5, 0.081, 0.032),
    },
    128: {
        TileShape(1, 64, 2): Rate(10.0, 0.160, 0.024),
        TileShape(2, 32): Rate(7.6, 0.143, 0.027),
        TileShape(2, 64): Rate(9.6, 0.104, 0.027),
        TileShape(2, 128): Rate(7.0, 0.0957, 0.060),
        TileShape(3, 32): Rate(9.7, 0.114, 0.026),
        TileShape(3, 64): Rate(11.4, 0.094, 0.027),
    },
    192: {
        TileShape(2, 32): Rate(9.2, 0.164, 0.018),
        TileShape(2, 64): Rate(11.2, 0.128, 0.018),
        TileShape(2, 128): Rate(13.7, 0.111, 0.024),
    },
    256: {
        TileShape(2, 32): Rate(24.6, 0.256, 0.018),
        TileShape(2, 64): Rate(29.5, 0.193, 0.021),
    },
}

# of those, the ones measured where lengths are on the device, too (experiments 128 and 133)
LENGTHS_TILES = {64: (TileShape(2, 128), TileShape(4, 32)), 128: (TileShape(2, 32), TileShape(2, 64))}


def rates_of(wide: int) -> dict[TileShape, Rate]:
    """The tiles for head dims of at most `wide` columns."""
    return RATES[min((size for size in RATES if size >= wide), default=max(RATES))]


def tiles_of(wide: int, lengths: bool) -> tuple[TileShape, ...]:
    """Tiles for head dims of at most `wide` columns; with `lengths`, for ragged and paged batches."""
    if lengths:
        return LENGTHS_TILES.get(64 if wide <= 64 else 128 if wide <= 128 else 0, ())
    return tuple(rates_of(wide))


def rate_of(wide: int, tile: TileShape) -> Rate:
    """The rate of a tile, that of the nearest one if it was not measured."""
    rates = rates_of(wide)
    return rates.get(tile) or rates[min(rates, key=lambda known: sum(abs(a - b) for a, b in zip(known, tile)))]
