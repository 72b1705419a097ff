"""Gradients of tensors that a score captured, in torch operations on the operands' device, tile by tile.

    T[i] takes part as x = f(s, T[i], …):      dT[i] += sum of dx * df/dT over the pairs (row, key) that read it

The slower form that serves every index: scores are computed once more in fp32, in tiles of rows and visible keys, and
what an index does not depend on is summed before it is added at the index. Memory does not grow with Sq x Sk. Offsets
of ragged batches are read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor

from warpattn.language.derivative import Adjoint
from warpattn.language.evaluate import evaluate, evaluate_all
from warpattn.problem import CheckedCall
from warpattn.problem.backward import Gradients
from warpattn.reference import Job, Place, key_tiles
from warpattn.scores import ScoreProgram
from warpattn.sequences import Sequence

__all__ = ["captured_gradients"]

DTYPE = torch.float32


def captured_gradients(
    checked: CheckedCall, sequence: Sequence, x: Gradients, wanted: Many[bool]
) -> tuple[Tensor | None, ...]:
    """The gradient of each tensor of the score where `wanted`, else None."""
    score = checked.score
    assert score is not None  # else nothing is captured
    job = Job(checked.mask, score, None, checked.scale, DTYPE)
    adjoints = [adjoint for adjoint in score.derivative.adjoints if wanted[adjoint.slot]]
    slots = [slot for slot in range(len(score.tensors)) if wanted[slot]]
    sums = {slot: torch.zeros_like(score.tensors[slot], dtype=DTYPE, requires_grad=False) for slot in slots}
    delta = (x.dout.to(DTYPE) * x.out.to(DTYPE)).sum(-1)  # [..., rows, Hq]
    if x.dlse is not None:
        delta = delta - x.dlse.mT
    rows = zip(*(sequence.walk(t, x.k, x.v) for t in (x.q, x.dout, x.lse.mT, delta)), strict=True)
    for b, ((q, k, v), (dout, *_), (lse, *_), (mine, *_)) in enumerate(rows):
        place = Place(b, len(q), len(k), q.shape[1], q.device)
        head_of = [tensor.to(DTYPE).transpose(0, 1) for tensor in (q, dout, k, v)]  # [heads, rows or keys, D]
        _add_sequence(job, place, head_of, (lse.mT, mine.mT), (adjoints, sums))
    return tuple(sums[slot].to(t.dtype) if slot in sums else None for slot, t in enumerate(score.tensors))


def _add_sequence(
    job: Job,
    place: Place,
    tensors: list[Tensor],
    rows: tuple[Tensor, Tensor],
    into: tuple[list[Adjoint], dict[int, Tensor]],
) -> None:
    """Add what one sequence contributes; `rows` are its LSE and delta [Hq, Sq]."""
    q, dout, k, v = tensors
    group = len(q) // len(k)
    k, v = (t.repeat_interleave(group, dim=0) if group > 1 else t for t in (k, v))
    lse, delta = (t[..., None] for t in rows)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    for (start, stop), span in zip(place.row_tiles(), job.spans(place), strict=True):
        for lo, hi, masked in key_tiles(*span):
            env = place.grid(start, stop - start, lo, hi)
            s = (q[:, start:stop] * job.scale) @ k[:, lo:hi].mT
            dp = dout[:, start:stop] @ v[:, lo:hi].mT
            row = slice(start, stop)
            _add_tile(job, env | {"s": s}, masked, (dp - delta[:, row], lse[:, row]), into)


def _add_tile(
    job: Job,
    env: dict[str, Any],
    masked: bool,
    rows: tuple[Tensor, Tensor],
    into: tuple[list[Adjoint], dict[int, Tensor]],
) -> None:
    """Add what one tile contributes; `rows` are dp - delta [Hq, M, N] and the LSE [Hq, M, 1]."""
    score: ScoreProgram = job.score  # type: ignore[assignment]  # there is one
    change, lse = rows
    adjoints, sums = into
    score_of, *values = evaluate_all((score.derivative.score, *(a.value for a in adjoints)), env, score.tensors, DTYPE)
    p = torch.exp(score_of - lse)
    if masked:
        keep = evaluate(job.mask.keep, env, job.mask.tensors, DTYPE)
        p = p.masked_fill(~keep.to(p.device), 0.0)
    dx = p * change
    for adjoint, value in zip(adjoints, values, strict=True):
        part = torch.where(dx == 0, 0.0, dx * value)  # a value may be infinite where nothing is visible
        index = evaluate_all(adjoint.index, env, score.tensors, DTYPE)
        _add_at(sums[adjoint.slot], index, part)


def _add_at(total: Tensor, index: list[Any], part: Tensor) -> None:
    """total[index] += part [Hq, M, N], summed over what the index does not depend on; outside nothing is added."""
    at = torch.broadcast_tensors(*(torch.as_tensor(i, device=part.device) for i in index))
    shape = (1,) * (part.ndim - at[0].ndim) + tuple(at[0].shape)
    part, at = part.sum_to_size(shape), [i.expand(shape) for i in at]
    inside = torch.ones(shape, dtype=torch.bool, device=part.device)
    for i, size in zip(at, total.shape, strict=True):
        inside &= (i >= 0) & (i < size)
    at = [torch.where(inside, i, 0) for i in at]
    if total.numel():
        total.index_put_(tuple(at), torch.where(inside, part, 0.0), accumulate=True)
