"""Gradients of tensors that a score captured: by a kernel that adds in any order, or, if they must be deterministic or
there is no such kernel, by torch operations on the operands' device, tile by tile.

    score x = f(s, T[i], …):      dT[i] += sum of dx * df/dT over the pairs (row, key) that read T[i]

The torch operations, which are slower, compute scores again in fp32, in tiles of rows and visible keys; they sum over
dimensions that an index does not depend on before they add at the index. Memory does not grow with Sq x Sk. Offsets of
ragged batches are read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor

from warpattn.language.derivative import Adjoint
from warpattn.language.evaluate import evaluate, evaluate_all
from warpattn.problem.backends import LIMITS
from warpattn.problem.backward import CheckedBackward, Gradients, fitted_gradients
from warpattn.reference import Job, Place, key_tiles
from warpattn.runtime.bound_launches import launch_all
from warpattn.runtime.training.plan import list_captured_launches
from warpattn.scores import ScoreProgram
from warpattn.sequences import Sequence
from warpattn.torch_modes import without_autocast

DTYPE = torch.float32


def captured_gradients(
    checked: CheckedBackward, sequence: Sequence, x: Gradients, wanted: Many[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradient of each tensor of the score that requires one (`wanted`), else None."""
    score = checked.forward.score
    assert score is not None  # else nothing is captured
    slots = [slot for slot in range(len(score.tensors)) if wanted[slot]]
    sums = {slot: torch.zeros(score.tensors[slot].shape, dtype=DTYPE, device=x.q.device) for slot in slots}
    if x.q.numel() and x.k.numel():
        backward = LIMITS[checked.forward.backend.removeprefix("simulate:")].backward
        by_kernel = backward.captured and not checked.deterministic
        (_add_by_kernel if by_kernel else _add_in_order)(checked, sequence, x, wanted, sums)
    return tuple(sums[slot].to(t.dtype) if slot in sums else None for slot, t in enumerate(score.tensors))


def _add_by_kernel(
    checked: CheckedBackward, sequence: Sequence, x: Gradients, wanted: Many[bool], sums: dict[int, Tensor]
) -> None:
    places = [sums.get(slot) for slot in range(len(wanted))]
    launches = list_captured_launches(checked, fitted_gradients(x), sequence, wanted, places)
    if checked.forward.backend.startswith("simulate:"):
        from warpattn.runtime import simulate  # imports NumPy and Triton

        for launch in launches:
            simulate.run_alone(launch)
    else:
        launch_all(launches, x.q.get_device())


def _add_in_order(
    checked: CheckedBackward, sequence: Sequence, x: Gradients, wanted: Many[bool], sums: dict[int, Tensor]
) -> None:
    forward = checked.forward
    score: ScoreProgram = forward.score  # type: ignore[assignment]  # there is one
    job = Job(forward.mask, score, None, forward.scale, DTYPE)
    adjoints = [adjoint for adjoint in score.derivative.adjoints if wanted[adjoint.slot]]
    dlse = torch.zeros_like(x.lse) if x.dlse is None else x.dlse
    rows = zip(*(sequence.walk(t, x.k, x.v) for t in (x.q, x.dout, x.lse.mT, dlse.mT)), strict=True)
    for b, ((q, k, v), (dout, *_), (lse, *_), (mine, *_)) in enumerate(rows):
        place = Place(b, len(q), len(k), q.shape[1], q.device)
        head_of = [tensor.to(DTYPE).transpose(0, 1) for tensor in (q, dout, k, v)]  # [heads, rows or keys, D]
        with without_autocast(q.device):
            _add_sequence(job, place, head_of, (lse.mT, mine.mT), (adjoints, sums))


def _add_sequence(
    job: Job,
    place: Place,
    tensors: list[Tensor],
    rows: tuple[Tensor, Tensor],
    into: tuple[list[Adjoint], dict[int, Tensor]],
) -> None:
    """Add what one sequence contributes; `rows` are its LSE and dLSE [Hq, Sq].

    A first pass over the keys sums p * dp of each row in fp32. The equal sum of dout * out would contain the rounding
    error of out, which is the same for all pairs of a row and so does not average out.
    """
    q, dout, k, v = tensors
    group = len(q) // len(k)
    k, v = (t.repeat_interleave(group, dim=0) if group > 1 else t for t in (k, v))
    lse, dlse = (t[..., None] for t in rows)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    for (start, stop), span in zip(place.row_tiles(), job.spans(place), strict=True):
        row, total = slice(start, stop), -dlse[:, start:stop]
        for adds in (False, True):
            for lo, hi, masked in key_tiles(*span):
                s = (q[:, row] * job.scale) @ k[:, lo:hi].mT
                env = place.grid(start, stop - start, lo, hi) | {"s": s}
                p = _probabilities(job, env, masked, lse[:, row])
                dp = dout[:, row] @ v[:, lo:hi].mT
                dp = torch.where(p == 0, 0.0, dp)  # hidden values may be NaN
                if adds:
                    _add_tile(job, env, p * (dp - total), into)
                else:
                    total = total + (p * dp).sum(-1, keepdim=True)


def _probabilities(job: Job, env: dict[str, Any], masked: bool, lse: Tensor) -> Tensor:
    """Compute p [Hq, M, N] of a tile; `lse` [Hq, M, 1]."""
    score: ScoreProgram = job.score  # type: ignore[assignment]  # there is one
    p = torch.exp(evaluate(score.out, env, score.tensors, DTYPE) - lse).expand_as(env["s"])
    if masked:
        keep = evaluate(job.mask.keep, env, job.mask.tensors, DTYPE)
        p = p.masked_fill(~keep.to(p.device), 0.0)
    return p


def _add_tile(job: Job, env: dict[str, Any], dx: Tensor, into: tuple[list[Adjoint], dict[int, Tensor]]) -> None:
    """Add what one tile contributes; dx [Hq, M, N] is the gradient of its scores."""
    score: ScoreProgram = job.score  # type: ignore[assignment]  # there is one
    adjoints, sums = into
    values = evaluate_all(tuple(adjoint.value for adjoint in adjoints), env, score.tensors, DTYPE)
    for adjoint, value in zip(adjoints, values, strict=True):
        part = torch.where(dx == 0, 0.0, dx * value)  # a value may be infinite where nothing is visible
        index = evaluate_all(adjoint.index, env, score.tensors, DTYPE)
        _add_at(sums[adjoint.slot], index, part)


def _add_at(total: Tensor, index: list[Any], part: Tensor) -> None:
    """total[index] += part [Hq, M, N], summed over dimensions that the index lacks; skips indices out of range."""
    if not index:  # a number's tensor
        total += part.sum()
        return
    at = torch.broadcast_tensors(*(torch.as_tensor(i, device=part.device) for i in index))
    shape = (1,) * (part.ndim - at[0].ndim) + tuple(at[0].shape)
    part, at = part.sum_to_size(shape), [i.expand(shape) for i in at]
    inside = torch.ones(shape, dtype=torch.bool, device=part.device)
    for i, size in zip(at, total.shape, strict=True):
        inside &= (i >= 0) & (i < size)
    at = [torch.where(inside, i, 0) for i in at]
    if total.numel():
        total.index_put_(tuple(at), torch.where(inside, part, 0.0), accumulate=True)
