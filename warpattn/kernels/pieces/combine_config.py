"""Combining partial results, host side: the tile of a program as a value, and the workspace; imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

COLUMNS_PER_LANE = 4


@dataclass(frozen=True)
class CombineTile:
    """What a program combines at once: `parts` parts of `rows` rows of `cols` columns, all parts of an element in one
    lane and a row across `lanes_per_row` lanes; the defaults are those of an NVIDIA warpgroup."""

    cols: int
    most: int = 32  # parts
    warps: int = 4
    lanes: int = 32  # of a warp

    @property
    def parts(self) -> int:
        """Many, because each further block waits for memory once more, but what 128 registers a lane hold; and at most
        `most`, because each costs instructions even where there are fewer."""
        return min(self.most, 32, 4096 // self.cols)

    @property
    def lanes_per_row(self) -> int:
        return min(self.lanes, self.cols // COLUMNS_PER_LANE)

    @property
    def rows_per_warp(self) -> int:
        return self.lanes // self.lanes_per_row

    @property
    def rows(self) -> int:
        return self.warps * self.rows_per_warp


class Parts(NamedTuple):
    """Partial outputs (slots, rows, ..., cols) and their base-2 log-sum-exps (slots, rows, ...), fp32."""

    o: Tensor
    lse: Tensor


def allocate_parts(rows: tuple[int, ...], cols: int, device: torch.device) -> Parts:
    """Memory for parts with leading dimensions `rows`, not initialised."""
    o = torch.empty(*rows, cols, dtype=torch.float32, device=device)
    return Parts(o, torch.empty(*rows, dtype=torch.float32, device=device))
