"""Calls whose scores are so large that a row's largest ones share all its weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import warpattn as wa

Pair = tuple[int, int]


def operands(dims: Pair, lengths: Pair, heads: Pair, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v of one sequence. Every fourth key, and all of the last quarter, have twice the score of the others. The
    scores are exact: 2^20 or 2^21 times +1, -1 or 2^-10 (the queries of every third row)."""
    (dim, dim_v), (queries, keys), (heads_q, heads_kv) = dims, lengths, heads
    sizes = torch.tensor([1.0, -1.0, 2.0**-10]).repeat(queries)[:queries].view(1, queries, 1)
    q, k = torch.zeros(1, queries, heads_q, dim), torch.zeros(1, keys, heads_kv, dim)
    q[..., 0] = 2.0**10 * sizes
    key = torch.arange(keys).view(1, keys, 1)
    k[..., 0] = torch.where((key % 4 == 3) | (key >= 3 * keys // 4), 2.0**11, 2.0**10)
    v = torch.randn(1, keys, heads_kv, dim_v, generator=torch.Generator().manual_seed(1))
    return [x.to(dtype) for x in (q, k, v)]


def wrong(
    found: tuple[Tensor, Tensor], given: Sequence[Tensor], scale: float, mask: wa.Mask | None, most: float = 0.02
) -> str:
    """What is wrong with (out, LSE) of a call of q, k, v, by the reference in fp64; empty if nothing is."""
    exact, exact_lse = wa.attention(
        *(x.cpu().double() for x in given), scale=scale, mask=mask, return_lse=True, backend="reference"
    )
    out, lse = (x.cpu().double() for x in found)
    seen = exact_lse.isfinite()
    near = (lse - exact_lse)[seen].abs() <= 1e-6 * exact_lse[seen].abs() + 1e-4
    if not torch.equal(lse.isfinite(), seen) or not near.all():
        return f"LSE {lse[0, 0]}"
    error = (out - exact).abs().max().item()
    return "" if error < most else f"output off by {error}"
