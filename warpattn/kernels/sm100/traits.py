"""What the code of a Blackwell prefill kernel depends on beside its config, mask and score."""

from dataclasses import dataclass

STORE_COLUMNS = 64  # of an output block: 128 bytes, one swizzle atom
LEAST_ROWS = 8  # of a box of keys: the swizzle keeps eight rows together. Pages with smaller ones are copied by rows


@dataclass(frozen=True)
class Traits:
    """`group` query heads share a key head; the config's group is 1 where their tiles are not fused."""

    kind: str  # "dense" | "ragged" | "paged"
    group: int
    has_sinks: bool
    has_lse: bool
