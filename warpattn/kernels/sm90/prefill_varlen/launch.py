"""The two launches of a ragged or paged prefill on Hopper: the order of the query blocks, then attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warpattn.problem import CheckedCall
from warpattn.problem.arch import ARCHS, compile_options
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, modifier_args, programs
from warpattn.sequences import PagedKV, Ragged

from ...nvidia.clipped_map import clipped_map
from .config import PROGRAM_NUMBERS, Form, choose

RECORD = 8  # int32 of a record and of the head of the list, as in pieces/scheduler_varlen.py
OPTIONS = compile_options()
ORDER_OPTIONS = compile_options(warps=8)  # as many as the layouts of pieces/order_kernel.py have


def list_launches(checked: CheckedCall, x: Operands, sequence: Ragged | PagedKV) -> tuple[Launch, ...]:
    """Launches of order_kernel and lengths_kernel. Nothing is read from the device: the list is made there."""
    choice = choose(checked.problem, ARCHS["sm90"])
    queries = torch.empty(RECORD * (1 + choice.order.blocks), dtype=torch.int32, device=x.q.device)
    return order_launch(checked, sequence, choice, queries), attention_launch(checked, x, sequence, choice, queries)


def order_launch(checked: CheckedCall, sequence: Ragged | PagedKV, choice: Choice, queries: Tensor) -> Launch:
    """Write the list of query blocks."""
    form, problem = choice.config, checked.problem
    mask, _ = programs(checked)
    if isinstance(sequence, Ragged):
        q = sequence.cu_q.contiguous()
        k = q if sequence.cu_k is None else sequence.cu_k.contiguous()
    else:
        q, k = None, sequence.lengths.contiguous()
    numbers = choice.order.numbers
    args = {
        "q_ptr": q, "k_ptr": k, "list_ptr": queries, "shape": (problem.batch, problem.seq_q, problem.seq_k, numbers),
        "mask_args": modifier_args(checked)["mask_args"],
    }  # fmt: skip

    def source():
        from .signature import order_source  # imports Triton

        return order_source(form, mask)

    grid = (max(1, -(-numbers // PROGRAM_NUMBERS)),)
    return Launch("sm90.order", "sm90", (form, mask.key), source, ORDER_OPTIONS, grid, args)


def attention_launch(
    checked: CheckedCall, x: Operands, sequence: Ragged | PagedKV, choice: Choice, queries: Tensor
) -> Launch:
    """Attention of the blocks in the list."""
    form, problem = choice.config, checked.problem
    mask, score = programs(checked)
    q_map, *q_units = clipped_map("q", x.q, form.tiles.rows, form.tiles.padded_qk)
    o_map, *o_units = clipped_map("out", x.out, form.tiles.rows, form.tiles.store_cols)
    table, table_shape = _table(sequence)
    lse = (0, problem.seq_q) if problem.kind == "ragged" else (problem.heads_q * problem.seq_q, problem.seq_q)
    group = problem.heads_q // problem.heads_kv
    args = {
        "q_desc": q_map, "o_desc": o_map,
        "k_source": _keys("k", x.k, form, form.tiles.padded_qk), "v_source": _keys("v", x.v, form, form.tiles.padded_v),
        "list_ptr": queries, "table_ptr": table, "lse_ptr": x.lse, "sinks_ptr": x.sinks, "scale": checked.scale,
        "shape": (problem.heads_q, group, choice.order.section, *lse, *q_units, *o_units, *table_shape),
        **modifier_args(checked),
    }  # fmt: skip

    def source():
        from .signature import lengths_source  # imports Triton

        return lengths_source(form, mask, score, problem.has_sinks, problem.has_lse)

    key = (form, mask.key, None if score is None else score.key, problem.has_sinks, problem.has_lse)
    return Launch("sm90.prefill_lengths", "sm90", key, source, OPTIONS, choice.grid, args, persistent=True)


def _keys(name: str, x: Tensor, form: Form, cols: int) -> tuple[Any, ...]:
    """The kernel's source of K or V: a map with step and unit, or an address with strides in runs of 8 elements."""
    if form.box:
        return clipped_map(name, x, form.box, cols)
    return x, x.stride(0) // 8, x.stride(1) // 8, x.stride(2) // 8


def _table(sequence: Ragged | PagedKV) -> tuple[Tensor | None, tuple[int, int]]:
    """The block table, and its row stride and the pages of the cache."""
    if isinstance(sequence, Ragged):
        return None, (0, 0)
    table = sequence.block_table if sequence.block_table.stride(1) == 1 else sequence.block_table.contiguous()
    return table, (table.stride(0), sequence.k_pages.shape[0])
