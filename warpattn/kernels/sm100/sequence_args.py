"""Runtime arguments of the Blackwell kernels about sequences, by name.

A launch fills these tuples and the kernel reads their fields, of 32 bits unless they say otherwise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.language.nodes import Node
from warpattn.problem.argument_types import Int64
from warpattn.problem.launch import TensorMap
from warpattn.problem.operands import RUN, Operands
from warpattn.sequences import PagedKV, PagedRagged, Ragged, Sequence

from ..nvidia.arguments import StridedRows, UsedRows, strided
from ..nvidia.clipped_map import clipped_map
from .config import FA4Config
from .traits import LEAST_ROWS


class Shape(NamedTuple):
    """Lengths of the problem, in total for ragged batches."""

    seq_q: Any
    seq_k: Any
    heads_q: Any
    tiles: Any  # of queries


class Lengths(NamedTuple):
    """The same for latent attention."""

    seq_q: Any
    seq_k: Any


class MapRows(NamedTuple):
    """Rows of a tensor map of sequences, in offsets; see nvidia/clipped_rows.py."""

    step: Any  # from one sequence (or page) to the next
    unit: Any  # from one row to the next


class RunRows(NamedTuple):
    """Rows that are copied one by one, in runs of 16 bytes."""

    page: Int64
    row: Int64
    head: Int64
    runs: Any  # of a head


class TableArgs(NamedTuple):
    """Keys of each sequence, and their pages."""

    lengths: Any
    entries: Any
    stride: Int64  # from a sequence to the next
    last: Any  # page of the cache


class DenseArgs(NamedTuple):
    """Rows of V, which end with the keys that a query tile sees; a pair of CTAs has none."""

    v: MapRows


class RaggedArgs(NamedTuple):
    """Where sequences start, and the rows of the operands."""

    cu_q: Any
    cu_k: Any
    q: MapRows
    k: MapRows
    v: MapRows
    o: MapRows


class PagedArgs(NamedTuple):
    """The block table, and the rows of pages: `RunRows` where no box of a map fits into a page."""

    table: TableArgs
    k: MapRows | RunRows
    v: MapRows | RunRows


class PagedRaggedArgs(NamedTuple):
    """Both: so many sequences, fewer than a launch has room for; where their queries start; and pages of keys."""

    batch: Any
    cu_q: Any
    q: MapRows
    o: MapRows
    table: TableArgs
    k: MapRows | RunRows
    v: MapRows | RunRows


class RecomputeArgs(NamedTuple):
    """The operands of a prefill by their addresses, for tiles that are attended to again."""

    q: StridedRows
    k: StridedRows
    v: StridedRows
    out: StridedRows
    runs_qk: Any  # of 8 columns
    runs_v: Any


class KeyAddresses(NamedTuple):
    """Keys and values by their addresses, of kernels that address queries and output themselves."""

    k: StridedRows
    v: StridedRows


UNMAPPED = MapRows(0, 0)  # rows of queries and output that a kernel addresses itself


def sequence_args(x: Operands, sequence: Sequence, config: FA4Config) -> dict[str, Any]:
    """The kernel's arguments for the operands of a prefill, and for where its sequences lie."""
    if config.pair_cta:
        return {"q_desc": x.q, "k_desc": x.k, "v_desc": x.v, "o_desc": x.out, "sequence_args": ()}
    box = (config.box_rows, config.BK0, config.padded_ov_depth)
    if not isinstance(sequence, Ragged | PagedRagged):
        return {"q_desc": x.q, "o_desc": x.out} | key_args(x, sequence, box)
    heads = config.tile_heads
    q, q_rows = rows_map("q", x.q, config.BM_q // heads, heads, config.BK0)
    o, o_rows = rows_map("out", x.out, config.BM_q // heads, heads, config.store_columns)
    return {"q_desc": q, "o_desc": o} | ragged_args(x, sequence, box, (q_rows, o_rows))


def recompute_args(keep: Node, x: Operands, config: FA4Config) -> RecomputeArgs | tuple[()]:
    """The kernel's arguments for tiles that meet values which `keep` of a mask hides; nothing if it hides none."""
    if config.pair_cta or not hides(keep):
        return ()
    rows = [strided(each) for each in (x.q, x.k, x.v, x.out)]
    return RecomputeArgs(*rows, x.q.shape[-1] // RUN, x.v.shape[-1] // RUN)


def key_addresses(keep: Node, x: Operands) -> KeyAddresses | tuple[()]:
    """The same of kernels that address queries and output themselves."""
    return KeyAddresses(strided(x.k), strided(x.v)) if hides(keep) else ()


def hides(keep: Node) -> bool:
    """Whether a mask may hide a key that is within its sequence."""
    return not (keep.is_constant and keep.value is True)


def ragged_args(
    x: Operands, sequence: Ragged | PagedRagged, box: tuple[int, int, int], own: tuple[MapRows, MapRows]
) -> dict[str, Any]:
    """The arguments for keys, and for where sequences start whose queries are laid end to end; box: as of `key_args`;
    own: the rows of queries and of the output."""
    cu_q, (q_rows, o_rows) = sequence.cu_q.contiguous(), own
    if isinstance(sequence, PagedRagged):
        keys = key_args(x, sequence.kv, box)
        return keys | {"sequence_args": PagedRaggedArgs(len(cu_q) - 1, cu_q, q_rows, o_rows, *keys["sequence_args"])}
    cu_k = cu_q if sequence.cu_k is None else sequence.cu_k.contiguous()
    rows, k_cols, v_cols = box
    k, k_rows = rows_map("k", x.k, rows, 1, k_cols)
    v, v_rows = rows_map("v", x.v, rows, 1, v_cols)
    return {"k_desc": k, "v_desc": v, "sequence_args": RaggedArgs(cu_q, cu_k, q_rows, k_rows, v_rows, o_rows)}


def key_args(x: Operands, sequence: Sequence, box: tuple[int, int, int]) -> dict[str, Any]:
    """The arguments for dense or paged keys; box: (rows, columns of K, columns of V) of what one copy reads."""
    rows, k_cols, v_cols = box
    if not isinstance(sequence, PagedKV):
        v, v_rows = rows_map("v", x.v, rows, 1, v_cols)
        return {"k_desc": x.k, "v_desc": v, "sequence_args": DenseArgs(v_rows)}
    table = TableArgs(sequence.lengths.contiguous(), *_table(sequence), sequence.k_pages.shape[0] - 1)
    if rows < LEAST_ROWS:
        return {"k_desc": x.k, "v_desc": x.v, "sequence_args": PagedArgs(table, _run_rows(x.k), _run_rows(x.v))}
    k, k_rows = rows_map("kv.k_pages", x.k, rows, 1, k_cols)
    v, v_rows = rows_map("kv.v_pages", x.v, rows, 1, v_cols)
    return {"k_desc": k, "v_desc": v, "sequence_args": PagedArgs(table, k_rows, v_rows)}


def _run_rows(pages: Tensor) -> RunRows:
    """The rows of (pages, rows, heads, dim)."""
    page, row, head = (stride // RUN for stride in pages.stride()[:3])
    return RunRows(page, row, head, pages.shape[3] // RUN)


def used_rows(sequence: Sequence) -> UsedRows | None:
    """The rows of queries over pages that are laid end to end, which may be fewer than there is room for."""
    return UsedRows(len(sequence.kv.lengths), sequence.cu_q.contiguous()) if isinstance(sequence, PagedRagged) else None


def rows_map(name: str, x: Tensor, rows: int, heads: int, cols: int) -> tuple[TensorMap, MapRows]:
    """The map of sequences of rows, in boxes of `rows` times `heads`."""
    boxes, step, unit = clipped_map(name, x, rows, cols, heads)
    return boxes, MapRows(step, unit)


def _table(sequence: PagedKV) -> tuple[Tensor, int]:
    """The block table, and elements from a sequence to the next; at least one entry to point at."""
    table = sequence.block_table if sequence.block_table.stride(1) == 1 else sequence.block_table.contiguous()
    return (table, table.stride(0)) if table.numel() else (torch.zeros_like(sequence.lengths), 0)
