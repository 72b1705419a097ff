"""What a simulation of a dense problem takes: refused beyond the machine's memory, announced from a minute on."""

from __future__ import annotations

import torch
import typer

from warpattn.cli import tensors
from warpattn.cli.spelling import Shape
from warpattn.errors import many
from warpattn.language.evaluate import evaluate_all
from warpattn.problem import CheckedCall

# Measured on two shared cores, 2026-11-29, as orders of magnitude: 0.3 to 2.2e8 multiply-adds a second, and bytes for
# each element of q, k, v and out.
RATE = 1e8
HELD, HELD_BACKWARD = 54, 115
LEAST_ROWS = 64  # of queries in a tile
LONG_S = 60.0
UNITS = (("years", 365 * 86400), ("days", 86400), ("hours", 3600))  # below: minutes
FEWER = "fewer sequences, heads or keys take less"


def announce(shape: Shape, checked: CheckedCall, backward: bool, runs: int) -> None:
    """Say on standard error that `runs` runs of a simulation take long; raises AttentionError for want of memory."""
    tensors.require_memory(shape, HELD_BACKWARD if backward else HELD, "simulating it takes about", f"; {FEWER}")
    products = runs * multiply_adds(shape, float(keys_of_rows(checked).sum()), backward)
    if products > RATE * LONG_S:
        what = f"{many(runs, 'run')} of {products / runs:.0e} multiply-adds"
        typer.echo(f"this takes about {duration(products / RATE)}, {what}; {FEWER}", err=True)


def multiply_adds(shape: Shape, keys: float, backward: bool) -> float:
    """Return the multiply-adds of a run whose mask shows `keys` keys to all rows of a head together."""
    columns = 3 * shape.dim_qk + 2 * shape.dim_v if backward else shape.dim_qk + shape.dim_v
    rows = shape.seq_q * shape.heads_q // shape.heads_kv
    return shape.batch * shape.heads_q * keys * columns * max(1.0, LEAST_ROWS / rows)


def duration(seconds: float) -> str:
    """Put a time into words, to one digit."""
    unit, size = next((each for each in UNITS if seconds >= 2 * each[1]), ("minutes", 60))
    return f"{float(f'{seconds / size:.1g}'):,.0f} {unit if seconds >= 1.5 * size else unit.removesuffix('s')}"


def keys_of_rows(checked: CheckedCall) -> torch.Tensor:
    """Return the keys in the mask's interval for each row (at least 1), about proportional to its cost."""
    p = checked.problem
    rows = torch.arange(p.seq_q) + (p.seq_k - p.seq_q)
    at = {"b": 0, "h": 0, "len_q": p.seq_q, "len_k": p.seq_k, "q_lo": rows, "q_hi": rows}
    first, _, _, last = evaluate_all(checked.mask.span, at, checked.mask.tensors)
    return torch.as_tensor(last - first).expand(p.seq_q).clamp(min=1).float()
