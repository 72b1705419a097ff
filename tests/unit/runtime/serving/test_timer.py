"""How long graphs take, with events and graphs that only take notes."""

from contextlib import contextmanager

import pytest
import torch

from warpattn.runtime.tuned.timer import MOST_CALLS, SAMPLE_MS, CardTimer


class Clock:
    """A card on which a call takes as long as it says; work runs when it is enqueued, or when its graph is replayed."""

    def __init__(self):
        self.now, self.capture, self.waits, self.replays = 0.0, None, 0, 0

    def call(self, ms, made):
        def run():
            if self.capture is None:
                self.now += ms
            else:
                self.capture.append(ms)
            made.append(ms)

        return run


@pytest.fixture(name="clock")
def make_clock(monkeypatch):
    clock = Clock()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing, "else it has no time"

        def record(self):
            self.at = clock.now

        def synchronize(self):
            clock.waits += 1

        def elapsed_time(self, other):
            return other.at - self.at

    class Graph:
        def __init__(self):
            self.work = []

        def replay(self):
            clock.replays += 1
            clock.now += sum(self.work)

    @contextmanager
    def capturing(graph):
        clock.capture = graph.work
        yield
        clock.capture = None

    for name, value in (("Event", Event), ("CUDAGraph", Graph), ("graph", capturing), ("synchronize", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, value)
    return clock


def test_medians_are_of_calls_between_events(clock):
    """Calls of a candidate on several inputs are used in turn; each round starts every graph once."""
    progress, slow = [], [[], [], []]
    calls = {
        "fast": [clock.call(0.01, [])],
        "slow": [clock.call(1.0 + i / 2, made) for i, made in enumerate(slow)],
    }
    times = CardTimer(torch.device("cpu")).microseconds(calls, 4, progress.append)
    assert times["slow"] == pytest.approx([1500.0] * 4) and times["fast"] == pytest.approx([10.0] * 4)
    assert progress == [0.25, 0.5, 0.75, 1.0]
    assert [len(made) for made in slow] == [3, 3, 3], "twice as they are, once into the graph"


def test_a_graph_takes_a_few_milliseconds(clock):
    short, long, made = [], [], clock.call
    CardTimer(torch.device("cpu")).microseconds({"a": [made(0.05, short)], "b": [made(1e-4, long)]}, 1, lambda _: None)
    assert len(short) - 2 == SAMPLE_MS / 0.05 and len(long) - 2 == MOST_CALLS


def test_rounds_of_the_beginning_bring_the_card_to_its_clock(clock):
    """60 ms of graphs of 3 ms, and one for each round."""
    CardTimer(torch.device("cpu")).microseconds({"a": [clock.call(1.0, [])]}, 2, lambda _: None)
    assert clock.replays == 60 // 3 + 2


def test_a_candidate_that_fails_has_no_times(clock):
    def fails():
        raise RuntimeError("out of memory")

    times = CardTimer(torch.device("cpu")).microseconds({"a": [fails], "b": [clock.call(1.0, [])]}, 2, lambda _: None)
    assert list(times) == ["b"] and len(times["b"]) == 2
