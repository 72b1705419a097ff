"""`BackwardTiles`: the fields that configurations of all backward kernels share, and how a problem decides them.

This file imports no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from warpattn.kernels.topology import Topology
from warpattn.problem import Problem
from warpattn.problem.element import ELEMENT_OF, Element
from warpattn.problem.operands import is_masked, sees_first_keys

IN_L2 = 384 * 128  # columns of a group's heads times keys of a CTA up to which L2 holds Q, dO and dQ of the rows that
# CTAs which run at once begin with: 52 MB on 132 SMs
MOST_TOGETHER = 64  # so many CTAs certainly run at once: a Hopper GPU has at least 78 SMs (H20)


class ArchTiles:
    """Sizes that each architecture's config computes, as properties of its own."""

    if TYPE_CHECKING:
        rows: int  # keys of a TMA box
        key_parts: int  # TMA boxes of a CTA's keys
        persistent: bool  # whether a CTA does several key tiles
        dq_cols: int  # columns of dQ that are added at a time
        topology: Topology


@dataclass(frozen=True)
class BackwardTiles(ArchTiles):
    """Tile sizes of one compiled kernel that launches and the shared kernels read; an architecture's config has more.
    Up to 128 columns, both head dims are padded to one size."""

    element: Element
    dim_qk: int
    dim_v: int
    rotate: bool  # a CTA begins with the query tile beside its own keys instead of the first one
    side_by_side: bool  # for each query tile a CTA visits all heads of the group, see `tile_at`
    mirrored: bool  # CTAs of every other lap take key tiles, and visit query tiles, in the opposite order
    ragged: bool  # sequences are packed end to end
    deterministic: bool  # CTAs add to a dQ tile in a fixed order
    block_m: int  # query rows of a tile
    claims: bool = False  # the first CTA to reach a dQ tile stores it, others add to it then; else dQ is zeroed before

    @cached_property
    def dq_copies(self) -> int:
        """Sums of each dQ tile, which divide deterministic CTAs; `finish` adds them up."""
        return 1

    @cached_property
    def counted(self) -> bool:
        """Whether a dQ tile has a counter, by which CTAs wait for others."""
        return self.deterministic or self.claims

    @cached_property
    def key_stages(self) -> int:
        """Slots of the ring of K."""
        return 1

    @cached_property
    def dq_rows(self) -> int:
        """Rows of dQ that are added at a time."""
        return self.block_m

    @cached_property
    def waits_for_later(self) -> bool:
        """Whether CTAs with later keys add to a dQ tile first, so that they have to be launched first."""
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
        """Whether a head dim is above 128, perhaps too wide for 128 keys a CTA."""
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
        """Bytes of a CTA's K or V with `cols` columns."""
        return self.element.bytes * self.block_n * cols

    def row_bytes(self, cols: int) -> int:
        """Bytes of a tile of Q or dO, and a number for each row."""
        return (self.element.bytes * cols + 4) * self.block_m


def padded_columns(dim: int) -> int:
    """Columns of a head dim: a power of two, at least 64."""
    return max(64, 1 << (dim - 1).bit_length())


def problem_fields(problem: Problem, keys: int, deterministic: bool) -> dict[str, Any]:
    """The fields of `BackwardTiles` that a problem decides, with tiles of `keys` keys."""
    ragged = problem.kind == "ragged"
    # With `rotate`, deterministic CTAs of a head wait for each other in a circle, so all must run at once.
    together = not deterministic or problem.seq_k <= MOST_TOGETHER * keys
    sees_first, group = is_masked(problem) and sees_first_keys(problem), problem.heads_q // problem.heads_kv
    # If L2 holds the rows, waiting for turns costs most, which a good order reduces; otherwise L2 misses do.
    in_l2 = group * max(problem.dim_qk, problem.dim_v) * keys <= IN_L2
    mirrored = deterministic and sees_first and not ragged and in_l2
    return {
        "element": ELEMENT_OF[problem.dtype], "dim_qk": problem.dim_qk, "dim_v": problem.dim_v,
        "rotate": not is_masked(problem) and not ragged and together,
        "side_by_side": sees_first and (group > 1 or mirrored), "mirrored": mirrored, "ragged": ragged,
        "deterministic": deterministic,
    }  # fmt: skip
