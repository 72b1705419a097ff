"""Measured rates of the tiles that Hopper's prefill may have: how long an SM takes for each. choice.py estimates the
time of configurations from them; a plan's reasons name the row of its tile.

`python -m bench.rates --fit` made the table from `RECORDS`: the times of all configurations that fit, for 149 shapes of
`COMMAND`, most of them random. In the model, a call takes as long as the SM that ends last, plus `LAUNCH_US`, and
`FILL_US` with tiles of more than 64 rows. `python -m bench.rates` prints how far each row is from the times,
`--left-out` how fast the choices are for shapes that a table was not fitted to. Tiles of 64 rows were timed with one
CTA an SM (bench/notes.md, 268).
"""

from __future__ import annotations

from typing import NamedTuple

from .config import TileShape

RECORDS = (  # one H200
    "bench/results/h200/2026-11-30-choices.json", "bench/results/h200/2026-11-30-choices-more-dims.json",
    "bench/results/h200/2026-11-30-choices-short.json",
)  # fmt: skip
COMMAND = "python -m bench.choices"
LAUNCH_US = 2.5  # of every call
FILL_US = 1.0  # more of tiles of more than 64 rows, whose first queries and keys are larger


class Rate(NamedTuple):
    """Nanoseconds that an SM takes for one row of a tile."""

    row: float  # once
    key: float  # for each key
    masked: float  # extra for each key of a masked key tile


# key: widest head dim (the larger of queries' and values') that a row serves
RATES: dict[int, dict[TileShape, Rate]] = {
    32: {
        TileShape(1, 64, 2): Rate(3.39, 0.104, 0.0681),
        TileShape(2, 32): Rate(2.57, 0.0877, 0.0378),
        TileShape(2, 64): Rate(2.45, 0.0654, 0.0383),
        TileShape(2, 128): Rate(2.86, 0.0519, 0.0264),
        TileShape(3, 32): Rate(3, 0.0657, 0.0313),
        TileShape(3, 64): Rate(3.26, 0.0513, 0.0303),
        TileShape(3, 128): Rate(3.16, 0.0456, 0.0191),
        TileShape(4, 32): Rate(3.19, 0.0582, 0.0258),
        TileShape(4, 64): Rate(2.58, 0.0464, 0.0277),
    },
    64: {
        TileShape(1, 64, 2): Rate(5.24, 0.115, 0.0532),
        TileShape(2, 32): Rate(4.66, 0.0924, 0.0363),
        TileShape(2, 64): Rate(3.8, 0.073, 0.0374),
        TileShape(2, 128): Rate(3.3, 0.0625, 0.0288),
        TileShape(3, 32): Rate(4.9, 0.0723, 0.0309),
        TileShape(3, 64): Rate(4.84, 0.0592, 0.0255),
        TileShape(3, 128): Rate(4.26, 0.054, 0.022),
        TileShape(4, 32): Rate(4.78, 0.0653, 0.0248),
        TileShape(4, 64): Rate(3.71, 0.0604, 0.0235),
    },
    80: {
        TileShape(1, 64, 2): Rate(7.44, 0.143, 0.0505),
        TileShape(2, 32): Rate(6.19, 0.113, 0.034),
        TileShape(2, 64): Rate(6.13, 0.0874, 0.0323),
        TileShape(2, 128): Rate(8.38, 0.0753, 0.0171),
        TileShape(3, 32): Rate(7.41, 0.0917, 0.0255),
        TileShape(3, 64): Rate(8.36, 0.0706, 0.0199),
        TileShape(3, 128): Rate(7.45, 0.0696, 0.0143),
        TileShape(4, 32): Rate(6.84, 0.081, 0.0245),
        TileShape(4, 64): Rate(4.84, 0.0808, 0.0203),
    },
    96: {
        TileShape(1, 64, 2): Rate(8.69, 0.148, 0.0277),
        TileShape(2, 32): Rate(7.77, 0.105, 0.0176),
        TileShape(2, 64): Rate(6.62, 0.0915, 0.0165),
        TileShape(2, 128): Rate(8.38, 0.0765, 0.0107),
        TileShape(3, 32): Rate(9.75, 0.0979, 0.0136),
        TileShape(3, 64): Rate(10.5, 0.0745, 0.0129),
        TileShape(3, 128): Rate(10.9, 0.075, 0.00955),
        TileShape(4, 32): Rate(12.8, 0.0811, 0.0122),
        TileShape(4, 64): Rate(10.5, 0.0871, 0.0109),
    },
    128: {
        TileShape(1, 64, 2): Rate(7.81, 0.158, 0.0621),
        TileShape(2, 32): Rate(7.18, 0.119, 0.0429),
        TileShape(2, 64): Rate(6.39, 0.0977, 0.0396),
        TileShape(2, 128): Rate(8.34, 0.0833, 0.0251),
        TileShape(3, 32): Rate(6.82, 0.103, 0.0347),
        TileShape(3, 64): Rate(8.18, 0.0848, 0.0302),
    },
    160: {
        TileShape(2, 32): Rate(10.4, 0.138, 0.0384),
        TileShape(2, 64): Rate(11.8, 0.119, 0.0432),
        TileShape(2, 128): Rate(14.9, 0.116, 0.0294),
        TileShape(3, 32): Rate(14.8, 0.112, 0.0366),
        TileShape(3, 64): Rate(16.4, 0.109, 0.0323),
    },
    192: {
        TileShape(2, 32): Rate(12.3, 0.134, 0.05),
        TileShape(2, 64): Rate(14.3, 0.104, 0.0388),
        TileShape(2, 128): Rate(20.7, 0.0957, 0.0258),
        TileShape(3, 32): Rate(19.3, 0.11, 0.0385),
        TileShape(3, 64): Rate(28, 0.0977, 0.0528),
    },
    256: {
        TileShape(2, 32): Rate(21.9, 0.206, 0.04),
        TileShape(2, 64): Rate(22.4, 0.175, 0.0386),
    },
}

# tiles that were measured with ragged and paged batches, too (experiments 128 and 133)
LENGTHS_TILES = {64: (TileShape(2, 128), TileShape(4, 32)), 128: (TileShape(2, 32), TileShape(2, 64))}
