"""What is timed and what must be reached: cases (shapes), their groups, and the requirements, as plain data.

A case is one attention problem; a group is the list of cases that a requirement speaks of. Speeds are compared as
`peer's time / warpattn's time`, so 1.03 means 3 % faster than the peer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

TOKENS = 16 * 1024  # tokens in all of one case: batch × sequence
BATCHES = (16, 8, 4, 2, 1)


@dataclass(frozen=True)
class Case:
    """One attention problem: q (batch, seq_q, heads_q, dim), k (…, heads_kv, dim), v (…, heads_kv, dim_v).

    `causal` is bottom-right aligned. `window` counts the visible keys of a row, itself included, and needs `causal`.
    """

    name: str
    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_kv: int
    dim: int
    dim_v: int
    dtype: str = "bfloat16"
    causal: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a window without `causal`, or one that shows no key."""
        if self.window is not None and (not self.causal or self.window < 1):
            raise ValueError(f"case {self.name} has window={self.window}, causal={self.causal}: a window needs causal")

    def pairs(self) -> float:
        """Visible (query, key) pairs of one head; the square causal case counts half of all, as every peer does."""
        if not self.causal:
            return self.seq_q * self.seq_k
        if self.window is None and self.seq_q == self.seq_k:
            return self.seq_q * self.seq_k / 2
        ends = (min(max(row + 1 + self.seq_k - self.seq_q, 0), self.seq_k) for row in range(self.seq_q))
        return sum(ends) if self.window is None else sum(min(end, self.window) for end in ends)

    def flops(self) -> float:
        """Floating-point operations: 2 per multiply-add of Q·K and of P·V, over the visible pairs."""
        return 2 * self.batch * self.heads_q * self.pairs() * (self.dim + self.dim_v)

    def tflops(self, milliseconds: float) -> float:
        """TFLOP/s of one call that takes `milliseconds`."""
        return self.flops() / (milliseconds * 1e9)

    def shape(self) -> str:
        """The short text of tables and plots: `4×4k causal`."""
        length = _short(self.seq_q) if self.seq_q == self.seq_k else f"{_short(self.seq_q)}/{_short(self.seq_k)}"
        mask = f" window {self.window}" if self.window else " causal" if self.causal else " full"
        return f"{self.batch}×{length}{mask}"

    def asdict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class SpeedRequirement:
    """On every case of the group, warpattn must run at `must` × the peer's speed; `aim` is wanted beyond that."""

    group: str
    peer: str
    must: float | None
    aim: float | None = None


@dataclass(frozen=True)
class TimeRequirement:
    """warpattn's time on `case` must be at most `at_most` × its own time on `against`."""

    group: str
    case: str
    against: str
    at_most: float


@dataclass(frozen=True)
class LimitRequirement:
    """One measured number (`section` and `key` of the JSON record) must be at most `at_most`."""

    section: str
    key: str
    at_most: float
    unit: str


Requirement = SpeedRequirement | TimeRequirement | LimitRequirement


def groups() -> dict[str, tuple[Case, ...]]:
    """Every group by name, in the order of the requirements."""
    return {
        "d128": _ten("d128", heads=16, dim=128),
        "d64": _ten("d64", heads=32, dim=64),
        "d256": _ten("d256", heads=8, dim=256),
        "gqa": tuple(_square(f"gqa-{b}x{_short(TOKENS // b)}-causal", b, 64, 128, True, kv=8) for b in BATCHES),
        "window": (
            _square("window-1x16k-causal", 1, 16, 128, True),
            _square("window-1x16k-1024", 1, 16, 128, True, window=1024),
        ),
        "smoke": (
            Case("smoke-full", 2, 256, 256, 4, 4, 64, 64),
            Case("smoke-causal", 1, 384, 384, 4, 4, 128, 128, causal=True),
            Case("smoke-ragged-tile", 1, 200, 333, 2, 2, 128, 128, causal=True),
            Case("smoke-gqa", 2, 256, 256, 8, 2, 64, 64, dtype="float16", causal=True),
            Case("smoke-window", 1, 512, 512, 2, 2, 64, 64, causal=True, window=100),
        ),
    }


def find(name: str) -> Case:
    """The case of that name; raises KeyError with the known names."""
    cases = {case.name: case for group in groups().values() for case in group}
    if name not in cases:
        raise KeyError(f"no case is called {name!r}; known: {', '.join(cases)}")
    return cases[name]


REQUIREMENTS: tuple[Requirement, ...] = (
    SpeedRequirement("d128", "cudnn", must=1.03),
    SpeedRequirement("d128", "fa4", must=0.97, aim=1.00),
    SpeedRequirement("d64", "cudnn", must=1.00),
    SpeedRequirement("d64", "fa4", must=None, aim=0.95),
    SpeedRequirement("d256", "cudnn", must=1.00),
    SpeedRequirement("d256", "fa4", must=None, aim=0.95),
    SpeedRequirement("gqa", "cudnn", must=1.03),
    TimeRequirement("window", case="window-1x16k-1024", against="window-1x16k-causal", at_most=0.18),
    LimitRequirement("host", "ratio", at_most=1.2, unit="× cuDNN SDPA"),
    LimitRequirement("first_call", "warm_s", at_most=0.5, unit="s"),
    LimitRequirement("first_call", "cold_s", at_most=6.0, unit="s"),
)


def _short(length: int) -> str:
    """16384 as 16k, 200 as 200."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _square(name: str, batch: int, heads: int, dim: int, causal: bool, *, kv: int = 0, window: int = 0) -> Case:
    """A case of TOKENS tokens in all with equal lengths and bf16 values."""
    seq = TOKENS // batch
    return Case(name, batch, seq, seq, heads, kv or heads, dim, dim, causal=causal, window=window or None)


def _ten(group: str, heads: int, dim: int) -> tuple[Case, ...]:
    """The five (batch, sequence) shapes, full and causal."""
    return tuple(
        _square(f"{group}-{b}x{_short(TOKENS // b)}-{'causal' if causal else 'full'}", b, heads, dim, causal)
        for causal in (False, True)
        for b in BATCHES
    )
