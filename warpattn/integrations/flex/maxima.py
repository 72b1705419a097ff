"""FlexAttention's `max_scores`: the largest score of each row, by the reference's tiles on any device.

Kernels keep no maxima, so this is a second pass over queries and keys. As in torch, no gradient reaches it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from warpattn.masks import Full, Mask
from warpattn.reference import Job, Place, finite_part, key_tiles
from warpattn.scores import Score, chained


@torch.no_grad()
def max_scores(q: Tensor, k: Tensor, mask: Mask | None, score: Score | None, scale: float | None) -> Tensor:
    """Return the largest score of each row of q (B, Hq, Sq, D), after the mask and the score, over k (B, Hkv, Sk, D):
    (B, Hq, Sq), fp64 for fp64, else fp32; -inf where no key is seen."""
    mask = Full() if mask is None else mask
    score = chained(score, mask.additive())
    job = Job(
        mask=mask.program(),
        score=None if score is None else score.program(),
        sinks=None,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
    )
    rows = [_of_sequence(job, b, *parts) for b, parts in enumerate(zip(q, k, strict=True))]
    return torch.stack(rows) if rows else q.new_empty(q.shape[:3], dtype=job.dtype)


def _of_sequence(job: Job, b: int, q: Tensor, k: Tensor) -> Tensor:
    """The same for q (Hq, Sq, D), k (Hkv, Sk, D) of sequence b."""
    heads, len_q, _ = q.shape
    where = Place(b, len_q, k.shape[1], heads, q.device)
    q, keys = q.to(job.dtype).unflatten(0, (len(k), -1)), finite_part(k.to(job.dtype).mT)
    peaks = []
    for (start, stop), span in zip(where.row_tiles(), job.spans(where), strict=True):
        grouped = q[:, :, start:stop].flatten(1, 2)
        peak = torch.full((heads, stop - start), -torch.inf, dtype=job.dtype, device=q.device)
        for tile in key_tiles(*span):
            s, _ = job.scores(where, (start, stop), tile, grouped, keys)
            peak = torch.maximum(peak, s.amax(-1))
        peaks.append(peak)
    return torch.cat(peaks, dim=1)
