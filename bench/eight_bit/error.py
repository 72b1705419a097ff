"""The error of attention over 8-bit keys and values: `python3 -m bench.eight_bit.error` prints it as a table.

Against the bf16 tensors that they were made of, in fp64 on both sides, so that nothing but the stored values differs.
Two kinds of inputs: normally distributed ones, and the same with the outliers that models have, 2 of 128 columns of the
keys 20 times as large and 1 of 64 values 10 times. Rotated ones have a Hadamard rotation of q and k before. The last
rows are of weights that products of 8 bits round to e4m3, over exact queries, keys and values, for powers of two that a
row's largest weight may be.
"""

from __future__ import annotations

import sys
from itertools import product

import torch
from torch import Tensor

import warpattn as wa
from bench.measure.arguments import status

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
GRANULARITIES: tuple[str | int, ...] = ("tensor", "head", "token", 64)
QUERIES_TOO = tuple((("e4m3", FORMATS["e4m3"]), per, True, None) for per in GRANULARITIES)
ROTATED = tuple((*row[:3], wa.Hadamard()) for row in QUERIES_TOO)
KEYS, HEADS, HEADS_KV, DIM = 2048, 8, 2, 128
LARGEST_WEIGHTS = (0, 2, 6, 5.5)  # log2; the kernels' rows begin with 6, and keep their reference while it fits


def inputs(outliers: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in bf16."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, rows, heads, DIM, generator=generator)
               for rows, heads in ((16, HEADS), (KEYS, HEADS_KV), (KEYS, HEADS_KV)))  # fmt: skip
    if outliers:
        k[..., 7::64] *= 20
        q[..., 7::64] /= 20  # or one key would have all the weight
        v[:, 5::64] *= 10
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def error(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """(1 - cosine, relative error in the Euclidean norm)."""
    found, expected = found.flatten(), expected.flatten()
    cosine = torch.dot(found, expected) / (found.norm() * expected.norm())
    return 1 - cosine.item(), ((found - expected).norm() / expected.norm()).item()


def with_rounded_weights(q: Tensor, k: Tensor, v: Tensor, power: float) -> Tensor:
    """Attention in fp64 whose weights are rounded to e4m3, a row's largest from 2^power; not so their sum."""
    q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // HEADS_KV, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * DIM**-0.5
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * 2.0**power
    rounded = wa.quantize(weights.float(), scale=torch.ones(())).values.double()
    return (rounded @ v / weights.sum(-1, keepdim=True)).transpose(1, 2)


def table() -> str:
    """Markdown: a row for each format and granularity, and for rounded weights."""
    columns = ("format", "scale per", "relative error", "1 − cosine", "with outliers", "1 − cosine")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    given = [inputs(outliers) for outliers in (False, True)]
    exact = [wa.attention(q.double(), k.double(), v.double()) for q, k, v in given]
    for (name, dtype), per, too, rotation in (
        *product(FORMATS.items(), GRANULARITIES, (False,), (None,)), *QUERIES_TOO, *ROTATED
    ):  # fmt: skip
        cells = []
        for (q, k, v), expected in zip(given, exact, strict=True):
            turns = ((q, rotation), (k, rotation), (v, None))
            stored = [wa.quantize(x, dtype, per=per, rotation=turn).dequantized().double() for x, turn in turns]
            found = wa.attention(stored[0] if too else q.double(), *stored[1:])
            cosine, relative = error(found, expected)
            cells += [f"{relative:.1e}", f"{cosine:.1e}"]
        per_text = f"{per} columns" if isinstance(per, int) else per
        kind = f"{name}{', queries too' if too else ''}{', rotated' if rotation else ''}"
        lines.append(f"| {kind} | {per_text} | {' | '.join(cells)} |")
    for power in LARGEST_WEIGHTS:
        found = [with_rounded_weights(*x, power) for x in given]
        errors = [error(*pair) for pair in zip(found, exact, strict=True)]
        cells = [f"{each:.1e}" for cosine, relative in errors for each in (relative, cosine)]
        lines.append(f"| weights in e4m3 | largest 2^{power} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Prints the table."""
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(status(main))
