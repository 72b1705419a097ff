"""Who does what in a kernel and what passes between them: roles and edges, as host data.

Shared memory, barrier and thread counts are derived from here, so that a kernel's config, its plan, its tests and its
pictures cannot disagree. Nothing here knows an architecture.
"""

from __future__ import annotations

from dataclasses import dataclass

BARRIER_BYTES = 8


@dataclass(frozen=True)
class Role:
    """A group of warps that runs one function; `registers` a thread, after reallocation."""

    name: str
    warps: int
    registers: int


@dataclass(frozen=True)
class Workers:
    """The roles beside the first one, as `warp_specialize` takes them."""

    warps: tuple[int, ...]
    registers: tuple[int, ...]


@dataclass(frozen=True)
class Edge:
    """A ring of `stages` slots of `slot_bytes` that one role fills and others empty.

    Each slot has a full barrier (one arrival and the slot's bytes) and an empty one (one arrival per consumer warp).
    """

    name: str
    producer: str
    consumers: tuple[str, ...]
    stages: int
    slot_bytes: int

    @property
    def barriers(self) -> int:
        return 2 * self.stages

    @property
    def smem_bytes(self) -> int:
        return self.stages * self.slot_bytes + self.barriers * BARRIER_BYTES


@dataclass(frozen=True)
class Topology:
    """All roles of a block, the edges between them, and shared memory that belongs to no edge."""

    roles: tuple[Role, ...]
    edges: tuple[Edge, ...]
    private_bytes: int  # staging that one role uses alone

    @property
    def smem_bytes(self) -> int:
        return sum(edge.smem_bytes for edge in self.edges) + self.private_bytes

    @property
    def barriers(self) -> int:
        return sum(edge.barriers for edge in self.edges)

    @property
    def threads(self) -> int:
        """Threads of a block: registers are reallocated by warpgroup, so roles are filled up to four warps."""
        return sum(128 * -(-role.warps // 4) for role in self.roles)

    @property
    def registers(self) -> int:
        """Registers of a block."""
        return sum(128 * -(-role.warps // 4) * role.registers for role in self.roles)

    def empty_arrivals(self, edge: Edge) -> int:
        """Arrivals that complete an empty barrier of `edge`."""
        return sum(role.warps for role in self.roles if role.name in edge.consumers)

    @property
    def workers(self) -> Workers:
        """Every role but the first, which runs in the warps that a launch starts with."""
        return Workers(*zip(*((role.warps, role.registers) for role in self.roles[1:]), strict=True))

    def picture(self) -> str:
        """Roles and edges as text, one line each."""
        roles = [f"{role.name:<12}{role.warps} warps, {role.registers} registers a thread" for role in self.roles]
        edges = [
            f"{edge.producer} ──▶ {edge.name} {edge.stages} × {edge.slot_bytes:,} B ──▶ {', '.join(edge.consumers)}"
            for edge in self.edges
        ]
        return "\n".join(roles + edges)
