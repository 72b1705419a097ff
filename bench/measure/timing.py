"""Timing that a power-limited card cannot fool: peers take turns in every round, and ratios are taken per round.

    round 1:  fa4 | warpattn | cudnn        one sample each, in shuffled order, with no gap between them
    round 2:  warpattn | cudnn | fa4        ratio of a round = peer's time / warpattn's time in the same round
    …                                       reported: median and quartiles over the rounds

A sample is one CUDA graph of several calls, long enough that launching it does not count; `calls` different input sets
in turn keep the L2 cache cold where the inputs of one call would fit into it. The card holds its power limit by
lowering its clock (about 1.5 GHz under this load on an H200), so absolute times move with the temperature: compare
within a run.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import torch

from bench.peers.adapter import first_line

TARGET_MS = 4.0  # length of one sample; a graph launch costs about 0.01 ms
MAX_CALLS = 100

Calls = Sequence[Callable[[], object]]  # the same call on different inputs; used in turn


@dataclass(frozen=True)
class Summary:
    """Median, quartiles and number of a list of values."""

    median: float
    q1: float
    q3: float
    n: int

    @staticmethod
    def of(values: Sequence[float]) -> Summary:
        """Summarises at least one value."""
        if len(values) == 1:
            return Summary(values[0], values[0], values[0], 1)
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return Summary(median, q1, q3, len(values))

    def asdict(self) -> dict[str, float]:
        """The fields, for JSON."""
        return asdict(self)


class Sample(Protocol):
    """Something that can be run once and says how many milliseconds one call took."""

    mode: str  # "graph", "eager" or "host"
    calls: int  # calls in one sample
    note: str | None  # why the mode is not the best one

    def start(self) -> None:
        """Begins the sample; may return before it is done."""
        ...

    def milliseconds(self) -> float:
        """Time of one call of the last sample; waits for it."""
        ...


class DeviceSample:
    """`calls` calls between two CUDA events: as one graph, or one by one where capturing them fails."""

    def __init__(self, calls: Calls, target_ms: float = TARGET_MS) -> None:
        """Estimates the time of a call, then captures as many as fill `target_ms`, at least one of each input set."""
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._calls, self.calls, self._run = calls, 3 * len(calls), self._eager
        self.mode = "eager"
        self.note: str | None = None
        for _ in range(2):  # the first pass compiles and warms up, the second one is the estimate
            self.start()
            estimate = self.milliseconds()
        self.calls = max(len(calls), min(MAX_CALLS, round(target_ms / max(estimate, 1e-3))), 1)
        try:
            self._run, self.mode = self._capture(), "graph"
        except Exception as error:
            torch.cuda.synchronize()  # not every peer can be captured: it is timed call by call, and the record says so
            self.note = f"not captured in a graph: {first_line(error)}"

    def start(self) -> None:
        """Enqueues the sample between its two events."""
        self._begin.record()
        self._run()
        self._end.record()

    def milliseconds(self) -> float:
        """Waits for the sample."""
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / self.calls

    def _eager(self) -> None:
        for index in range(self.calls):
            self._calls[index % len(self._calls)]()

    def _capture(self) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # capture must not be the first use of the stream
            self._calls[0]()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            self._eager()
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay


class HostSample:
    """Wall-clock samples for calls that run on the CPU."""

    mode = "host"
    note = None

    def __init__(self, calls: Calls, target_ms: float = TARGET_MS) -> None:
        """Warms up and chooses how many calls fill `target_ms`."""
        self._calls, self.calls, self._ms = calls, len(calls), 0.0
        self.start()
        self.start()
        self.calls = max(len(calls), min(MAX_CALLS, round(target_ms / max(self._ms, 1e-3))))

    def start(self) -> None:
        """Runs the sample."""
        begin = time.perf_counter()
        for index in range(self.calls):
            self._calls[index % len(self._calls)]()
        self._ms = (time.perf_counter() - begin) * 1e3 / self.calls

    def milliseconds(self) -> float:
        """Time of the sample that ran."""
        return self._ms


def sample(calls: Calls, device: torch.device) -> Sample:
    """The kind of sample that fits the device."""
    return DeviceSample(calls) if device.type == "cuda" else HostSample(calls)


def interleave(
    samples: Mapping[str, Sample], rounds: int, seed: int, *, warm_ms: float = 200.0
) -> dict[str, list[float]]:
    """Milliseconds per call of every sample in every round: `{name: [round 0, round 1, …]}`.

    Rounds that last `warm_ms` in all run first and are not recorded: they bring the card to the clock it can hold.
    """
    order = list(samples)
    shuffle = random.Random(seed).shuffle
    times: dict[str, list[float]] = {name: [] for name in samples}

    def one_round() -> dict[str, float]:
        shuffle(order)
        for name in order:
            samples[name].start()
        return {name: samples[name].milliseconds() for name in order}

    collecting = gc.isenabled()
    gc.disable()
    try:
        warmed = 0.0
        while samples and warmed < warm_ms:
            taken = one_round()
            warmed += max(1e-3, sum(ms * samples[name].calls for name, ms in taken.items()))
        for _ in range(rounds if samples else 0):
            for name, ms in one_round().items():
                times[name].append(ms)
    finally:
        if collecting:
            gc.enable()
    return times


def paired_ratio(times: Sequence[float], own: Sequence[float]) -> Summary:
    """Summary of `times[r] / own[r]` over the rounds: above 1 means that `own` is the faster one."""
    return Summary.of([theirs / ours for theirs, ours in zip(times, own, strict=True)])
