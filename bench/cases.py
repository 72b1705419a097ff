"""What is timed and what must be reached: cases (shapes), their groups, and the requirements, as plain data.

A case is one attention problem; a group is the list of cases that a requirement speaks of. Speeds are compared as
`peer's time / warpattn's time`, so 1.03 means 3 % faster than the peer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

TOKENS = 16 * 1024  # tokens in all of one case: batch × sequence
BATCHES = (16, 8, 4, 2, 1)


@dataclass(frozen=True)
class Case:
    """One attention problem: q (batch, seq_q, heads_q, dim), k (…, heads_kv, dim), v (…, heads_kv, dim_v).

    `causal` is bottom-right aligned. `window` counts the visible keys of a row, itself included, and needs `causal`.
    Every sequence holds `documents` of equal lengths, which do not see each other. `softcap` bounds the scores.
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
    documents: int = 1
    softcap: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a window without `causal`, or one that shows no key, and for documents that do not
        divide equal lengths."""
        if self.documents > 1 and (self.seq_q != self.seq_k or self.seq_q % self.documents or self.window is not None):
            raise ValueError(f"case {self.name}: {self.documents} documents need no window and divide equal lengths")
        if self.window is not None and (not self.causal or self.window < 1):
            raise ValueError(f"case {self.name} has window={self.window}, causal={self.causal}: a window needs causal")

    def pairs(self) -> float:
        """Visible (query, key) pairs of one head; the square causal case counts half of all, as every peer does."""
        if not self.causal:
            return self.seq_q * self.seq_k / self.documents
        if self.window is None and self.seq_q == self.seq_k:
            return self.seq_q * self.seq_k / self.documents / 2
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
        mask += f" of {self.documents} documents" if self.documents > 1 else ""
        mask += f" soft-cap {self.softcap:g}" if self.softcap else ""
        return f"{self.batch}×{length}{mask}"

    def asdict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)

    def brief(self) -> dict[str, Any]:
        """The fields that are not what they usually are, for JSON."""
        usual = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != usual[name]}


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
        "wide": _wide(),
        "smoke": (
            Case("smoke-full", 2, 256, 256, 4, 4, 64, 64),
            Case("smoke-causal", 1, 384, 384, 4, 4, 128, 128, causal=True),
            Case("smoke-ragged-tile", 1, 200, 333, 2, 2, 128, 128, causal=True),
            Case("smoke-gqa", 2, 256, 256, 8, 2, 64, 64, dtype="float16", causal=True),
            Case("smoke-window", 1, 512, 512, 2, 2, 64, 64, causal=True, window=100),
            Case("smoke-documents", 1, 320, 320, 2, 1, 64, 64, causal=True, documents=4, softcap=20.0),
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
    SpeedRequirement("wide", "cudnn", must=1.00),
    SpeedRequirement("wide", "fa4", must=1.00),
    SpeedRequirement("wide", "fa3", must=1.00),
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


def _wide() -> tuple[Case, ...]:
    """What models have beside the other groups: head dims, groups, lengths, windows, documents, soft-caps, fp16."""
    dims = [_problem(4, 4096, 16, dim, causal=causal) for dim in (40, 72, 80, 96, 112) for causal in (False, True)]
    dims += [_problem(4, 4096, 8, dim, causal=causal) for dim in (160, 192, 208, 224) for causal in (False, True)]
    dims += [_problem(2, 4096, 8, 320), _problem(2, 4096, 8, 512), _problem(1, 8192, 8, 512, causal=False)]
    dims += [_problem(4, 2048, 16, 512, kv=2), _problem(2, 4096, 8, 512, v=256)]
    latent = [_problem(b, s, 32, 192, v=128) for b, s in ((16, 1024), (2, 4096), (1, 16384))]
    latent += [_problem(2, 4096, 32, 192, v=128, causal=False), _problem(2, 4096, 16, 192)]
    pictures = [_problem(b, s, 16, d, causal=False) for b, s, d in ((32, 729, 72), (64, 577, 64), (64, 256, 64))]
    pictures += [_problem(32, 1024, 16, 80, causal=False), _problem(1, 33 * 1024, 12, 128, causal=False)]
    short = [_problem(b, s, 32, 128, kv=8) for b, s in ((1, 512), (1, 1024), (16, 512), (128, 128), (256, 64))]
    short += [_problem(64, 256, 16, 128)]
    few = [_problem(1, q, 32, 128, kv=8, keys=k) for q, k in ((128, 8192), (256, 32768), (1024, 16384), (2048, 32768))]
    few += [_problem(4, 64, 64, 64, kv=8, keys=8192)]
    grouped = [_problem(b, s, 64, 64, kv=8) for b, s in ((8, 2048), (2, 4096), (1, 16384))]
    grouped += [_problem(2, 4096, h, 128, kv=kv) for h, kv in ((32, 8), (40, 8), (28, 4), (64, 4), (48, 1))]
    grouped += [_problem(2, 4096, 8, 256, kv=1), _problem(1, 8192, 16, 256, kv=8), _problem(2, 4096, 32, 96)]
    windows = [_problem(4, 8192, 64, 64, kv=8, window=128), _problem(2, 8192, 32, 128, kv=8, window=128)]
    windows += [_problem(1, 16384, 32, 128, kv=8, window=4096), _problem(2, 8192, 8, 256, kv=4, window=512)]
    packs = [_problem(1, 16384, 16, 128, documents=16), _problem(2, 8192, 32, 64, documents=8)]
    packs += [_problem(4, 4096, 32, 128, kv=8, documents=4), _problem(1, 16384, 16, 72, causal=False, documents=16)]
    capped = [_problem(1, 8192, 16, 256, kv=8, softcap=50.0), _problem(2, 4096, 32, 128, kv=8, softcap=30.0)]
    capped += [_problem(1, 16384, 16, 256, kv=8, window=4096, softcap=50.0), _problem(4, 2048, 16, 64, softcap=20.0)]
    half = [_problem(4, 4096, 16, dim, dtype="float16") for dim in (64, 80, 96, 128)]
    half += [_problem(2, 4096, 8, 256, dtype="float16"), _problem(2, 4096, 32, 192, v=128, dtype="float16")]
    return (*dims, *latent, *pictures, *short, *few, *grouped, *windows, *packs, *capped, *half)


def _problem(batch: int, seq: int, heads: int, dim: int, kv: int = 0, keys: int = 0, v: int = 0, **more: Any) -> Case:
    """A case of the wide group, named after its numbers; causal unless `more` has causal=False."""
    causal = more.pop("causal", True)
    kind = "".join(f"-{key}{value}" for key, value in more.items()) or ("-causal" if causal else "-full")
    size = f"{batch}x{_short(seq)}" + (f"o{_short(keys)}" if keys else "")
    name = f"wide-{size}-h{heads}" + (f"o{kv}" if kv else "") + f"-d{dim}" + (f"o{v}" if v else "") + kind
    return Case(name, batch, seq, keys or seq, heads, kv or heads, dim, v or dim, causal=causal, **more)
