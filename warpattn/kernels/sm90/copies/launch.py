"""The launch before prefill that copies keys and values. Nothing in this file imports Triton."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from warpattn.problem.arch import compile_options
from warpattn.problem.launch import Launch
from warpattn.problem.operands import Operands
from warpattn.sequences import PagedKV, PagedRagged, Sequence

from ...nvidia.arguments import strided
from ..arguments import COPIED_KEYS, CopyIndex, CopyShape


class Copied(NamedTuple):
    """A call over copies, and what makes them."""

    x: Operands
    sequence: Sequence
    launch: Launch


def copied(x: Operands, sequence: Sequence, least_q: int = 1) -> Copied:
    """The operands and the sequence of a call with copies of its keys and values, in the dtype of its queries. Those of
    pages have pages of COPIED_KEYS, and none for ragged sequences with fewer than `least_q` queries."""
    if isinstance(sequence, PagedRagged):
        cu_q = sequence.cu_q.contiguous()
        paged, table, launch = _paged(x, sequence.kv, CopyIndex.of(sequence.kv, cu_q), least_q)
        return Copied(paged, replace(sequence, kv=sequence.kv.with_fields(**table)), launch)
    if isinstance(sequence, PagedKV):
        paged, table, launch = _paged(x, sequence, CopyIndex.of(sequence, None), least_q)
        return Copied(paged, sequence.with_fields(**table), launch)
    *outer, keys, heads, _ = x.k.shape
    batch = outer[0] if outer else 1
    k, v = (x.q.new_empty(batch, heads, keys, y.shape[-1]).transpose(1, 2) for y in (x.k, x.v))
    if not outer:
        k, v = k[0], v[0]
    shape = CopyShape(keys, -(-keys // COPIED_KEYS), heads, x.k.shape[-1] // 8, x.v.shape[-1] // 8, 0, 1, least_q)
    launch = _launch(x, (k, v), CopyIndex(None, 0, None, None, None), shape, batch)
    return Copied(x._replace(k=k, v=v), sequence, launch)


def _paged(
    x: Operands, kv: PagedKV, index: CopyIndex, least_q: int
) -> tuple[Operands, dict[str, Tensor], Launch]:
    """The operands with copies of a cache's pages, the fields of a cache that holds these, and the launch."""
    page_size, heads = x.k.shape[1:3]
    keys = kv.block_table.shape[1] * page_size
    places, batch = -(-keys // COPIED_KEYS), len(kv.block_table)
    k, v = (x.q.new_empty(batch * places, heads, COPIED_KEYS, y.shape[-1]).transpose(1, 2) for y in (x.k, x.v))
    table = torch.empty(batch, places, dtype=torch.int32, device=x.q.device)
    shape = CopyShape(
        keys, places, heads, x.k.shape[-1] // 8, x.v.shape[-1] // 8, len(x.k), page_size, least_q
    )  # fmt: skip
    launch = _launch(x, (k, v), index._replace(out_table=table), shape, batch)
    return x._replace(k=k, v=v), {"k_pages": k, "v_pages": v, "block_table": table}, launch


def _launch(x: Operands, copies: tuple[Tensor, Tensor], index: CopyIndex, shape: CopyShape, batch: int) -> Launch:
    k_cols, v_cols = (max(16, 1 << (y.shape[-1] - 1).bit_length()) for y in (x.k, x.v))
    k_out, v_out = copies
    args = {
        "k": strided(x.k), "v": strided(x.v), "k_out": k_out, "v_out": v_out, "index": index, "shape": shape,
    }  # fmt: skip
    paged, ragged = index.table is not None, index.cu_q is not None

    def source():
        from .signature import copy_source  # imports Triton

        return copy_source(args, k_cols, v_cols, paged, ragged)

    grid = (batch * shape.places, shape.heads, 2)
    key = (k_cols, v_cols, paged, ragged, x.k.dtype, x.v.dtype, x.q.dtype)
    return Launch("sm90.copy", "sm90", key, source, compile_options(), grid, args)
