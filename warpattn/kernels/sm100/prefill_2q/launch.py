"""The launch of the prefill kernels with two query tiles a CTA, or with one, with every argument by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warpattn.problem import CheckedCall, Problem
from warpattn.problem.arch import compile_options
from warpattn.problem.launch import Choice, Launch, TensorMap
from warpattn.problem.operands import Operands, modifier_args, programs
from warpattn.sequences import PagedKV, Ragged, Sequence

from ...nvidia.clipped_map import clipped_map
from ..config import FA4Config
from ..traits import LEAST_ROWS, STORE_COLUMNS, Traits

OPTIONS = compile_options()


def prefill_launch(checked: CheckedCall, x: Operands, sequence: Sequence, choice: Choice, traits: Traits) -> Launch:
    """The launch of the kernel with two query tiles a CTA, or with one."""
    problem = checked.problem
    config: FA4Config = choice.config
    mask, score = programs(checked)
    tiles = max(1, -(-_longest(problem, sequence) // config.BM_eff))
    args = _places(x, sequence, config) | {
        "lse_ptr": x.lse, "sinks_ptr": x.sinks, "scale": checked.scale,
        "shape": (problem.seq_q, problem.seq_k, problem.heads_q, tiles), **modifier_args(checked),
    }  # fmt: skip

    def source() -> Any:
        from .signature import prefill_source  # imports Triton

        if config.num_q == 2:
            return prefill_source(config, traits, mask, score)
        from ..prefill_1q.kernel import mha_1q_kernel

        return prefill_source(config, traits, mask, score, mha_1q_kernel)

    key = (config, traits, mask.key, None if score is None else score.key)
    grid = (tiles * choice.partitions, *choice.grid[1:])
    return Launch(f"sm100.{choice.kernel}", "sm100", key, source, OPTIONS, grid, args)


def _longest(problem: Problem, sequence: Sequence) -> int:
    """An upper bound of the queries of a sequence; nothing is read from a GPU to find it."""
    if not isinstance(sequence, Ragged):
        return problem.seq_q
    if sequence.max_q is not None:
        return sequence.max_q
    if sequence.cu_q.device.type == "cpu":
        return int(sequence.cu_q.diff().max())
    return problem.seq_q


def _places(x: Operands, sequence: Sequence, config: FA4Config) -> dict[str, Any]:
    """Descriptors, and what says where sequences lie; see `mha_2q.find_sources`."""
    dense = {"q_desc": x.q, "k_desc": x.k, "v_desc": x.v, "o_desc": x.out, "places": ()}
    if isinstance(sequence, Ragged):
        cu_q = sequence.cu_q.contiguous()
        cu_k = cu_q if sequence.cu_k is None else sequence.cu_k.contiguous()
        heads = config.tile_heads
        q, *q_units = _rows_map("q", x.q, config.BM_q // heads, heads, config.BK0)
        k, *k_units = _rows_map("k", x.k, config.BN, 1, config.BK0)
        v, *v_units = _rows_map("v", x.v, config.BN, 1, config.padded_ov_depth)
        o, *o_units = _rows_map("out", x.out, config.BM_q // heads, heads, STORE_COLUMNS)
        places = (cu_q, cu_k, *q_units, *k_units, *v_units, *o_units)
        return {"q_desc": q, "k_desc": k, "v_desc": v, "o_desc": o, "places": places}
    return dense | key_places(x, sequence, (config.box_rows, config.BK0, config.padded_ov_depth))


def key_places(x: Operands, sequence: Sequence, box: tuple[int, int, int]) -> dict[str, Any]:
    """Descriptors of dense or paged keys and what says where sequences lie; box: (rows, columns of K, columns of V)."""
    if not isinstance(sequence, PagedKV):
        return {"k_desc": x.k, "v_desc": x.v, "places": ()}
    rows, k_cols, v_cols = box
    table, stride = _table(sequence)
    places = (sequence.lengths.contiguous(), table, stride, sequence.k_pages.shape[0])
    if rows < LEAST_ROWS:
        return {"k_desc": x.k, "v_desc": x.v, "places": (*places, *_runs(x.k), *_runs(x.v))}
    k, *k_units = _rows_map("kv.k_pages", x.k, rows, 1, k_cols)
    v, *v_units = _rows_map("kv.v_pages", x.v, rows, 1, v_cols)
    return {"k_desc": k, "v_desc": v, "places": (*places, *k_units, *v_units)}


def _runs(pages: Tensor) -> tuple[int, ...]:
    """Runs of 8 elements from a page, a row and a head to the next, and in a head; see `rows.CopiedRows`."""
    return (*(stride // 8 for stride in pages.stride()[:3]), pages.shape[3] // 8)


def _rows_map(name: str, x: Tensor, rows: int, heads: int, cols: int) -> tuple[TensorMap, int, int]:
    """(map, step, unit) of sequences of rows, in boxes of `rows` times `heads`: heads lie inside of rows."""
    by_head, step, unit = clipped_map(name, x, rows, cols)

    def turned(values: tuple[int, ...]) -> tuple[int, ...]:
        return (*values[:2], values[3], values[2], values[4])

    return TensorMap(x, (1, 1, rows, heads, cols), turned(by_head.shape), turned(by_head.strides)), step, unit


def _table(sequence: PagedKV) -> tuple[Tensor, int]:
    """The block table, and elements from a sequence to the next; at least one entry to point at."""
    table = sequence.block_table if sequence.block_table.stride(1) == 1 else sequence.block_table.contiguous()
    return (table, table.stride(0)) if table.numel() else (torch.zeros_like(sequence.lengths), 0)
