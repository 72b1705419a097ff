"""Cascade attention: pages that all sequences of a batch share are read once.

    every query · shared pages       one sequence of all rows, in groups as large as decode takes     ─┐
    each sequence · its own pages    the call itself, with shorter tables and lengths, mask and sinks ─┴▶ merge

The queries follow the shared pages, so a causal mask hides none of these. Other masks and scores depend on a query's
position, and latent attention has one cache for all heads: there every sequence reads all of its pages.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from warpattn.kernels.merge.launch import Result
from warpattn.masks import Causal, Full
from warpattn.problem import Call, validate
from warpattn.problem.backends import LATENT, chip_of
from warpattn.problem.memory import overlap, overlaps_itself
from warpattn.quantized import EIGHT_BIT
from warpattn.runtime.captures import graph_owns_memory
from warpattn.runtime.execute import attend
from warpattn.runtime.merging.states import merge_into
from warpattn.scores import SoftCap
from warpattn.sequences import PagedKV, PagedRagged, Ragged

GROUP = 16  # rows of queries that read the shared pages together: the most that the decode kernel takes
FEW = 512  # rows up to which groups are decoded; with more, tiles of prefill fill the card


def cascaded(call: Call) -> Tensor | tuple[Tensor, Tensor] | None:
    """Return the result of a call whose `kv.shared_pages` is not 0; None if it cannot be split at these pages."""
    if not _has_kernels(call) or not _fits(call):
        return None
    if call.backend.startswith("simulate:"):
        validate(call)  # the promise, too, which the two calls below do not make
    ragged = call.sequence if isinstance(call.sequence, PagedRagged) else None
    kv = call.sequence if ragged is None else ragged.kv
    assert isinstance(kv, PagedKV)
    q, (heads, dim) = call.q, (call.q.shape[-2], kv.v_pages.shape[-1])
    rows = q.reshape(-1, heads, q.shape[-1])
    shared = _over_shared(call, kv, rows)
    keys = kv.shared_pages * kv.k_pages.shape[1]
    table, lengths = kv.block_table[:, kv.shared_pages :], (kv.lengths - keys).clamp_min(0)
    own = kv.with_fields(block_table=table, lengths=lengths, shared_pages=0)
    sequence = own if ragged is None else replace(ragged, kv=own)
    rest = Result(*_attended(_changed(call, q, sequence, sinks=call.sinks, mask=call.mask)))
    if ragged is None:
        out, lse = shared
        shared = Result(out.view(*q.shape[:-1], dim), lse.view(heads, *q.shape[:2]).transpose(0, 1))
    out = torch.empty_like(rest.out) if call.out is None else call.out
    merged = Result(out, torch.empty_like(rest.lse))
    merge_into(merged, (shared, rest), None if ragged is None else ragged.cu_q[-1:], call.backend)
    return (merged.out, merged.lse) if call.return_lse else out


def _has_kernels(call: Call) -> bool:
    """Whether kernels run; the reference reads every page anyway."""
    if call.backend.startswith("simulate:"):
        return True
    return call.backend != "reference" and isinstance(call.q, Tensor) and chip_of(call.q.device).arch is not None


def _fits(call: Call) -> bool:
    """Whether the call can be split; one that breaks a rule is not, so that `attend` raises the error."""
    q, k, v, kind = call.q, call.k, call.v, type(call.sequence)
    rank = {PagedKV: 4, PagedRagged: 3}[kind]
    if call.sequence.q_rope is not None:  # latent attention
        return False
    if not all(isinstance(x, Tensor) for x in (q, k, v)) or (q.ndim, k.ndim, v.ndim) != (rank, 4, 4) or not q.numel():
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return False
    kv = call.sequence.kv if isinstance(call.sequence, PagedRagged) else call.sequence
    assert isinstance(kv, PagedKV)
    table = kv.block_table
    rows = (*q.shape[:-1], v.shape[-1])
    if call.out is not None and not _takes(call.out, rows, (q, k, v, call.sinks)):
        return False
    within = isinstance(table, Tensor) and table.ndim == 2 and len(table) > 0 and kv.shared_pages < table.shape[1]
    masked = call.mask is None or isinstance(call.mask, Full) or call.mask == Causal()
    scored = call.score is None or isinstance(call.score, SoftCap)
    wide = k.dtype == q.dtype and q.dtype not in EIGHT_BIT  # scales of 8-bit queries follow their rows
    return within and masked and scored and wide and (q.shape[-1], v.shape[-1]) != LATENT and call.k.shape[1] > 0


def _takes(out: Tensor, shape: tuple[int, ...], read: tuple[Tensor | None, ...]) -> bool:
    """Whether results can be written to the output that the caller gave."""
    q, *_ = read
    assert q is not None
    same = isinstance(out, Tensor) and out.shape == shape and (out.dtype, out.device) == (q.dtype, q.device)
    if not same or out.stride(-1) != 1 or overlaps_itself(out):
        return False
    return not any(isinstance(x, Tensor) and overlap(out, x) for x in read)


def _over_shared(call: Call, kv: PagedKV, rows: Tensor) -> Result:
    """Attend all rows of queries to the shared pages; out and lse are those of a ragged batch."""
    total = len(rows)
    group = GROUP if total <= FEW else total
    keys = kv.shared_pages * kv.k_pages.shape[1]
    groups = _groups(total, group, keys, rows.device)
    table = _a_row_of(call, kv.block_table)[:, : kv.shared_pages].expand(len(groups.lengths), -1)
    pages = kv.with_fields(block_table=table, lengths=groups.lengths, shared_pages=0)
    return Result(*_attended(_changed(call, rows, PagedRagged(pages, Ragged(groups.offsets, max_q=group)))))


def _a_row_of(call: Call, table: Tensor) -> Tensor:
    """The row (1, max_pages) of the first sequence that has queries; others promise nothing. The host reads nothing."""
    if not isinstance(call.sequence, PagedRagged):
        return table[:1]
    starts = call.sequence.cu_q
    first = torch.searchsorted(starts[1:], starts[:1], right=True)  # they start at 0
    return table.index_select(0, first.clamp_max(len(table) - 1))


class Groups(NamedTuple):
    """Rows of queries as sequences that all have the same keys."""

    offsets: Tensor
    lengths: Tensor


def _groups(total: int, group: int, keys: int, device: torch.device) -> Groups:
    """Return the groups of a size; cached, unless a graph owns their memory."""
    owned = device.type == "cuda" and graph_owns_memory(device.index or 0)
    return (_make_groups if owned else _kept_groups)(total, group, keys, device)


def _make_groups(total: int, group: int, keys: int, device: torch.device) -> Groups:
    count = -(-total // group)
    offsets = (torch.arange(count + 1, dtype=torch.int32, device=device) * group).clamp_max(total)
    return Groups(offsets, torch.full((count,), keys, dtype=torch.int32, device=device))


_kept_groups = lru_cache(maxsize=256)(_make_groups)


def _changed(call: Call, q: Tensor, sequence: PagedKV | PagedRagged, **modifiers: object) -> Call:
    """Return the call with other queries and pages, an LSE and a new output."""
    changes = {"mask": None, "sinks": None, "return_lse": True, "out": None, **modifiers}
    return replace(call, q=q, sequence=sequence, **changes)


def _attended(call: Call) -> tuple[Tensor, Tensor]:
    out, lse = attend(call)  # pyright: ignore[reportGeneralTypeIssues]  it returns the LSE, and has no gradients
    return out, lse
