"""Counts, on the host, the key tiles of a problem's row tiles by the mask's span, for all row tiles at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.language import eager
from warpattn.language.nodes import SPAN, ProgramKey
from warpattn.problem import Problem


def _tensors(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: function(*(torch.as_tensor(arg) for arg in args))


_OPS = eager.OPS | {name: _tensors(getattr(torch, name)) for name in ("minimum", "maximum", "where")}
_NUMBERS = {"int": int, "int64": int, "float": float, "bool": "True".__eq__}


class TileSize(NamedTuple):
    """Queries of a row tile, keys of a key tile."""

    tokens: int
    keys: int


class SpanTiles(NamedTuple):
    """Key tiles of each row tile of a head, in the order of the rows; see `TileSpan` in pieces/span.py."""

    total: list[int]
    masked: list[int]


class Bounds(NamedTuple):
    """A mask's span for each row tile, int64."""

    first: Tensor
    full_lo: Tensor
    full_hi: Tensor
    last: Tensor


def span_tiles(problem: Problem, sizes: Iterable[TileSize]) -> dict[TileSize, SpanTiles]:
    """The key tiles of a dense problem's row tiles, by tile size; {} if they depend on a captured tensor, the batch
    entry or the head."""
    read, sizes = problem.span_reads, tuple(sizes)
    if read.tensors or read.symbols & {"b", "h"}:
        return {}
    bounds = {tokens: _bounds(problem, tokens) for tokens in {size.tokens for size in sizes}}
    return {size: _counted(bounds[size.tokens], size.keys) for size in sizes}


def _bounds(problem: Problem, tokens: int) -> Bounds:
    """The spans of row tiles of `tokens` queries."""
    row = torch.arange(0, max(problem.seq_q, 1), tokens)
    offset = problem.seq_k - problem.seq_q
    q_hi = (row + tokens).clamp(max=problem.seq_q) - 1 + offset
    symbols = {"q_lo": row + offset, "q_hi": q_hi, "len_q": problem.seq_q, "len_k": problem.seq_k}
    return Bounds(*(torch.zeros_like(row) + x for x in _evaluate(problem.mask, symbols)))


def _counted(bounds: Bounds, keys: int) -> SpanTiles:
    """Counts key tiles of `keys` keys."""
    first, lo = bounds.first // keys, -(-bounds.full_lo // keys)
    last = torch.maximum(-(-bounds.last // keys), first + 1)
    lo, hi = torch.maximum(lo, first), torch.minimum(bounds.full_hi // keys, last)
    total = last - first
    return SpanTiles(total.tolist(), (total - (hi - lo).clamp(min=0)).tolist())


def _evaluate(mask: ProgramKey, symbols: dict[str, Any]) -> list[Any]:
    """The bounds of the span of a mask's program, given by its key."""
    code, outputs = mask.code, mask.outputs[SPAN]
    needed, values = set(outputs), {}
    for number in reversed(range(len(code))):  # operands have lower numbers
        if number in needed and code[number][0] not in ("const", "sym"):
            needed.update(code[number][2:])
    for number in sorted(needed):
        op, dtype, *args = code[number]
        if op == "const":
            values[number] = _NUMBERS[dtype](args[0])
        else:
            values[number] = symbols[args[0]] if op == "sym" else _OPS[op](*(values[arg] for arg in args))
    return [values[number] for number in outputs]
