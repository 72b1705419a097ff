"""Host side of combining partial outputs: the tile of a program, and the workspace; imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

COLUMNS_PER_LANE = 4
MOST_COLUMNS = 128  # most columns of a program: a row in a warp
LANE_LOADS = 16  # loads of four columns that a lane has in flight
FEW_PARTS = 4


@dataclass(frozen=True)
class CombineTile:
    """What a program combines at once: `parts` parts of `rows` rows of `cols` columns, a row across `lanes_per_row`
    lanes; the defaults are those of an NVIDIA warpgroup, with all parts of an element in one lane."""

    cols: int
    most: int = 32  # parts
    warps: int = 4
    lanes: int = 32  # of a warp
    part_warps: int = 1  # warps among which the parts are divided
    lane_rows: int = 1  # rows of a lane

    @property
    def lane_parts(self) -> int:
        """Parts of a lane: as many as 128 registers hold, because each further block waits for memory again; at most
        `most`, because each costs instructions even if there are fewer."""
        return min(self.most, 32, 4096 // self.cols)

    @property
    def parts(self) -> int:
        return self.lane_parts * self.part_warps

    @property
    def lanes_per_row(self) -> int:
        return min(self.lanes, self.cols // COLUMNS_PER_LANE)

    @property
    def rows_per_warp(self) -> int:
        return self.lanes // self.lanes_per_row

    @property
    def rows(self) -> int:
        return self.warps // self.part_warps * self.rows_per_warp * self.lane_rows


def combine_tile(cols: int, parts: int) -> CombineTile:
    """The tile of a program of a combining kernel: many parts are divided among warps; with few parts a lane has
    several rows. A tile serves several numbers of parts, since each is a kernel; more parts take several blocks."""
    cols = min(cols, MOST_COLUMNS)
    if parts <= FEW_PARTS:
        return CombineTile(cols, FEW_PARTS, lane_rows=LANE_LOADS // FEW_PARTS)
    return CombineTile(cols, LANE_LOADS, part_warps=1 if parts <= LANE_LOADS else 4)


class Parts(NamedTuple):
    """Partial outputs (slots, rows, ..., cols), fp32, and their packed denominators (slots, rows, ...), int64."""

    o: Tensor
    denominators: Tensor


def allocate_parts(rows: tuple[int, ...], cols: int, device: torch.device) -> Parts:
    """Allocates memory for parts with leading dimensions `rows`, not initialised."""
    o = torch.empty(*rows, cols, dtype=torch.float32, device=device)
    return Parts(o, torch.empty(*rows, dtype=torch.int64, device=device))
