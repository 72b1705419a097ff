"""How the roles of a Hopper kernel share an SM's registers. Nothing in this file imports Triton."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Registers:
    """Registers a thread of each role, after reallocation."""

    consumer: int
    producer: int
