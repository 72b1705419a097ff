"""What the planner knows of each architecture, as data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """One GPU architecture. `l2_keep` is how much of L2 a run of heads may fill with K and V (half of the cache)."""

    name: str
    processors: int  # SMs or CUs
    smem: int  # bytes one block can have
    l2_keep: int  # bytes
    source: str


ARCHS = {
    "sm90": Arch("sm90", 132, 232_448, 32 * 2**20, "H200: 132 SMs, 60 MB L2 as torch reports them; 227 KiB a block"),
}
