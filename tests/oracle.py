"""What a result is compared with, and how close it must be.

The truth is the mathematics written the plain way: a score matrix, a softmax, a product, in fp64 (or fp32), with the
mask evaluated for every pair of query and key. The rule of the field (FlashAttention's tests): the error is at most
twice what the same plain code makes in the operands' own dtype on the same inputs, plus a rounding term; three times
with a soft cap. A result can pass neither by being NaN nor by being zeros: outputs start as NaN, and every row that
sees a key must have something in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from warpattn.masks import Full, Lengths, Mask
from warpattn.scores import Score
from warpattn.sequences import Dense, Sequence

ROWS = 1024  # query rows whose score matrix exists at a time, so that long sequences fit on a card
FACTOR = 2.0
SOFT_CAP_FACTOR = 3.0


@dataclass(frozen=True, eq=False)
class Inputs:
    """Everything that defines one attention result."""

    q: Tensor
    k: Tensor
    v: Tensor
    sequence: Sequence = Dense()  # noqa: RUF009 (frozen, holds nothing)
    mask: Mask | None = None
    score: Score | None = None
    sinks: Tensor | None = None
    scale: float | None = None
    soft_cap: bool = False


def plain(inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention as plain PyTorch in `dtype`: (out, lse) shaped as the api shapes them."""
    outs, lses = [], []
    for b, (q, k, v) in enumerate(inputs.sequence.walk(inputs.q, inputs.k, inputs.v)):
        pieces = [_plain_rows(inputs, dtype, b, (q, k, v), start) for start in range(0, max(len(q), 1), ROWS)]
        outs.append(torch.cat([out for out, _ in pieces]))
        lses.append(torch.cat([lse for _, lse in pieces], dim=1))
    return inputs.sequence.join(outs, lses)


def visible(inputs: Inputs, b: int, rows: range, len_q: int, len_k: int) -> Tensor:
    """The mask of sequence b as an explicit bool tensor [Hq, rows, len_k], from `keep` on the full index grid."""
    _, h, q, k = grid(inputs, b, rows, len_q, len_k)
    mask = Full() if inputs.mask is None else inputs.mask
    keep = mask.keep(b, h, q, k, Lengths(len_q, len_k))
    keep = torch.as_tensor(keep, device=inputs.q.device)
    assert keep.dtype == torch.bool
    return keep.expand(inputs.q.shape[-2], len(rows), len_k)


def tolerance(inputs: Inputs, truth: Tensor) -> float:
    """The largest error allowed for an output in the dtype of q, given the fp32 or fp64 truth."""
    dtype = inputs.q.dtype
    baseline = (plain(inputs, dtype)[0].to(truth.dtype) - truth).abs()
    same = truth.to(dtype)
    rounding = 2.0 * (same + 0.3 - 0.3 - same).abs()
    factor = SOFT_CAP_FACTOR if inputs.soft_cap else FACTOR
    return factor * _largest(baseline) + _largest(rounding.to(truth.dtype))


UNWRITTEN = -1  # a packed denominator of two NaN


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """An output to write into: all NaN, so that an unwritten element is seen."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def check(inputs: Inputs, out: Tensor, lse: Tensor | None = None, *, truth_dtype: torch.dtype = torch.float32) -> None:
    """Assert that `out` (and `lse`) is attention of `inputs` within the tolerance of its dtype."""
    truth, true_lse = plain(inputs, truth_dtype)
    compare(out, truth, tolerance(inputs, truth))
    if lse is None:
        return
    assert lse.shape == true_lse.shape, f"lse has shape {tuple(lse.shape)}, not {tuple(true_lse.shape)}"
    assert not lse.isnan().any(), "lse has NaN"
    seen = true_lse != -torch.inf
    assert torch.equal(lse != -torch.inf, seen), "lse is -inf at other rows than the truth"
    # Scores are sums of products of rounded operands in fp32: 1e-3 absolute holds for |s| up to a few hundred.
    error = _largest((lse.to(true_lse.dtype) - true_lse)[seen].abs())
    assert error <= 1e-3, f"lse is off by {error:.3g}"


def compare(out: Tensor, truth: Tensor, bound: float) -> None:
    """Assert |out - truth| <= bound everywhere, no NaN, and zeros where the truth is zero; rows are zeros nowhere else
    unless the truth's largest number is too small for the dtype (behind a large sink, say)."""
    assert out.shape == truth.shape, f"out has shape {tuple(out.shape)}, not {tuple(truth.shape)}"
    assert not truth.isnan().any(), "the truth has NaN"
    unwritten = int(out.isnan().sum())
    assert unwritten == 0, f"{unwritten} of {out.numel()} elements are NaN"
    assert torch.isfinite(out).all(), "out has infinities"
    dark = (truth == 0).all(dim=-1)  # rows that see nothing
    assert bool((out[dark] == 0).all()), "a row that sees no key is not zero"
    bright = out[truth.abs().amax(dim=-1) >= torch.finfo(out.dtype).tiny]
    assert bool((bright != 0).any(dim=-1).all()), "a row that sees keys came out as zeros"
    error = _largest((out.to(truth.dtype) - truth).abs())
    assert error <= bound, f"error {error:.3g} is over the bound {bound:.3g}"


def _plain_rows(
    inputs: Inputs, dtype: torch.dtype, b: int, tensors: tuple[Tensor, Tensor, Tensor], start: int
) -> tuple[Tensor, Tensor]:
    """Rows [start, start + ROWS) of one sequence: out [rows, Hq, Dv], lse [Hq, rows]."""
    q, k, v = (x.to(dtype).transpose(0, 1) for x in tensors)  # [H, S, D]
    heads, len_q, dim = q.shape
    len_k = k.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[0], dim=0) for x in (k, v))
    rows = range(start, min(start + ROWS, len_q))
    scale = dim**-0.5 if inputs.scale is None else inputs.scale
    s = (q[:, rows.start : rows.stop] * scale) @ k.mT
    places = grid(inputs, b, rows, len_q, len_k)
    lens = Lengths(len_q, len_k)
    added = None if inputs.mask is None else inputs.mask.additive()
    for score in (inputs.score, added):
        s = s if score is None else applied(score, s, places, lens)
    s = s.masked_fill(~visible(inputs, b, rows, len_q, len_k), -torch.inf)
    if inputs.sinks is not None:
        column = inputs.sinks.to(dtype)[:, None, None].expand(heads, len(rows), 1)
        s = torch.cat([s, column], dim=-1)
    lse = torch.logsumexp(s, dim=-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
    p = torch.softmax(s, dim=-1)
    p = p.masked_fill((s == -torch.inf).all(dim=-1, keepdim=True), 0.0)[..., :len_k]
    return (p @ v).transpose(0, 1), lse


def applied(score: Score, s: Tensor, places: tuple[int | Tensor, ...], lens: Lengths) -> Tensor:
    """The score function on tensors; ints turn into fp64 where s is fp64, else into fp32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if s.dtype == torch.float64 else torch.float32)
    try:
        return score.apply(s, *places, lens).to(s.dtype).expand_as(s)
    finally:
        torch.set_default_dtype(before)


def grid(inputs: Inputs, b: int, rows: range, len_q: int, len_k: int) -> tuple[int, Tensor, Tensor, Tensor]:
    """(b, h, q, k) of the rows, broadcasting to [Hq, rows, len_k]; q in key coordinates."""
    device, shift = inputs.q.device, len_k - len_q
    h = torch.arange(inputs.q.shape[-2], device=device)[:, None, None]
    q = torch.arange(rows.start + shift, rows.stop + shift, device=device)[:, None]
    return b, h, q, torch.arange(len_k, device=device)


def _largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0
