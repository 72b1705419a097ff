"""The launches of wide heads on Blackwell: their kernel and, where keys are split, the combination."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from warpattn.problem import CheckedCall
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands
from warpattn.problem.scales import call_scales
from warpattn.sequences import PagedRagged, Ragged, Sequence

from ..launch import longest_queries
from ..mla.launch import row_launches
from ..sequence_args import UNMAPPED, key_addresses, key_args, ragged_args, used_rows
from ..tile import row_tiles
from .config import BLOCK, WideConfig


def wide_launches(checked: CheckedCall, x: Operands, sequence: Sequence, choice: Choice) -> tuple[Launch, ...]:
    """The launches of a choice."""
    config: WideConfig = choice.config
    tiles = row_tiles(checked.problem, longest_queries(checked.problem, sequence), config)
    choice = replace(choice, grid=(tiles * choice.partitions, *choice.grid[1:]))

    def source(*described: Any) -> Any:
        from .signature import wide_source  # imports Triton

        return wide_source(*described)

    keys = _keys(x, sequence, config) | {"recompute_args": key_addresses(checked.mask.keep, x)}
    if config.eight_bit is not None:
        keys["scale"] = call_scales(checked.scale, x, sequence)
    return row_launches(checked, x, keys, choice, source, used_rows(sequence))


def _keys(x: Operands, sequence: Sequence, config: WideConfig) -> dict[str, Any]:
    """The kernel's arguments for keys and values, and for where sequences lie."""
    box = (config.box_rows, BLOCK, BLOCK)
    if not isinstance(sequence, Ragged | PagedRagged):
        return key_args(x, sequence, box)
    return ragged_args(x, sequence, box, (UNMAPPED, UNMAPPED))
