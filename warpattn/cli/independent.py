"""Attention by torch's own functions in fp64, without the reference's code; `run` compares the reference with it.

    per sequence, a block of rows at a time:  q kᵀ · scale ─▶ score.apply ─▶ mask.keep ─▶ logsumexp, softmax ─▶ · v

Mask and score are called with tensors of indices, so their traced programs are not used either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from warpattn.language.traced import Lengths
from warpattn.masks import Mask
from warpattn.scores import Score

ELEMENTS = 2**24  # of a score matrix at a time: 128 MiB in fp64


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score: Score | None) -> tuple[Tensor, Tensor]:
    """Compute out (B, Sq, Hq, Dv), lse (B, Hq, Sq) in fp64 from checked q (B, Sq, Hq, D), k, v (B, Sk, Hkv, D | Dv).

    Rows that see no key are 0, their lse is -inf.
    """
    group = q.shape[2] // k.shape[2]
    outs, lses = [], []
    for b in range(len(q)):
        queries = q[b].double().transpose(0, 1)
        keys, values = (x[b].double().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        step = max(1, ELEMENTS // max(1, keys.shape[0] * keys.shape[1]))
        lens = Lengths(queries.shape[1], keys.shape[1])
        starts = range(0, queries.shape[1], step)
        pieces = [_rows(queries[:, i : i + step], (keys, values), (b, i, lens), mask, score) for i in starts]
        outs.append(torch.cat([out for out, _ in pieces], 1).transpose(0, 1))
        lses.append(torch.cat([lse for _, lse in pieces], 1))
    return torch.stack(outs), torch.stack(lses)


def _rows(
    q: Tensor, kv: tuple[Tensor, Tensor], at: tuple[int, int, Lengths], mask: Mask, score: Score | None
) -> tuple[Tensor, Tensor]:
    """Attend rows q (H, rows, D) of sequence b from row `first` on: out (H, rows, Dv), lse (H, rows)."""
    (keys, values), (b, first, lens) = kv, at
    heads, rows, dim = q.shape
    h = torch.arange(heads)[:, None, None]
    positions = (torch.arange(first, first + rows) + lens.k - lens.q)[None, :, None]
    columns = torch.arange(lens.k)[None, None, :]
    scores = q @ keys.mT * dim**-0.5
    if score is not None:
        scores = score.apply(scores, b, h, positions, columns)
    keep = torch.as_tensor(mask.keep(b, h, positions, columns, lens)).expand_as(scores)
    dark = ~keep.any(-1)  # rows that see no key: their softmax has no gradient, either
    scores = scores.masked_fill(~keep, -torch.inf).masked_fill(dark[..., None], 0.0)
    weights = torch.softmax(scores, -1).masked_fill(dark[..., None], 0.0)
    return weights @ values, torch.logsumexp(scores, -1).masked_fill(dark, -torch.inf)
