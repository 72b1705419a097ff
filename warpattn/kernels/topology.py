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
class Registers:
    """Registers a thread of the roles that compute and of those that load, after reallocation."""

    consumer: int
    producer: int


@dataclass(frozen=True)
class Workers:
    """The roles beside the first one, as `warp_specialize` takes them."""

    warps: tuple[int, ...]
    registers: tuple[int, ...]


@dataclass(frozen=True)
class Edge:
    """A ring of `stages` slots of `slot_bytes` that one role fills and others empty.

    Each slot has a full barrier (one arrival and the slot's bytes) and an empty one (one arrival per consumer warp),
    unless it is released with another edge's slot, whose consumers release that when they have read both.
    """

    name: str
    producer: str
    consumers: tuple[str, ...]
    stages: int
    slot_bytes: int
    released_with: str = ""  # the other edge

    @property
    def barriers(self) -> int:
        return self.stages if self.released_with else 2 * self.stages


@dataclass(frozen=True)
class Signal:
    """Barriers outside of rings, one for each entry of `producers`: the roles that arrive on it.

    A barrier completes on one arrival of each of their warps, or of each role where roles arrive as a whole.
    """

    name: str
    producers: tuple[tuple[str, ...], ...]
    by_warp: bool = True

    @property
    def number(self) -> int:
        """Barriers."""
        return len(self.producers)


@dataclass(frozen=True)
class Topology:
    """All roles of a block, the edges and signals between them, and shared memory that belongs to no edge."""

    roles: tuple[Role, ...]
    edges: tuple[Edge, ...]
    private_bytes: int  # staging that one role uses alone
    signals: tuple[Signal, ...] = ()

    @property
    def smem_bytes(self) -> int:
        tiles = sum(edge.stages * edge.slot_bytes for edge in self.edges)
        return tiles + BARRIER_BYTES * self.barriers + self.private_bytes

    @property
    def barriers(self) -> int:
        return sum(edge.barriers for edge in self.edges) + sum(signal.number for signal in self.signals)

    @property
    def threads(self) -> int:
        """Threads of a block. Registers are reallocated by warpgroup: roles of fewer than four warps share one."""
        small = sum(role.warps for role in self.roles if role.warps < 4)
        return sum(32 * role.warps for role in self.roles if role.warps >= 4) + 128 * -(-small // 4)

    @property
    def registers(self) -> int:
        """Registers of a block; small roles that share a warpgroup have as many as the largest of them."""
        small = max((role.registers for role in self.roles if role.warps < 4), default=0)
        large = sum(32 * role.warps * role.registers for role in self.roles if role.warps >= 4)
        return large + 128 * small

    def signal(self, name: str) -> Signal:
        """The signal of a name."""
        return next(signal for signal in self.signals if signal.name == name)

    def arrivals(self, name: str, number: int = 0) -> int:
        """Arrivals that complete barrier `number` of a signal."""
        signal = self.signal(name)
        return sum(role.warps if signal.by_warp else 1 for role in self.roles if role.name in signal.producers[number])

    def edge(self, name: str) -> Edge:
        """The edge of a name."""
        return next(edge for edge in self.edges if edge.name == name)

    def empty_arrivals(self, name: str) -> int:
        """Arrivals that complete an empty barrier of an edge."""
        consumers = self.edge(name).consumers
        return sum(role.warps for role in self.roles if role.name in consumers)

    @property
    def workers(self) -> Workers:
        """Every role but the first, which runs in the warps that a launch starts with."""
        return Workers(*zip(*((role.warps, role.registers) for role in self.roles[1:]), strict=True))

    def picture(self) -> str:
        """Roles and edges as text, one line each."""
        warps = [f"{role.warps} warp{'s' * (role.warps > 1)}" for role in self.roles]
        roles = [f"{x.name:<12}{of}, {x.registers} registers a thread" for x, of in zip(self.roles, warps, strict=True)]
        edges = [
            f"{edge.producer} ──▶ {edge.name} {edge.stages} × {edge.slot_bytes:,} B ──▶ {', '.join(edge.consumers)}"
            for edge in self.edges
        ]
        return "\n".join(roles + edges)
