"""Computes where packed documents begin and end, with torch on the device of the ids, without synchronising."""

from __future__ import annotations

import torch
from torch import Tensor


def document_labels(ids: Tensor) -> Tensor:
    """Renumber ids [..., S] to 1, 2, ... per row in the order of their values, int32. Equal ids stay equal."""
    values, order = torch.sort(ids, dim=-1)
    ranks = _changes(values).cumsum(-1).to(torch.int32)
    return torch.empty_like(ranks).scatter_(-1, order, ranks)


def run_labels(ids: Tensor) -> Tensor:
    """Number the runs of equal neighbours in ids [..., S] 1, 2, ..., int32."""
    return _changes(ids).cumsum(-1).to(torch.int32)


def document_bounds(labels: Tensor) -> Tensor:
    """Four bounds [4, ..., S] int32 per position of `labels` [..., S]:

    0. the first key that this or any later position sees
    1. one past the last key that this or any earlier position sees
    2. S minus the start of the run of equal labels around the position
    3. the end of that run
    """
    size = labels.shape[-1]
    if size == 0:
        return labels.new_zeros((4, *labels.shape))
    position = torch.arange(size, device=labels.device).expand(labels.shape)
    values, order = torch.sort(labels, dim=-1, stable=True)  # equal labels side by side, in order of position
    starts, ends = _run_bounds(values)
    seen_first = torch.empty_like(position).scatter(-1, order, order.gather(-1, starts))
    seen_last = torch.empty_like(position).scatter(-1, order, order.gather(-1, ends - 1))
    oldest = seen_first.flip(-1).cummin(-1).values.flip(-1)
    newest = seen_last.cummax(-1).values + 1
    run_start, run_end = _run_bounds(labels)
    return torch.stack([oldest, newest, size - run_start, run_end]).to(torch.int32)


def _run_bounds(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return start and end of the run of equal neighbours around each position, int64."""
    size = values.shape[-1]
    position = torch.arange(size, device=values.device).expand(values.shape)
    changes = _changes(values)
    start = torch.where(changes, position, 0).cummax(-1).values
    after = torch.where(changes, position, size).flip(-1).cummin(-1).values.flip(-1)  # next start at or after
    end = torch.cat([after[..., 1:], after.new_full((*values.shape[:-1], 1), size)], dim=-1)
    return start, end


def _changes(values: Tensor) -> Tensor:
    """True where an element differs from the one before it, and at the first."""
    changes = torch.ones_like(values, dtype=torch.bool)
    changes[..., 1:] = values[..., 1:] != values[..., :-1]
    return changes
