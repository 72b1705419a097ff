"""What is made while a CUDA graph is captured, with a stand-in for streams and the driver's modes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from warpattn.runtime import captures, cuda, hip

CARD = torch.device("cuda", 0)


@pytest.fixture
def said(monkeypatch):
    """What happened, in order, while torch says that the current stream is captured."""
    notes = []

    class Stream:
        def __init__(self, device):
            notes.append(f"stream of {device}")

        def synchronize(self):
            notes.append("waited")

    @contextmanager
    def noted(word):
        notes.append(word)
        yield
        notes.append(f"end of {word}")

    monkeypatch.setattr(cuda, "is_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: noted("beside"))
    monkeypatch.setattr(cuda, "relaxed_captures", lambda: noted("relaxed"))
    monkeypatch.setattr(hip, "relaxed_captures", lambda: noted("relaxed by HIP"))
    return notes


def test_it_runs_beside_the_captured_stream_and_has_ended(said):
    with captures.outside_captures(CARD):
        said.append("made")
    assert said == ["stream of cuda:0", "relaxed", "beside", "made", "waited", "end of beside", "end of relaxed"]


def test_amd_cards_have_the_mode_of_their_own_driver(said, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with captures.outside_captures(CARD):
        pass
    assert said[1] == "relaxed by HIP"


def test_without_a_capture_nothing_changes(said, monkeypatch):
    with captures.outside_captures(torch.device("cpu")):
        pass
    monkeypatch.setattr(cuda, "is_capturing", lambda: False)
    with captures.outside_captures(CARD):
        pass
    captures.used_here(torch.zeros(1), None)
    assert said == []


@pytest.mark.filterwarnings("ignore")  # of what torch imports
@pytest.mark.parametrize(
    ("stream", "owned"), [(None, False), (7, True), (8, False)], ids=["no graphs", "their stream", "another stream"]
)
def test_graph_trees_own_what_is_made_on_their_stream(stream, owned, monkeypatch):
    from torch._inductor import cudagraph_trees

    manager = None if stream is None else SimpleNamespace(stream=SimpleNamespace(cuda_stream=stream))
    monkeypatch.setattr(cudagraph_trees.get_container(1), "tree_manager", manager)
    monkeypatch.setattr(cuda, "current_stream", lambda device: 7)
    monkeypatch.setattr(cuda, "is_capturing", lambda: False)
    assert captures.graph_owns_memory(1) is owned
    assert not captures.graph_owns_memory(0)
    with ThreadPoolExecutor(1) as thread:  # threads have graph trees of their own, or none
        assert not thread.submit(captures.graph_owns_memory, 1).result()
    monkeypatch.setattr(cuda, "is_capturing", lambda: True)
    assert captures.graph_owns_memory(1)
