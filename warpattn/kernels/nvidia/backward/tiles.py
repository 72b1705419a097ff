"""What the configurations of all backward kernels have: tiles of keys and queries, and what a problem decides of them.

Nothing in this file imports Triton.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from warpattn.kernels.topology import Topology
from warpattn.problem import Problem
from warpattn.problem.element import ELEMENT_OF, Element
from warpattn.problem.operands import is_masked, sees_first_keys

FEW_HEADS = 2  # of a group, whose Q, dO and dQ of all sequences that run at once L2 holds
MOST_TOGETHER = 64  # key tiles of a head whose CTAs certainly run at once: a Hopper card has at least 78 SMs (H20)


@dataclass(frozen=True)
class BackwardTiles(ABC):
    """Tile sizes of one compiled kernel, as launches and the kernels of all architectures read them; the kernels of a
    card read more. Up to 128 columns both head dims are padded to one size."""

    element: Element
    dim_qk: int
    dim_v: int
    rotate: bool  # begin with the query tile beside the own keys instead of the first
    side_by_side: bool  # of each query tile all heads of the group one after the other, see `tile_at`
    mirrored: bool  # CTAs of every other lap take their key tiles, and walk, in the opposite order
    ragged: bool  # sequences end to end
    deterministic: bool  # CTAs add to a tile of dQ in a fixed order
    block_m: int  # query rows of a tile

    @property
    @abstractmethod
    def rows(self) -> int:
        """Keys of a TMA box."""

    @property
    @abstractmethod
    def key_parts(self) -> int:
        """Boxes of the keys of a CTA."""

    @property
    @abstractmethod
    def persistent(self) -> bool:
        """Whether a CTA takes further key tiles."""

    @property
    @abstractmethod
    def dq_cols(self) -> int:
        """Columns of dQ that are added at a time."""

    @property
    @abstractmethod
    def topology(self) -> Topology: ...

    @cached_property
    def dq_copies(self) -> int:
        """Sums of each tile of dQ, which `finish` adds up: CTAs that add in turns share them."""
        return 1

    @cached_property
    def waits_for_later(self) -> bool:
        """Whether CTAs wait for those with later keys to add to a tile, which so are launched before."""
        return self.deterministic and not self.side_by_side

    @cached_property
    def reduces(self) -> bool:
        """Whether a role of its own adds dQ."""
        return any(role.name == "reduce" for role in self.topology.roles)

    def box(self, cols: int) -> int:
        """Columns of the TMA boxes of a tile of `cols` columns."""
        return cols

    @cached_property
    def wide(self) -> bool:
        """Whether dK and dV of 128 keys are too much for a CTA, so that it has 64."""
        return max(self.dim_qk, self.dim_v) > 128

    @cached_property
    def padded(self) -> int:
        """Columns of registers and shared memory that hold either head dim."""
        return max(padded_columns(self.dim_qk), padded_columns(self.dim_v))

    @cached_property
    def whole_qk(self) -> int:
        """Columns of a tile of Q or K in one piece, a power of two."""
        return padded_columns(self.dim_qk) if self.wide else self.padded

    @cached_property
    def whole_v(self) -> int:
        return padded_columns(self.dim_v) if self.wide else self.padded

    @cached_property
    def padded_qk(self) -> int:
        """Columns of a tile of Q or K, which may be several pieces."""
        return self.whole_qk

    @cached_property
    def padded_v(self) -> int:
        return self.whole_v

    @cached_property
    def block_n(self) -> int:
        """Keys of a CTA."""
        return self.key_parts * self.rows

    def key_bytes(self, cols: int) -> int:
        """Of the keys, or the values, of a CTA, with `cols` columns."""
        return self.element.bytes * self.block_n * cols

    def row_bytes(self, cols: int) -> int:
        """Of a tile of Q or dO with a number for each row."""
        return (self.element.bytes * cols + 4) * self.block_m


def padded_columns(dim: int) -> int:
    """Columns of a head dim: a power of two, at least 64."""
    return max(64, 1 << (dim - 1).bit_length())


def problem_fields(problem: Problem, keys: int, deterministic: bool) -> dict[str, Any]:
    """The fields of `BackwardTiles` that a problem decides, with tiles of `keys` keys."""
    ragged = problem.kind == "ragged"
    # CTAs that go round wait for each other in a circle: those of a head must run at once.
    together = not deterministic or problem.seq_k <= MOST_TOGETHER * keys
    sees_first, group = is_masked(problem) and sees_first_keys(problem), problem.heads_q // problem.heads_kv
    # The order in which CTAs arrive decides what waiting costs; for larger groups how often L2 is missed does.
    mirrored = deterministic and sees_first and not ragged and group <= FEW_HEADS
    return {
        "element": ELEMENT_OF[problem.dtype], "dim_qk": problem.dim_qk, "dim_v": problem.dim_v,
        "rotate": not is_masked(problem) and not ragged and together,
        "side_by_side": sees_first and (group > 1 or mirrored), "mirrored": mirrored, "ragged": ragged,
        "deterministic": deterministic,
    }  # fmt: skip
