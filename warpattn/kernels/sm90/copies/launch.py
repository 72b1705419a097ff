"""Makes the launch before prefill that copies K and V. This file imports no Triton."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.problem import CheckedCall
from warpattn.problem.arch import compile_options
from warpattn.problem.launch import Launch
from warpattn.problem.memory import COPIED_KEYS
from warpattn.problem.operands import Operands, is_masked
from warpattn.problem.scales import scale_rows
from warpattn.quantized import granularity
from warpattn.sequences import PagedKV, PagedRagged, Sequence

from ...nvidia.arguments import strided
from ..arguments import PLACES_OF_PROGRAM, CopyIndex, CopyShape, CopySource, PlaceLists, PlacesShape
from .config import CopiedRows, bytes_of_place, copied_rows, least_queries, of_token

PROGRAMS = 1056  # of copies/places.py: eight for each of 132 SMs


class Copied(NamedTuple):
    """A call over copies, and their launch."""

    x: Operands
    sequence: Sequence
    launch: Launch


def copied(x: Operands, sequence: Sequence) -> Copied:
    """Operands and sequence of a call with copies of its K and V, in the dtype of its queries. Copies of a paged cache
    have pages of COPIED_KEYS."""
    if isinstance(sequence, PagedKV):
        return _of_pages(x, sequence)
    *outer, keys, heads, _ = x.k.shape
    batch = outer[0] if outer else 1
    k, v = (x.q.new_empty(batch, heads, keys, y.shape[-1]).transpose(1, 2) for y in (x.k, x.v))
    copies = x._replace(k=k, v=v) if outer else x._replace(k=k[0], v=v[0])
    shape = CopyShape(keys, -(-keys // COPIED_KEYS), heads, x.k.shape[-1] // 8, x.v.shape[-1] // 8, 0, 1)
    launch = _launch(x, copies, sequence, CopyIndex(None, 0, None, None), shape)
    return Copied(copies, replace(sequence, **_without_factors(x, sequence)), launch)


def _of_pages(x: Operands, kv: PagedKV) -> Copied:
    """`copied` of a cache: every sequence has its own places, for as many keys as its table has."""
    page_size, heads = x.k.shape[1:3]
    keys = kv.block_table.shape[1] * page_size
    places, batch = -(-keys // COPIED_KEYS), len(kv.block_table)
    k, v = (x.q.new_empty(batch * places, heads, COPIED_KEYS, y.shape[-1]).transpose(1, 2) for y in (x.k, x.v))
    table = torch.empty(batch, places, dtype=torch.int32, device=x.q.device)
    shape = CopyShape(keys, places, heads, x.k.shape[-1] // 8, x.v.shape[-1] // 8, len(x.k), page_size)
    copies = x._replace(k=k, v=v)
    launch = _launch(x, copies, kv, CopyIndex.of(kv)._replace(out_table=table), shape)
    fields = {"k_pages": k, "v_pages": v, "block_table": table, **_without_factors(x, kv)}
    return Copied(copies, kv.with_fields(**fields), launch)


def _scales(x: Operands, sequence: Sequence) -> dict[str, tuple[Tensor, Tensor | None]]:
    """K and V by field name, each with its scales if they are of tokens, else None."""
    pairs = {"k_scale": (x.k, sequence.k_scale), "v_scale": (x.v, sequence.v_scale)}
    return {name: (y, s if of_token(granularity(s, y.shape)) else None) for name, (y, s) in pairs.items()}


def _without_factors(x: Operands, sequence: Sequence) -> dict[str, None]:
    """Scale fields that the copies include, set to None."""
    return {name: None for name, (_, scale) in _scales(x, sequence).items() if scale is not None}


def _launch(x: Operands, copies: Operands, sequence: Sequence, index: CopyIndex, shape: CopyShape) -> Launch:
    paged = index.table is not None
    kinds, args = _copying(x, copies, sequence, index, shape)

    def source():
        from .signature import copy_source  # imports Triton

        return copy_source(args, kinds)

    batch = len(index.table) if paged else len(copies.k) if copies.k.ndim == 4 else 1
    grid = (batch * shape.places, shape.heads, 2)
    key = (kinds, x.k.dtype, x.v.dtype, x.q.dtype)
    return Launch("sm90.copy", "sm90", key, source, compile_options(), grid, args)


def _copying(
    x: Operands, copies: Operands, sequence: Sequence, index: CopyIndex, shape: CopyShape
) -> tuple[tuple[CopiedRows, CopiedRows], dict[str, Any]]:
    """(kinds of K and of V, arguments) of a kernel that copies them."""
    pairs, paged = tuple(_scales(x, sequence).values()), index.table is not None
    k_kind, v_kind = (copied_rows(y.shape[-1], paged, granularity(scale, y.shape)) for y, scale in pairs)
    k, v = (CopySource(strided(y), scale_rows(y, scale)) for y, scale in pairs)
    args = {"k": k, "v": v, "k_out": copies.k, "v_out": copies.v, "index": index, "shape": shape}
    return (k_kind, v_kind), args


class InPlaces(NamedTuple):
    """A step over the copies of its long prompts' keys: operands, sequence, and the launches that make the copies."""

    x: Operands
    sequence: PagedRagged
    lists: PlaceLists
    capacity: int  # places
    launches: tuple[Launch, ...]


def in_places(checked: CheckedCall, x: Operands, sequence: PagedRagged, workspace: Tensor) -> InPlaces:
    """A step whose long prompts' keys are copied into the workspace, in the dtype of its queries."""
    problem, kv = checked.problem, sequence.kv
    page_size, heads, batch = problem.page_size, problem.heads_kv, len(kv.block_table)
    keys = kv.block_table.shape[1] * page_size
    width = -(-keys // COPIED_KEYS)
    capacity = min(workspace.nbytes // bytes_of_place(problem), batch * width)
    k, v = _split(workspace.view(torch.uint8), capacity, heads, x)
    new = partial(torch.empty, dtype=torch.int32, device=x.q.device)
    lists = PlaceLists(new(1 + batch), new(capacity, 2), new(batch, width), width)
    shape = CopyShape(keys, width, heads, x.k.shape[-1] // 8, x.v.shape[-1] // 8, len(x.k), page_size)
    copies = x._replace(k=k, v=v)
    kinds, args = _copying(x, copies, kv, CopyIndex.of(kv), shape)
    args["lists"] = lists

    def source():
        from .signature import copy_places_source  # imports Triton

        return copy_places_source(args, kinds)

    fields = {"k_pages": k, "v_pages": v, "block_table": lists.table, **_without_factors(x, kv)}
    copying = Launch(
        "sm90.copy_places", "sm90", (kinds, x.k.dtype, x.v.dtype, x.q.dtype), source, compile_options(),
        (PROGRAMS,), args, persistent=1, pdl=True,
    )  # fmt: skip
    listing = _places_launch(checked, sequence, lists, PlacesShape(batch, keys, capacity, least_queries(problem)))
    return InPlaces(copies, replace(sequence, kv=kv.with_fields(**fields)), lists, capacity, (listing, copying))


def _split(workspace: Tensor, capacity: int, heads: int, x: Operands) -> tuple[Tensor, Tensor]:
    """K and V in bytes of a workspace: (places, COPIED_KEYS, heads, dim), heads outside of keys in memory."""
    ends = [2 * capacity * heads * COPIED_KEYS * dim for dim in (x.k.shape[-1], x.v.shape[-1])]
    parts = workspace.flatten()[: sum(ends)].split(ends)
    k, v = (part.view(x.q.dtype).view(capacity, heads, COPIED_KEYS, -1).transpose(1, 2) for part in parts)
    return k, v


def _places_launch(checked: CheckedCall, sequence: PagedRagged, lists: PlaceLists, shape: PlacesShape) -> Launch:
    """The launch that fills `lists`."""
    masked = is_masked(checked.problem)
    args = {
        "lengths": sequence.kv.lengths.contiguous(), "cu_q": sequence.cu_q.contiguous(), "lists": lists, "shape": shape,
    }  # fmt: skip

    def source():
        from .signature import places_source  # imports Triton

        return places_source(args, masked)

    grid = (-(-shape.capacity // PLACES_OF_PROGRAM),)
    return Launch("sm90.places", "sm90", (masked,), source, compile_options(), grid, args, pdl=True, per_step=True)
