"""What gradients are compared with: the formulas written out for the whole matrix of scores, in fp64 or any dtype.

    p = softmax(x),  x = f(scale * q kT),  dv = pT dout,  dx = p * (dout vT - sum(p * dout vT) + dlse),  ds = dx * f'

Scores of hidden pairs are never computed, so nothing infinite or NaN about them can reach a gradient. Only f' itself is
torch's. The bound is the field's: twice the error that the same formulas make in the operands' own dtype (three times
with a soft cap). The largest error of a handful of values is a matter of luck, so for a gradient of fewer than FEW
values it is the root mean square of the largest errors of several draws of dout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.oracle import FACTOR, SOFT_CAP_FACTOR, Inputs, applied, grid, visible
from warpattn.masks import Lengths

FEW, DRAWS = 64, 8


@dataclass(eq=False)
class GradientsOf:
    """Gradients by what they are of; shapes as those of the inputs. `captured`: of the tensors given as such."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    captured: tuple[Tensor, ...]

    def named(self) -> dict[str, Tensor]:
        """All there are."""
        found = {"q": self.q, "k": self.k, "v": self.v}
        if self.sinks is not None:
            found["sinks"] = self.sinks
        return found | {f"captured {i}": x for i, x in enumerate(self.captured)}


def weights(inputs: Inputs, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random dout (B, Sq, Hq, Dv) in the dtype of q and dlse (B, Hq, Sq) in fp32 (fp64 for fp64); ragged: no batch."""
    generator = torch.Generator().manual_seed(seed)
    q, v = inputs.q, inputs.v
    *batch, rows, heads = q.shape[:-1]
    dout = torch.randn((*q.shape[:-1], v.shape[-1]), generator=generator, dtype=torch.float64)
    dlse = torch.randn((*batch, heads, rows), generator=generator, dtype=torch.float64)
    return dout.to(q.device, q.dtype), dlse.to(q.device, torch.float64 if q.dtype == torch.float64 else torch.float32)


@torch.no_grad()
def gradients(
    inputs: Inputs, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype, captured: tuple[Tensor, ...] = ()
) -> GradientsOf:
    """Gradients of sum(dout * out) + sum(dlse * lse), computed in `dtype`; `captured` require gradients."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (inputs.q, inputs.k, inputs.v))
    sums = {"dtype": _at_least_fp32(dtype), "device": inputs.q.device}
    dsinks = None if inputs.sinks is None else torch.zeros(inputs.sinks.shape, **sums)
    total = [torch.zeros_like(x) for x in captured]
    sequence = inputs.sequence
    forward = zip(*(sequence.walk(*x) for x in ((inputs.q, inputs.k, inputs.v), (dq, dk, dv))), strict=True)
    rows = 0
    for b, (tensors, places) in enumerate(forward):
        len_q = len(tensors[0])
        mine = dout[b] if sequence.kind == "dense" else dout[rows : rows + len_q]
        if dlse is not None:
            dl = dlse[b] if sequence.kind == "dense" else dlse[:, rows : rows + len_q]
        else:
            dl = torch.zeros(tensors[0].shape[1], len_q, device=dout.device)
        rows += len_q
        found = _sequence(inputs, b, tensors, (mine.to(dtype), dl.to(dtype)), captured)
        for place, gradient in zip(places, found[:3], strict=True):
            place.copy_(gradient)
        if dsinks is not None:
            dsinks += found[3]
        for sum_, part in zip(total, found[4], strict=True):
            sum_ += part
    return GradientsOf(dq, dk, dv, dsinks, tuple(total))


def _sequence(
    inputs: Inputs, b: int, tensors: tuple[Tensor, ...], wanted: tuple[Tensor, Tensor], captured: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, list[Tensor]]:
    """dq (Sq, Hq, D), dk, dv, dsinks and those of captured tensors, of one sequence."""
    dout, dlse = wanted
    dtype = dout.dtype
    q, k, v = (x.to(dtype).transpose(0, 1) for x in tensors)  # [H, S, D]
    (heads, len_q, dim), (heads_kv, len_k, _) = q.shape, k.shape
    group = heads // heads_kv
    k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    scale = dim**-0.5 if inputs.scale is None else inputs.scale
    s = (q * scale) @ k.mT
    seen = visible(inputs, b, range(len_q), len_q, len_k)
    at = seen.nonzero(as_tuple=True)
    leaf = s[at].detach().requires_grad_()
    with torch.enable_grad():
        x = _scored(inputs, b, leaf, at, (len_q, len_k))
    full = torch.full_like(s, -torch.inf)
    full[at] = x.detach().to(dtype)
    if inputs.sinks is not None:
        full = torch.cat([full, inputs.sinks.detach().to(dtype)[:, None, None].expand(heads, len_q, 1)], dim=-1)
    dead = (full == -torch.inf).all(dim=-1, keepdim=True)
    p = torch.softmax(full, dim=-1).masked_fill(dead, 0.0) if full.shape[-1] else full
    dout = dout.transpose(0, 1)  # [H, Sq, Dv]
    dp = dout @ v.mT
    if inputs.sinks is not None:
        dp = torch.cat([dp, dp.new_zeros((heads, len_q, 1))], dim=-1)
    dx = p * (dp - (p * dp).sum(-1, keepdim=True) + dlse[..., None])
    dsinks = None if inputs.sinks is None else dx[..., -1].sum(-1, dtype=_at_least_fp32(dtype))
    p, dx = p[..., :len_k], dx[..., :len_k]
    parts = [torch.zeros_like(leaf), *(torch.zeros_like(t) for t in captured)]
    if x.requires_grad and x.numel():
        found = torch.autograd.grad(x, (leaf, *captured), dx[at].to(x.dtype), allow_unused=True)
        parts = [zero if part is None else part for part, zero in zip(found, parts, strict=True)]
    ds = torch.zeros_like(s)
    ds[at] = parts[0].to(dtype)
    dq = (ds @ k) * scale
    dk, dv = (x.unflatten(0, (heads_kv, group)).sum(1) for x in (ds.mT @ (q * scale), p.mT @ dout))
    return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1), dsinks, parts[1:]


def _scored(inputs: Inputs, b: int, s: Tensor, at: tuple[Tensor, ...], sizes: tuple[int, int]) -> Tensor:
    """The score function on visible pairs alone, which are at [head, row, key]."""
    len_q, len_k = sizes
    _, h, q, k = grid(inputs, b, range(len_q), len_q, len_k)
    shape = (len(h), len_q, len_k)
    places = (b, *(x.expand(shape)[at] for x in (h, q, k)))
    added = None if inputs.mask is None else inputs.mask.additive()
    for score in (inputs.score, added):
        s = s if score is None else applied(score, s, places, Lengths(len_q, len_k))
    return s


def check_gradients(inputs: Inputs, found: GradientsOf, dout: Tensor, dlse: Tensor | None) -> None:
    """Assert that `found` are the gradients within the tolerance of the dtype of q, and have no NaN."""
    captured = captured_floats(inputs, len(found.captured))
    truth = gradients(inputs, dout, dlse, torch.float64, captured).named()
    same = gradients(inputs, dout, dlse, inputs.q.dtype, captured).named()
    factor = SOFT_CAP_FACTOR if inputs.soft_cap else FACTOR
    for name, mine in found.named().items():
        right, other = truth[name], same[name].double()
        assert mine.shape == right.shape, f"d{name} has shape {tuple(mine.shape)}, not {tuple(right.shape)}"
        assert torch.isfinite(mine).all(), (
            f"d{name} has {int((~torch.isfinite(mine)).sum())} values that are not finite"
        )
        assert not mine.numel() or (right == 0).all() == (mine == 0).all(), f"d{name} is zero, or should be"
        sums = 16 * torch.finfo(torch.float64 if mine.dtype == torch.float64 else torch.float32).eps
        rounding = 2 * (right.to(mine.dtype).double() - right).abs() + sums * _largest(right.abs())
        typical = _largest((other - right).abs())
        error = _largest((mine.double() - right).abs())
        if error > factor * typical and mine.numel() < FEW:
            draws = [_own_error(inputs, name, seed, captured) for seed in range(DRAWS)]
            typical = max(typical, math.sqrt(sum(x * x for x in draws) / DRAWS))
        bound = factor * typical + _largest(rounding)
        assert error <= bound, f"d{name}: error {error:.3g} is over the bound {bound:.3g}"


def _own_error(inputs: Inputs, name: str, seed: int, captured: tuple[Tensor, ...]) -> float:
    """The largest error of one gradient for another draw of dout, computed in the dtype of q."""
    dout, dlse = weights(inputs, seed)
    same, truth = (gradients(inputs, dout, dlse, dtype, captured) for dtype in (inputs.q.dtype, torch.float64))
    return _largest((same.named()[name].double() - truth.named()[name]).abs())


def captured_floats(inputs: Inputs, count: int) -> tuple[Tensor, ...]:
    """The first `count` captured float tensors of the score and the additive mask that require gradients."""
    found: list[Tensor] = []
    added = None if inputs.mask is None else inputs.mask.additive()
    for score in (inputs.score, added):
        found += [] if score is None else [x for x in score.program().tensors if x.requires_grad]
    return tuple(found[:count])


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """What keeps a sum over rows: rounded to 16 bits it would say more about its size than about its terms."""
    return torch.promote_types(dtype, torch.float32)


def _largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0
