"""How many key tiles the row tiles of a problem have, counted on the host: the mask's span, for all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from warpattn.language import eager
from warpattn.language.nodes import SPAN
from warpattn.problem import Problem


def _tensors(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: function(*(torch.as_tensor(arg) for arg in args))


_OPS = eager.OPS | {name: _tensors(getattr(torch, name)) for name in ("minimum", "maximum", "where")}
_NUMBERS = {"int": int, "int64": int, "float": float, "bool": "True".__eq__}


class SpanTiles(NamedTuple):
    """Key tiles of each row tile of a head, int64, in the order of the rows; see `TileSpan` in pieces/span.py."""

    total: Tensor
    masked: Tensor


def span_tiles(problem: Problem, tokens: int, block_n: int) -> SpanTiles | None:
    """Key tiles of `block_n` keys of row tiles of `tokens` queries of a dense problem; None where they depend on a
    captured tensor, on the batch entry or the head."""
    read = problem.span_reads
    if read.tensors or read.symbols & {"b", "h"}:
        return None
    row = torch.arange(0, max(problem.seq_q, 1), tokens)
    offset = problem.seq_k - problem.seq_q
    q_hi = (row + tokens).clamp(max=problem.seq_q) - 1 + offset
    symbols = {"q_lo": row + offset, "q_hi": q_hi, "len_q": problem.seq_q, "len_k": problem.seq_k}
    first, full_lo, full_hi, last = (torch.zeros_like(row) + x for x in _evaluate(problem.mask, symbols))
    first, lo = first // block_n, -(-full_lo // block_n)
    last = torch.maximum(-(-last // block_n), first + 1)
    lo, hi = torch.maximum(lo, first), torch.minimum(full_hi // block_n, last)
    total = last - first
    return SpanTiles(total, total - (hi - lo).clamp(min=0))


def _evaluate(mask: Any, symbols: dict[str, Any]) -> list[Any]:
    """The bounds of the span of a mask's program, by its key."""
    code, outputs, _ = cast("tuple[tuple, tuple, tuple]", mask)
    needed, values = set(outputs[SPAN]), {}
    for number in reversed(range(len(code))):  # operands have lower numbers
        if number in needed and code[number][0] not in ("const", "sym"):
            needed.update(code[number][2:])
    for number in sorted(needed):
        op, dtype, *args = code[number]
        if op == "const":
            values[number] = _NUMBERS[dtype](args[0])
        else:
            values[number] = symbols[args[0]] if op == "sym" else _OPS[op](*(values[arg] for arg in args))
    return [values[number] for number in outputs[SPAN]]
