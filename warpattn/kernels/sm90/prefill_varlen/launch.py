"""The launches of a ragged or paged prefill on Hopper: order of query blocks, attention, combination of parts."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from warpattn.kernels.pieces.scheduler_sizes import ORDER_WARPS, PROGRAM_BLOCKS, RECORD, ListedSequences, OrderShape
from warpattn.problem import CheckedCall
from warpattn.problem.arch import compile_options
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Features, Operands, is_masked, modifier_args, programs
from warpattn.problem.scales import call_scales
from warpattn.sequences import PagedKV, PagedRagged, Ragged

from ...nvidia.arguments import ListedArgs, StridedRows, strided
from ...nvidia.clipped_map import ClippedMap, clipped_maps
from ...nvidia.combine_launch import ListedRows, combine_launch, workspace
from ..arguments import LARGEST_EXPONENT
from ..copies.launch import copied
from ..prefill.config import pad_dim, value_blocks
from ..prefill.eight_bit.transpose_launch import transposed
from ..prefill.query_maps import clipped_query_maps
from .config import VarlenConfig, VarlenShape

Layout = Ragged | PagedKV | PagedRagged


def list_launches(
    checked: CheckedCall, x: Operands, sequence: Layout, choice: Choice, only: ListedSequences | None = None
) -> tuple[Launch, ...]:
    """The launches of a call in order: transposition of 8-bit values or copies of K and V, if needed; order_kernel;
    prefill_varlen_kernel; and combination of partial outputs, if keys are split. The host reads no length: order_kernel
    makes the tile list, of `only` some ragged sequences if given."""
    only = only or ListedSequences(1, _lengths(sequence)[1])
    tiles = torch.empty(RECORD * (1 + choice.order.blocks), dtype=torch.int32, device=x.q.device)
    order = order_launch(checked, sequence, choice, tiles, only)
    first: tuple[Launch, ...] = (order,)
    if choice.config.tiles.products:
        values, launches = transposed(x.v, _lengths(sequence)[1])
        x, first = x._replace(v=values[None]), (*launches, order)
    elif choice.config.copied:
        x, sequence, copying = copied(x, sequence)
        first = copying, order
    problem, config = checked.problem, choice.config.tiles
    columns = value_blocks(problem.dim_v)
    if choice.partitions == 1:
        return *first, *(attention_launch(checked, x, sequence, choice, tiles, column) for column in columns)
    parts = workspace(problem, choice.partitions, pad_dim(columns[-1] + config.padded_v), x.q)
    out = parts.o.flatten(0, 1) if problem.ragged_queries else parts.o
    to_parts = x._replace(out=out, lse=parts.denominators)
    blocks = [attention_launch(checked, to_parts, sequence, choice, tiles, column) for column in columns]
    row_unit = 1 if problem.ragged_queries else problem.seq_q
    listed = ListedRows(ListedArgs(tiles, config.tokens, row_unit), choice.order.blocks)
    return *first, *blocks, combine_launch("sm90", checked, x, choice.partitions, parts, listed)


def order_launch(
    checked: CheckedCall, sequence: Layout, choice: Choice, tiles: Tensor, only: ListedSequences
) -> Launch:
    """Launch that writes the list of query blocks to `tiles`."""
    order_tiles, problem = choice.config.order_tiles, checked.problem
    mask, _ = programs(checked)
    q, k = _lengths(sequence)
    candidates = choice.order.candidates
    args = {
        "q_ptr": q, "k_ptr": k, "list_ptr": tiles,
        "shape": OrderShape(problem.batch, problem.seq_q, problem.seq_k, candidates),
        "only": only, "mask_args": modifier_args(checked)["mask_args"],
    }  # fmt: skip

    def source():
        from .signature import order_source  # imports Triton

        return order_source(args, order_tiles, mask)

    grid = (max(1, -(-candidates // PROGRAM_BLOCKS)),)
    key, options = (order_tiles, mask.key), compile_options(ORDER_WARPS)
    return Launch("sm90.order", "sm90", key, source, options, grid, args, pdl=True, per_step=True)


def attention_launch(
    checked: CheckedCall, x: Operands, sequence: Layout, choice: Choice, tiles: Tensor, first_value: int = 0
) -> Launch:
    """The launch of attention for values from column `first_value` on."""
    config, problem = choice.config, checked.problem
    config = replace(config, tiles=config.tiles.from_value(first_value), copied=False)
    q = clipped_query_maps("q", x.q, config.tiles, config.tiles.qk_parts)
    o = clipped_query_maps("out", x.out, config.tiles, config.tiles.store_parts)
    pages = _page_table(sequence)
    shape = VarlenShape(
        heads_q=problem.heads_q, group=problem.heads_q // problem.heads_kv, section=choice.order.section,
        lse_batch=0 if problem.ragged_queries else problem.heads_q * problem.seq_q, lse_head=problem.seq_q,
        q_step=q.step, q_unit=q.unit, o_step=o.step, o_unit=o.unit, table_stride=pages.stride, pages=pages.count,
        starts=problem.seq_q if problem.ragged_queries else problem.batch,
        row_unit=1 if problem.ragged_queries else problem.seq_q, splits=choice.partitions,
    )  # fmt: skip
    scale = checked.scale if problem.kv_dtype is None else call_scales(checked.scale, x, sequence)
    args = {
        "q_maps": q.map, "o_maps": o.map,
        "k_source": _key_rows("k", x.k, config, config.tiles.qk_parts),
        "v_source": _key_rows("v", x.v, config, config.tiles.v_parts),
        "list_ptr": tiles, "table_ptr": pages.table, "lse_ptr": x.lse, "sinks_ptr": x.sinks, "scale": scale,
        "shape": shape, **modifier_args(checked),
    }  # fmt: skip

    split = config.tiles.split
    has_lse = (problem.has_lse or split) and not first_value
    features = Features(*programs(checked, LARGEST_EXPONENT), problem.has_sinks and not split, has_lse, split_keys=True)

    def source(one_copy: bool = False):
        from .signature import prefill_varlen_source  # imports Triton

        tiles = replace(config.tiles, one_copy=one_copy)
        return prefill_varlen_source(args, replace(config, tiles=tiles), features)

    shared = config.tiles.shares_code(is_masked(problem))
    return Launch(
        "sm90.prefill_varlen", "sm90", (config, features.key, shared), source, compile_options(), choice.grid, args,
        persistent=1, pdl=True, shared_code=shared,
    )  # fmt: skip


def _lengths(sequence: Layout) -> tuple[Tensor | None, Tensor]:
    """(offsets of the queries, None where all sequences have the same number; offsets or lengths of the keys)."""
    if isinstance(sequence, Ragged):
        q = sequence.cu_q.contiguous()
        return q, q if sequence.cu_k is None else sequence.cu_k.contiguous()
    if isinstance(sequence, PagedRagged):
        return sequence.cu_q.contiguous(), sequence.kv.lengths.contiguous()
    return None, sequence.lengths.contiguous()


def _key_rows(name: str, x: Tensor, config: VarlenConfig, widths: tuple[int, ...]) -> ClippedMap | StridedRows:
    """The kernel's argument for K or V (also transposed V): a TMA map, or strides where rows are copied one by one."""
    if x.ndim == 5:
        return ClippedMap((x,), 0, 0)
    return clipped_maps(name, x, config.box, widths) if config.box else strided(x)


class _PageTable(NamedTuple):
    table: Tensor | None  # (batch, pages of a sequence), last stride 1; None without pages
    stride: int  # from one sequence to the next
    count: int  # pages of the cache


def _page_table(sequence: Layout) -> _PageTable:
    """The block table in the layout that the kernel reads."""
    if isinstance(sequence, Ragged):
        return _PageTable(None, 0, 0)
    kv = sequence.kv if isinstance(sequence, PagedRagged) else sequence
    table = kv.block_table if kv.block_table.stride(1) == 1 else kv.block_table.contiguous()
    return _PageTable(table, table.stride(0), kv.k_pages.shape[0])
