"""Attention over packed sequences (laid end to end), with flash-attn's arguments for their rows.

    cu_seqlens      where each sequence starts; without it the tensor is a batch (batch, seq, heads, head_dim)
    seqused         how many rows of each sequence count; the others are not read, and their output is 0
    page table      keys are in pages (num_pages, page_size, heads, head_dim)

Rows that this package's kernels cannot read in place are gathered into new tensors first: used rows among unused ones,
and pages if gradients are wanted.
"""

from __future__ import annotations

from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.api import attention_paged, attention_varlen
from warpattn.errors import AttentionError, many
from warpattn.inputs import is_tensor, kind_of
from warpattn.integrations.flash_attn.descaled import QueryRows, Rows, changed
from warpattn.integrations.flash_attn.modifiers import Tail
from warpattn.integrations.signature import require_integers
from warpattn.quantized import split
from warpattn.sequences import PagedKV, Ragged
from warpattn.sequences.latent_query import parted
from warpattn.side_by_side import unbound
from warpattn.torch_modes import without_autocast


class Queries(NamedTuple):
    """q (total, heads, head_dim) by `cu`, or (batch, seq, heads, head_dim) without it."""

    q: QueryRows
    cu: Tensor | None
    longest: Any = None
    used: Tensor | None = None


class Keys(NamedTuple):
    """k and v, packed by `cu`, as a batch without it, or in pages by `table`."""

    k: Rows
    v: Rows
    cu: Tensor | None
    longest: Any = None
    used: Tensor | None = None
    table: Tensor | None = None


class Places(NamedTuple):
    """Sequence and position of each row of ragged sequences."""

    sequence: Tensor  # [total] int64
    position: Tensor  # [total] int64
    cu: Tensor  # [batch + 1] int32


def attend(queries: Queries, keys: Keys, tail: Tail) -> tuple[Tensor, Tensor]:
    """Return out and LSE in flash-attn's shapes: (total, heads, dim) and (heads, total), or those of a batch."""
    _require_lengths("q", queries)
    _require_lengths("k", keys)
    if queries.cu is None:
        return _batched(queries, keys, tail)
    if queries.used is None:
        return _attend(queries.q, queries.cu, bound("max_seqlen_q", queries.longest), keys, tail)
    values, _ = parted(queries.q)
    _require_rank("q", values, 3, "with cu_seqlens_q (total, heads, head_dim)")
    at = places("seqused_q", queries.used, len(values))
    rows = _rows("q", queries.cu, at, len(values))
    used = changed(queries.q, lambda x: x[rows])
    some, some_lse = _attend(used, at.cu, bound("max_seqlen_q", queries.longest), keys, tail)
    with without_autocast(some.device):
        out = some.new_zeros((len(values), *some.shape[1:])).index_copy(0, rows, some)
    lse = some_lse.new_full((len(some_lse), len(values)), -torch.inf).index_copy(1, rows, some_lse)
    return out, lse


def parts(name: str, x: Tensor, dim: int, count: int) -> tuple[Tensor, ...]:
    """Split `x` into the `count` tensors that are packed in a dimension."""
    if x.shape[dim] != count:
        raise AttentionError(f"{name} has shape {tuple(x.shape)}; dimension {dim} must have size {count}")
    return unbound(x, dim)


def places(name: str, lengths: Tensor, most: int) -> Places:
    """List the rows of sequences of these lengths, each at most `most`, by the argument `name`. Reads their sum from
    the device."""
    if lengths.device.type == "cpu" and lengths.numel():
        for length in (int(lengths.min()), int(lengths.max())):
            if not 0 <= length <= most:
                raise AttentionError(f"{name} gives a sequence {many(length, 'row')}; lengths are within 0 .. {most}")
    counts = lengths.long()
    cu = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    sequence = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    position = torch.arange(len(sequence), device=counts.device) - cu[sequence]
    return Places(sequence, position, cu.to(torch.int32))


def divided(name: str, cu: Tensor, total: int) -> Places:
    """List the rows of sequences that start at `cu`, which must cover all `total` rows."""
    at = places(name, cu.diff(), total)
    begins = cu.device.type != "cpu" or (len(cu) > 0 and int(cu[0]) == 0)
    if not begins or len(at.sequence) != total:
        rule = f"its first offset must be 0, and it must divide {many(total, 'row')}"
        raise AttentionError(f"{name} divides {many(len(at.sequence), 'row')}; {rule}")
    return at


def _batched(queries: Queries, keys: Keys, tail: Tail) -> tuple[Tensor, Tensor]:
    """Attend queries (batch, seq, heads, head_dim)."""
    values, _ = parted(queries.q)
    _require_rank("q", values, 4, "without cu_seqlens_q (batch, seq, heads, head_dim)")
    batch, seq = values.shape[:2]
    rows = changed(queries.q, lambda x: x.flatten(0, 1))
    flat = queries._replace(q=rows, cu=_even(batch, seq, values), longest=seq)
    out, lse = attend(flat, keys, tail)
    return out.unflatten(0, (batch, seq)), lse.unflatten(1, (batch, seq)).transpose(0, 1).contiguous()


def _attend(q: QueryRows, cu: Tensor, longest: int | None, keys: Keys, tail: Tail) -> tuple[Tensor, Tensor]:
    batch = len(cu) - 1
    if keys.table is not None:
        lengths = _lengths(keys)
        (values, beside), (k, k_scale), (v, v_scale) = parted(q), split(keys.k), split(keys.v)
        inputs = (values, k, v, beside.get("q_rope"))
        trained = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        _require_rank("q", values, 3, "with cu_seqlens_q (total, heads, head_dim)")
        if not trained:  # no kernel has gradients over pages
            kv = PagedKV(k, v, keys.table, lengths, k_scale=k_scale, v_scale=v_scale)
            if longest is None or longest * batch != len(values) or not _is_even(cu, longest):
                out, lse = attention_paged(q, kv, Ragged(cu, max_q=longest), **tail._asdict(), return_lse=True)
                return out, lse
            even = changed(q, lambda x: x.unflatten(0, (batch, longest)))
            out, lse = attention_paged(even, kv, **tail._asdict(), return_lse=True)
            return out.flatten(0, 1), lse.transpose(0, 1).flatten(1, 2)
    k, v, cu_k = _gathered(keys)
    seq = Ragged(cu, cu_k, longest, bound("max_seqlen_k", keys.longest))
    out, lse = attention_varlen(q, k, v, seq, **tail._asdict(), return_lse=True)
    return out, lse


def _lengths(keys: Keys) -> Tensor:
    """Return the number of keys of each paged sequence, int32 [batch]."""
    if keys.used is not None:
        return keys.used.to(torch.int32)
    if keys.cu is None:
        raise AttentionError("the lengths of the paged sequences are missing; they come as seqused_k or cu_seqlens_k")
    return keys.cu.diff()


def _name_of_lengths(keys: Keys) -> str:
    return "cu_seqlens_k" if keys.used is None else "seqused_k"


def _gathered(keys: Keys) -> tuple[Rows, Rows, Tensor]:
    """Gather k and v (total, heads, head_dim); return them with their offsets."""
    if keys.table is not None or keys.cu is None:
        layout = "without cu_seqlens_k (batch, seq, heads, head_dim)"
        for name, x in (("k", split(keys.k)[0]), ("v", split(keys.v)[0])):
            _require_rank(name, x, 4, layout if keys.table is None else "(pages, page_size, heads, head_dim)")
    if keys.table is not None:
        lengths, size = _lengths(keys), split(keys.k)[0].shape[1]
        if lengths.shape != keys.table.shape[:1]:
            rule = f"it must have one for each of {many(len(lengths), 'sequence')}"
            raise AttentionError(f"page_table has {many(len(keys.table), 'row')}; {rule}")
        at = places(_name_of_lengths(keys), lengths, keys.table.shape[1] * size)
        pages = keys.table.long()[at.sequence, at.position // size]
        within("page_table", pages, min(len(split(x)[0]) for x in (keys.k, keys.v)), "pages")
        there = pages, at.position % size
        return changed(keys.k, lambda x: x[there]), changed(keys.v, lambda x: x[there]), at.cu
    k, v, cu = keys.k, keys.v, keys.cu
    if cu is None:
        values, _ = split(k)
        cu = _even(values.shape[0], values.shape[1], values)
        k, v = (changed(x, lambda rows: rows.flatten(0, 1)) for x in (k, v))
    if keys.used is None:
        return k, v, cu
    for name, x in (("k", k), ("v", v)):
        _require_rank(name, split(x)[0], 3, "with cu_seqlens_k (total, heads, head_dim)")
    at = places("seqused_k", keys.used, min(len(split(x)[0]) for x in (k, v)))
    rows = _rows("k", cu, at, min(len(split(x)[0]) for x in (k, v)))
    return changed(k, lambda x: x[rows]), changed(v, lambda x: x[rows]), at.cu


def _rows(name: str, cu: Tensor, at: Places, total: int) -> Tensor:
    """Return the row numbers in q or k (`total` rows) of places in sequences that start at `cu`."""
    rows = cu.long()[at.sequence] + at.position
    within(f"cu_seqlens_{name}", rows, total, f"rows of {name}")
    return rows


def within(name: str, positions: Tensor, bound: int, what: str) -> None:
    """Check positions on the CPU; on a card the caller promises that they are in range."""
    if positions.device.type == "cpu" and positions.numel():
        least, most = int(positions.min()), int(positions.max())
        if least < 0 or most >= bound:
            wrong = least if least < 0 else most
            raise AttentionError(f"{name} leads to position {wrong}; it must be within the {bound} {what}")


def _require_rank(name: str, x: object, rank: int, layout: str) -> None:
    if not is_tensor(x) or x.ndim != rank:
        raise AttentionError(f"{name} is {kind_of(x)}; it must be a tensor of rank {rank}, {layout}")


def _require_lengths(name: str, rows: Queries | Keys) -> None:
    """Check the offsets and lengths of sequences, and that they are for equally many sequences."""
    if rows.cu is not None:
        _require_rank(f"cu_seqlens_{name}", rows.cu, 1, "(batch + 1)")
        require_integers(f"cu_seqlens_{name}", rows.cu)
    if rows.used is not None:
        _require_rank(f"seqused_{name}", rows.used, 1, "(batch)")
        require_integers(f"seqused_{name}", rows.used)
        if rows.cu is not None and len(rows.used) + 1 != len(rows.cu):
            rule = f"cu_seqlens_{name} has offsets of {many(len(rows.cu) - 1, 'sequence')}"
            raise AttentionError(f"seqused_{name} has {many(len(rows.used), 'element')}; {rule}")


def _even(batch: int, seq: int, like: Tensor) -> Tensor:
    return torch.arange(batch + 1, device=like.device, dtype=torch.int32) * seq


def _is_even(cu: Tensor, seq: int) -> bool:
    """Whether every sequence has `seq` rows. On a card and in a graph it reads no offsets: none others fit a valid
    bound `seq`."""
    unread = cu.device.type != "cpu" or torch.compiler.is_compiling()
    return unread or torch.equal(cu.to(torch.int32), _even(len(cu) - 1, seq, cu))


def bound(name: str, longest: Any) -> int | None:
    """max_seqlen as an int: programs pass ints, NumPy's ints and 0-dimensional tensors."""
    try:
        return None if longest is None else index(longest)
    except TypeError:
        raise AttentionError(f"{name} is {kind_of(longest)}; it must be an int") from None
