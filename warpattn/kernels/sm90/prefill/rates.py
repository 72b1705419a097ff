"""Measured rates of the tiles that Hopper's prefill may have: how long an SM takes for each. choice.py estimates the
time of configurations from them; a plan's reasons name the row of its tile.

The rates are fitted to the times in `RECORDS` (30 random shapes each, by `COMMAND`, seeds 0, 2 and 3; those of 80 and
96 columns again when P·V became exact) and to experiments 117, 119, 121, 123, 171 and 189 in bench/notes.md. In the
model, a call takes as long as the SM that ends last, plus `LAUNCH_US`, plus (`ALONE` - 1) times the longest tile.
`python -m bench.rates` prints how far each row is from the times: 3 to 12 % (root mean square), 13 % for 128 x 128 at
64 columns. They are older than experiment 266, which made most tiles faster, up to 1.12 times. A plan compares tiles,
and at 128 columns all of them have gained.
"""

from __future__ import annotations

from typing import NamedTuple

from .config import TileShape

RECORDS = (  # one H200 each
    "bench/results/h200/2026-11-22-choices.json", "bench/results/h200/2026-11-23-choices.json",
    "bench/results/h200/2026-11-23-choices-seed3.json", "bench/results/h200/2026-11-29-choices-exact.json",
)  # fmt: skip
COMMAND = "python -m bench.choices --shapes 30"
LAUNCH_US = 3.0
ALONE = 1.2  # a tile alone takes so many times its rate: in steady state neighbouring tiles fill its gaps


class Rate(NamedTuple):
    """Nanoseconds that an SM takes for one row of a tile."""

    row: float  # once
    key: float  # for each key
    masked: float  # extra for each key of a masked key tile


# key: widest head dim (the larger of queries' and values') that a row serves
RATES: dict[int, dict[TileShape, Rate]] = {
    64: {
        TileShape(1, 64, 2): Rate(8.4, 0.112, 0.021),
        TileShape(2, 32): Rate(5.2, 0.105, 0.023),
        TileShape(2, 64): Rate(4.5, 0.081, 0.03),
        TileShape(2, 128): Rate(7.1, 0.07, 0.034),
        TileShape(3, 32): Rate(6.3, 0.081, 0.028),
        TileShape(3, 64): Rate(7.2, 0.065, 0.03),
        TileShape(3, 128): Rate(10.5, 0.0565, 0.02),
        TileShape(4, 32): Rate(7.5, 0.07, 0.03),
        TileShape(4, 64): Rate(8.3, 0.063, 0.022),
    },
    80: {
        TileShape(1, 64, 2): Rate(5.96, 0.148, 0.0168),
        TileShape(2, 32): Rate(4.77, 0.127, 0.0136),
        TileShape(2, 64): Rate(5.08, 0.0903, 0.0178),
        TileShape(2, 128): Rate(4.87, 0.0773, 0.0205),
        TileShape(3, 32): Rate(6.49, 0.0975, 0.0129),
        TileShape(3, 64): Rate(7.54, 0.0733, 0.0127),
        TileShape(3, 128): Rate(5.94, 0.0693, 0.0155),
        TileShape(4, 32): Rate(7.96, 0.086, 0.012),
    },
    96: {
        TileShape(1, 64, 2): Rate(7.11, 0.154, 0.00789),
        TileShape(2, 32): Rate(8.05, 0.119, 0.00693),
        TileShape(2, 64): Rate(7.69, 0.0952, 0.00901),
        TileShape(2, 128): Rate(8.87, 0.0831, 0.0117),
        TileShape(3, 32): Rate(12, 0.0915, 0.0065),
        TileShape(3, 64): Rate(11.9, 0.0769, 0.00639),
        TileShape(3, 128): Rate(12.2, 0.0717, 0.0098),
        TileShape(4, 32): Rate(14.3, 0.082, 0.00602),
    },
    128: {
        TileShape(1, 64, 2): Rate(9.0, 0.163, 0.026),
        TileShape(2, 32): Rate(7.6, 0.143, 0.027),
        TileShape(2, 64): Rate(9.6, 0.104, 0.027),
        TileShape(2, 128): Rate(7.0, 0.0957, 0.060),
        TileShape(3, 32): Rate(9.7, 0.114, 0.026),
        TileShape(3, 64): Rate(11.4, 0.094, 0.027),
    },
    192: {
        TileShape(2, 32): Rate(10.6, 0.164, 0.025),
        TileShape(2, 64): Rate(13.5, 0.129, 0.01),
        TileShape(2, 128): Rate(17.3, 0.112, 0.009),
        TileShape(3, 32): Rate(17.6, 0.14, 0.016),
        TileShape(3, 64): Rate(26.4, 0.114, 0.012),
    },
    256: {
        TileShape(2, 32): Rate(24.6, 0.256, 0.018),
        TileShape(2, 64): Rate(29.5, 0.193, 0.021),
    },
}

# tiles that were measured with ragged and paged batches, too (experiments 128 and 133)
LENGTHS_TILES = {64: (TileShape(2, 128), TileShape(4, 32)), 128: (TileShape(2, 32), TileShape(2, 64))}
