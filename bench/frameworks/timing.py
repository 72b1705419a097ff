"""A case of a framework: checked by every implementation first, then timed, each in turn in every round.

A sample is wall-clock time between two synchronised points, the host's share included, as a user of the framework
waits for it; choosing the implementation is not part of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from bench.measure.timing import MAX_CALLS, Summary, interleave, paired_ratio
from bench.peers import OWN
from bench.peers.adapter import first_line

FLOOR = 1.6e-2  # of the largest value: two roundings of bf16
TARGET_MS = 30.0  # of a sample on a card, at least


def nothing() -> None:
    """Prepares what needs no preparation."""


class Way(NamedTuple):
    """A case by one implementation: what is done once before a sample, and the call that is timed."""

    prepare: Callable[[], object]
    call: Callable[[], Any]


class Case(NamedTuple):
    """The same work by several implementations, the first one the peer by whose error the others are judged.

    error: of a call's result, as a share of the largest exact value. noise: the error that is usual in this dtype; by
    default that of the peer's result.
    """

    ways: Mapping[str, Way]
    error: Callable[[Any], float]
    tokens: int = 0  # that a call processes, where tokens per second are of interest
    noise: float = 0.0


class Group(NamedTuple):
    """Cases of one model, which is made once."""

    framework: str
    title: str
    build: Callable[[], Any]
    cases: Mapping[str, Callable[[Any], Case]]


class WallSample:
    """As many calls in a row as fill `TARGET_MS`; one where there is no card."""

    mode = "wall"
    note = None

    def __init__(self, way: Way, device: torch.device) -> None:
        self._way, self._device, self.calls, self._ms = way, device, 1, 0.0
        self.start()
        self.start()  # the first one may have compiled
        if device.type == "cuda":
            self.calls = max(1, min(MAX_CALLS, round(TARGET_MS / max(self._ms, 1e-3))))

    def start(self) -> None:
        """Runs the sample."""
        self._way.prepare()
        self._wait()
        begin = time.perf_counter()
        for _ in range(self.calls):
            self._way.call()
        self._wait()
        self._ms = (time.perf_counter() - begin) * 1e3 / self.calls

    def milliseconds(self) -> float:
        """Of one call in the sample that ran."""
        return self._ms

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def largest_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest deviation as a share of the largest exact value; infinite where a value is not finite."""
    error = float((found.float() - exact).abs().max() / exact.abs().max())
    return error if math.isfinite(error) else math.inf


def measured(case: Case, device: torch.device, rounds: int, seed: int) -> dict[str, Any]:
    """The entry of a case: for each implementation its error, then milliseconds of a call and how often as long as
    warpattn it took (`speed`, paired by round), or why it was not timed."""
    entry: dict[str, Any] = {}
    noise, samples = case.noise, {}
    for name, way in case.ways.items():
        try:
            way.prepare()
            error = case.error(way.call())
        except Exception as problem:  # whatever a framework raises is a line of the table
            entry[name] = {"status": "failed", "reason": first_line(problem)}
            continue
        noise = noise or error
        allowed = 2 * noise + FLOOR
        if error <= allowed:
            entry[name] = {"status": "timed", "error": error}
            samples[name] = WallSample(way, device)
        else:
            reason = f"its error is {error:.3g} of the largest value; at most {allowed:.3g}"
            entry[name] = {"status": "wrong", "reason": reason}
    times = interleave(samples, rounds, seed, warm_ms=200.0 if device.type == "cuda" else 0.0)
    for name, found in times.items():
        entry[name] |= {"calls": samples[name].calls, "ms": Summary.of(found).asdict()}
        if OWN in times:
            entry[name]["speed"] = paired_ratio(found, times[OWN]).asdict()
    return entry


def line_of(title: str, entry: Mapping[str, Any], tokens: int) -> str:
    """A case in the console."""
    parts = []
    for name, found in entry.items():
        if found["status"] != "timed":
            parts.append(f"{name} {found['status']}: {found['reason']}")
            continue
        ms = found["ms"]["median"]
        shown = f"{name} {ms:.3f} ms" + (f" {tokens / ms * 1e3:,.0f} tokens/s" if tokens else "")
        speed = found.get("speed")
        parts.append(shown + (f" ({speed['median']:.3f}×)" if speed and name != OWN else ""))
    return f"{title}: " + "; ".join(parts)
