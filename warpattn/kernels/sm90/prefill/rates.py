"""Measured rates of the tiles that Hopper's prefill may have: how long an SM takes for each. choice.py estimates the
time of configurations from them; a plan's reasons name the row of its tile.

`python -m bench.rates --fit` made the table from `RECORDS`: the times of all configurations that fit, for 159 shapes of
`COMMAND`, most of them random. In the model, a call takes `LAUNCH_US`, `FILL_US` with tiles of more than 64 rows, and
the cubic mean of two times: until the last SM ends, and until memory has brought or taken all bytes. A rate is that of
a CTA which has its SM alone. `python -m bench.rates` prints how far each row is from the times, `--left-out` how fast
the choices are for shapes that a table was not fitted to.
"""

from __future__ import annotations

from typing import NamedTuple

from .config import TileShape

RECORDED = "bench/results/h200/2026-1{}.json"  # of one H200
FITTED = ("", "-more-dims", "-short", "-half-tiles", "-wide")
HEADS = ("heads7", "heads5")  # tiles of heads that do not fill their rows, see `UNFILLED`
RECORDS = (
    *[RECORDED.format(f"1-30-choices{name}") for name in FITTED],
    *[RECORDED.format(f"2-01-choices-{name}") for name in HEADS],
)
COMMAND = "python -m bench.choices"
LAUNCH_US = 2.25  # of every call
BYTES_US = 4.6e6  # bytes that memory brings or takes in a microsecond
TOGETHER = 1.25  # tiles that two CTAs of an SM end while one alone ends one
FILL_US = 1.0  # more of tiles of more than 64 rows, whose first queries and keys are larger


class Rate(NamedTuple):
    """Nanoseconds that an SM takes for one row of a tile."""

    row: float  # once
    key: float  # for each key
    masked: float  # extra for each key of a masked key tile


# key: widest head dim (the larger of queries' and values') that a row serves
RATES: dict[int, dict[TileShape, Rate]] = {
    32: {
        TileShape(1, 64, 2): Rate(3.33, 0.0815, 0.0543),
        TileShape(2, 32): Rate(2.88, 0.0881, 0.0361),
        TileShape(2, 64): Rate(2.72, 0.0652, 0.0388),
        TileShape(2, 128): Rate(2.91, 0.0518, 0.0278),
        TileShape(3, 32): Rate(3.32, 0.0657, 0.0305),
        TileShape(3, 64): Rate(3.44, 0.051, 0.0311),
        TileShape(3, 128): Rate(4.17, 0.0449, 0.0167),
        TileShape(4, 32): Rate(3.44, 0.0585, 0.025),
        TileShape(4, 64): Rate(2.99, 0.046, 0.028),
    },
    64: {
        TileShape(1, 64, 2): Rate(3.89, 0.0936, 0.0534),
        TileShape(2, 32): Rate(4.13, 0.0938, 0.0361),
        TileShape(2, 64): Rate(3.11, 0.0745, 0.0377),
        TileShape(2, 128): Rate(2.37, 0.0641, 0.0303),
        TileShape(3, 32): Rate(4.35, 0.0737, 0.0307),
        TileShape(3, 64): Rate(4.46, 0.0606, 0.0237),
        TileShape(3, 128): Rate(3.9, 0.0554, 0.0209),
        TileShape(4, 32): Rate(4.07, 0.0667, 0.025),
        TileShape(4, 64): Rate(2.92, 0.0617, 0.024),
    },
    72: {
        TileShape(1, 64, 2): Rate(11.8, 0.18, 0.0514),
        TileShape(2, 32): Rate(8.19, 0.112, 0.0292),
        TileShape(2, 64): Rate(7.94, 0.0866, 0.0303),
        TileShape(2, 128): Rate(9.5, 0.076, 0.0138),
        TileShape(3, 32): Rate(8.74, 0.0909, 0.0271),
        TileShape(3, 64): Rate(9.49, 0.0694, 0.0223),
        TileShape(3, 128): Rate(8.07, 0.0686, 0.0166),
        TileShape(4, 32): Rate(6.97, 0.0807, 0.0259),
        TileShape(4, 64): Rate(4.78, 0.0808, 0.0206),
    },
    80: {
        TileShape(1, 64, 2): Rate(8.81, 0.118, 0.0502),
        TileShape(2, 32): Rate(3.71, 0.12, 0.0386),
        TileShape(2, 64): Rate(4.94, 0.0874, 0.0347),
        TileShape(2, 128): Rate(8.52, 0.0735, 0.0146),
        TileShape(3, 32): Rate(6.54, 0.0936, 0.0251),
        TileShape(3, 64): Rate(8.31, 0.0709, 0.017),
        TileShape(3, 128): Rate(8.22, 0.0705, 0.00982),
        TileShape(4, 32): Rate(8.67, 0.0816, 0.0198),
        TileShape(4, 64): Rate(7.3, 0.0799, 0.0154),
    },
    96: {
        TileShape(1, 64, 2): Rate(7.98, 0.114, 0.0682),
        TileShape(2, 32): Rate(8.07, 0.0979, 0.0302),
        TileShape(2, 64): Rate(6.08, 0.0908, 0.0251),
        TileShape(2, 128): Rate(8.16, 0.0756, 0.0145),
        TileShape(3, 32): Rate(10.7, 0.0938, 0.0178),
        TileShape(3, 64): Rate(10.9, 0.0738, 0.0172),
        TileShape(3, 128): Rate(11.4, 0.0743, 0.0142),
        TileShape(4, 32): Rate(14.2, 0.0747, 0.0177),
        TileShape(4, 64): Rate(11.3, 0.0868, 0.0129),
    },
    128: {
        TileShape(1, 64, 2): Rate(4.75, 0.13, 0.0861),
        TileShape(2, 32): Rate(4.69, 0.119, 0.0499),
        TileShape(2, 64): Rate(3.58, 0.0985, 0.0448),
        TileShape(2, 128): Rate(4.74, 0.0847, 0.0289),
        TileShape(3, 32): Rate(4.43, 0.103, 0.0396),
        TileShape(3, 64): Rate(4.97, 0.086, 0.0357),
    },
    160: {
        TileShape(2, 32): Rate(8.36, 0.139, 0.0296),
        TileShape(2, 64): Rate(11.8, 0.117, 0.0364),
        TileShape(2, 128): Rate(15.1, 0.114, 0.0227),
        TileShape(3, 32): Rate(13.8, 0.116, 0.0291),
        TileShape(3, 64): Rate(15.9, 0.108, 0.0251),
    },
    192: {
        TileShape(2, 32): Rate(9.59, 0.138, 0.0598),
        TileShape(2, 64): Rate(13.1, 0.106, 0.0366),
        TileShape(2, 128): Rate(20.6, 0.0973, 0.0207),
        TileShape(3, 32): Rate(18.2, 0.111, 0.0423),
        TileShape(3, 64): Rate(26, 0.0978, 0.0711),
    },
    256: {
        TileShape(2, 32): Rate(14.8, 0.21, 0.0434),
        TileShape(2, 64): Rate(15.9, 0.179, 0.0368),
    },
}

# tiles that were measured with ragged and paged batches, too (experiments 128 and 133)
LENGTHS_TILES = {64: (TileShape(2, 128), TileShape(4, 32)), 128: (TileShape(2, 32), TileShape(2, 64))}
