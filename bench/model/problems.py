"""The problems that the cost model is held against, in three sets by what was known when.

RECORDED   measured before the model was made, and in view while it was
CALIBRATED measured before the predictions of HELD_OUT were made; constants of the model may rest on them
HELD_OUT   predicted, written to `predicted.json`, and measured after that
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.cases import Case, groups


@dataclass(frozen=True)
class Problem:
    """An attention problem, forward or backward."""

    case: Case
    backward: bool = False

    @property
    def name(self) -> str:
        return f"backward {self.case.name}" if self.backward else self.case.name


def _case(batch: int, seq: int, heads: int, dim: int, kind: str = "causal", **more: int) -> Case:
    """A bf16 case named after its numbers; `kind` is full, causal, or the keys of a window."""
    kv, keys, v = more.get("kv", heads), more.get("keys", seq), more.get("v", dim)
    of = "" if keys == seq else f" over {keys}"
    name = f"{batch}x{seq}{of} heads {heads}/{kv} dim {dim}/{v} {kind}"
    window = int(kind) if kind.isdigit() else None
    return Case(name, batch, seq, keys, heads, kv, dim, v, causal=kind != "full", window=window)


def _gradient(*args: int, kind: str = "causal", **more: int) -> Problem:
    return Problem(_case(*args, kind, **more), backward=True)


def _decode(batch: int, keys: int, heads: int, kv: int, dim: int = 128) -> Problem:
    return Problem(replace(_case(batch, 1, heads, dim, "full", keys=keys, kv=kv), causal=False))


RECORDED = tuple(
    Problem(case) for group in ("d128", "d64", "d256", "gqa", "window") for case in groups()[group]
)  # fmt: skip
CALIBRATED = (
    _gradient(4, 4096, 16, 128, kind="full"),
    _gradient(4, 4096, 16, 128),
    _gradient(4, 4096, 32, 64, kind="full"),
    _gradient(4, 4096, 32, 64),
    Problem(_case(2, 4096, 32, 192, v=128)),
    Problem(_case(4, 4096, 16, 96)),
    _decode(32, 4096, 32, 8),
    _decode(1, 16384, 32, 8),
    Problem(_case(2, 8192, 32, 128, "128", kv=8)),
    Problem(_case(16, 512, 32, 128, kv=8)),
)
HELD_OUT = (
    _gradient(2, 8192, 16, 128, kind="full"),
    _gradient(16, 1024, 16, 128),
    _gradient(2, 8192, 32, 64, kind="full"),
    _gradient(8, 2048, 32, 64),
    _gradient(2, 4096, 64, 128, kv=8),
    _gradient(2, 4096, 8, 256, kind="full"),
    Problem(_case(1, 16384, 32, 192, v=128)),
    Problem(_case(4, 4096, 16, 192)),
    Problem(_case(8, 2048, 16, 96, "full")),
    Problem(_case(2, 8192, 16, 80)),
    Problem(_case(3, 3000, 24, 128, kv=8)),
    Problem(_case(2, 8192, 64, 64, kv=8)),
    Problem(_case(1, 16384, 32, 128, "4096", kv=8)),
    Problem(_case(2, 8192, 16, 64, "512")),
    Problem(_case(1, 1024, 32, 128, kv=8)),
    Problem(_case(64, 256, 16, 128)),
    Problem(_case(1, 256, 32, 128, kv=8, keys=32768)),
    _decode(64, 8192, 64, 8),
    _decode(8, 8192, 32, 8),
    _decode(16, 2048, 32, 32, 64),
    _decode(128, 1024, 32, 8),
)


def find(name: str) -> Problem:
    """The problem of that name; KeyError if there is none."""
    return {problem.name: problem for problem in (*RECORDED, *CALIBRATED, *HELD_OUT)}[name]
