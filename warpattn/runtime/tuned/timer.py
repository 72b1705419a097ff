"""Times candidates on a card, in rounds in which each runs once, as a CUDA graph of several calls.

A card lowers its clock to keep within its power limit, so candidates that are timed one after the other get different
clocks. In a round candidates run in shuffled order; medians are over the rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from warpattn.problem.launch import Launch
from warpattn.runtime import cuda
from warpattn.runtime.bound_launches import BoundLaunches

SAMPLE_MS = 3.0  # of a graph: launching it takes about 0.01 ms
MOST_CALLS = 64
WARM_MS = 60.0  # of rounds that are not recorded, so that the card reaches a steady clock

Calls = Sequence[Callable[[], object]]  # one call on different inputs, used in turn


class Timer(Protocol):
    """Measures how long candidates take on a device. Tests have one with given times."""

    device: torch.device

    def microseconds(
        self, calls: Mapping[str, Calls], rounds: int, progress: Callable[[float], None]
    ) -> dict[str, list[float]]:
        """Return microseconds per call of every candidate in every round, without candidates that fail."""
        ...


class CardTimer:
    """Times graphs by CUDA events on the current card."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def microseconds(
        self, calls: Mapping[str, Calls], rounds: int, progress: Callable[[float], None]
    ) -> dict[str, list[float]]:
        """See `Timer`."""
        made = {name: _sample(one) for name, one in calls.items()}
        samples = {name: sample for name, sample in made.items() if sample is not None}
        times: dict[str, list[float]] = {name: [] for name in samples}
        order, shuffle, warmed = list(samples), random.Random(0).shuffle, 0.0
        while samples and warmed < WARM_MS:
            warmed += max(1e-3, sum(samples[name].milliseconds() * samples[name].calls for name in order))
        for done in range(rounds):
            shuffle(order)
            for name in order:
                samples[name].start()
            for name in order:
                times[name].append(samples[name].milliseconds(start=False) * 1000)
            progress((done + 1) / rounds)
        return times


class _Sample:
    """A graph of so many calls that it takes about `SAMPLE_MS`."""

    def __init__(self, calls: Calls) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._run: Callable[[], object] = lambda: [call() for call in calls]
        self.calls = len(calls)
        for _ in range(2):  # the first pass warms up
            one = self.milliseconds()
        self.calls = max(len(calls), min(MOST_CALLS, round(SAMPLE_MS / max(one, 1e-3))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(self.calls):
                calls[index % len(calls)]()
        self._run = graph.replay

    def start(self) -> None:
        """Enqueue the graph between its two events."""
        self._begin.record()
        self._run()
        self._end.record()

    def milliseconds(self, start: bool = True) -> float:
        """Return the milliseconds of one call in the graph; starts the graph first if `start`."""
        if start:
            self.start()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / self.calls


class GraphLaunches(BoundLaunches):
    """Launches of a graph that is only replayed on one stream, torch's current one. They use that stream's tile
    counter, as no other launch on it runs at the same time; a counter for a capture would never be released."""

    def __init__(self, launches: Sequence[Launch], device: int) -> None:
        super().__init__(launches, device)
        counter = self._counters.of_stream(cuda.current_stream(device))
        for cell in self._counter_cells:
            cell.value = counter

    def launch(self) -> None:
        stream = cuda.current_stream(self.device)
        for call in self.calls:
            code = call(stream)
            if code:
                self._launch_again(call, stream, code)


def _sample(calls: Calls) -> _Sample | None:
    """Make the sample of a candidate; None if it fails, such as for lack of memory for its graph."""
    try:
        return _Sample(calls)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
