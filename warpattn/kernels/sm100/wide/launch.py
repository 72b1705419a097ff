"""The launches of wide heads on Blackwell: their kernel and, where keys are split, the combination."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from warpattn.problem import CheckedCall
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands
from warpattn.sequences import Ragged, Sequence

from ..launch import longest_queries
from ..mla.launch import row_launches
from ..sequence_args import MapRows, RaggedArgs, key_args, rows_map
from ..tile import row_tiles
from .config import BLOCK, WideConfig


def wide_launches(checked: CheckedCall, x: Operands, sequence: Sequence, choice: Choice) -> tuple[Launch, ...]:
    """The launches of a choice."""
    config: WideConfig = choice.config
    tiles = row_tiles(checked.problem, longest_queries(checked.problem, sequence), config)
    choice = replace(choice, grid=(tiles * choice.partitions, *choice.grid[1:]))

    def source(*made: Any) -> Any:
        from .signature import wide_source  # imports Triton

        return wide_source(*made)

    return row_launches(checked, x, _keys(x, sequence, config), choice, source)


def _keys(x: Operands, sequence: Sequence, config: WideConfig) -> dict[str, Any]:
    """The kernel's arguments for keys and values, and for where sequences lie."""
    if not isinstance(sequence, Ragged):
        return key_args(x, sequence, (config.box_rows, BLOCK, BLOCK))
    cu_q = sequence.cu_q.contiguous()
    cu_k = cu_q if sequence.cu_k is None else sequence.cu_k.contiguous()
    k, k_rows = rows_map("k", x.k, config.BN, 1, BLOCK)
    v, v_rows = rows_map("v", x.v, config.BN, 1, BLOCK)
    own = MapRows(0, 0)  # of queries and output, whose rows the kernel addresses itself
    return {"k_desc": k, "v_desc": v, "sequence_args": RaggedArgs(cu_q, cu_k, own, k_rows, v_rows, own)}
