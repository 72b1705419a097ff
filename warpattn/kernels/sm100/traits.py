"""Compile-time traits of a Blackwell prefill kernel beside config, mask and score."""

from dataclasses import dataclass

STORE_BYTES = 128  # of a row of an output block: one swizzle atom
STORE_COLUMNS = STORE_BYTES // 2
LEAST_ROWS = 8  # rows of a box of keys, which the swizzle keeps together; smaller pages are copied by rows


@dataclass(frozen=True)
class Traits:
    """`group` query heads share a key head; the config's group is 1 where their tiles are not fused."""

    kind: str  # "dense" | "ragged" | "paged" | "paged-ragged"
    group: int
    has_sinks: bool
    has_lse: bool

    @property
    def ragged_queries(self) -> bool:
        """Whether queries of sequences are laid end to end."""
        return self.kind in ("ragged", "paged-ragged")

    @property
    def paged(self) -> bool:
        """Whether keys and values are in pages."""
        return self.kind in ("paged", "paged-ragged")
