"""How the kernels are launched: repeats, streams, threads, CUDA graphs, torch.compile, second processes, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

import warpattn as wa
from tests.oracle import Inputs, check, poisoned
from warpattn.runtime import bound_launches, execute
from warpattn.runtime.tile_counters import TileCounters

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
CAUSAL = wa.Causal()


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def qkv(seq: int = 700, heads: int = 8, dim: int = 128, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return normal(batch, seq, heads, dim), normal(batch, seq, heads, dim), normal(batch, seq, heads, dim)


@pytest.mark.parametrize(("seq", "heads", "dim"), [(4096, 16, 128), (2048, 32, 64), (4096, 8, 256), (1000, 3, 72)])
def test_repeats_are_bit_identical(seq, heads, dim):
    q, k, v = qkv(seq, heads, dim)
    first, first_lse = wa.attention(q, k, v, mask=CAUSAL, return_lse=True)
    for _ in range(16):
        out = poisoned(q.shape, q.dtype, q.device)
        _, lse = wa.attention(q, k, v, mask=CAUSAL, out=out, return_lse=True)
        assert torch.equal(out, first) and torch.equal(lse, first_lse)


def test_the_short_way_gives_the_same_result(monkeypatch):
    q, k, v = qkv()
    padding = wa.Padding(torch.tensor([100, 650], device="cuda", dtype=torch.int32))
    for mask, score in ((None, None), (CAUSAL, None), (padding, wa.SoftCap(5.0)), (wa.Causal() & padding, None)):
        results = [wa.attention(q, k, v, mask=mask, score=score, return_lse=True) for _ in range(3)]
        with monkeypatch.context() as context:
            context.setattr(execute, "recall", lambda *_: None)
            results.append(wa.attention(q, k, v, mask=mask, score=score, return_lse=True))
        assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)


def test_two_streams_at_once():
    """Kernels of two streams run beside each other, each with a tile counter of its own."""
    problems = [
        (qkv(3000, 16, 64, 1), CAUSAL),
        (qkv(2500, 8, 128, 1), None),
        (qkv(300, 4, 64, 1), wa.SlidingWindow(50)),
    ]
    expected = [wa.attention(*tensors, mask=mask) for tensors, mask in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[] for _ in problems]
    for _ in range(30):
        for stream, (tensors, mask), found in zip(streams, problems, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(wa.attention(*tensors, mask=mask))
    torch.cuda.synchronize()
    for truth, found in zip(expected, results, strict=True):
        assert all(torch.equal(out, truth) for out in found)


def test_many_threads():
    """Threads that have never used CUDA share kernels and launchers."""
    tensors = qkv(500)
    expected = wa.attention(*tensors, mask=CAUSAL)
    torch.cuda.synchronize()
    wrong: list[object] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    mine = [x.clone() for x in tensors]
                    if not torch.equal(wa.attention(*mine, mask=CAUSAL), expected):
                        wrong.append("a result differs")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_thread_whose_first_use_of_cuda_is_a_launch(monkeypatch):
    q, k, v = qkv()
    out = torch.empty_like(q)
    wa.attention(q, k, v, out=out)
    expected = out.clone()
    out.fill_(torch.nan)
    torch.cuda.synchronize()
    errors: list[object] = []

    def work() -> None:
        try:
            wa.attention(q, k, v, out=out)
        except Exception as error:
            errors.append(error)

    for forget in (False, True):  # known to this process, then loaded and planned by the thread
        if forget:
            monkeypatch.setattr(bound_launches, "_loaded", {})
            monkeypatch.setattr(execute, "_known", {})
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not errors
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        out.fill_(torch.nan)
        torch.cuda.synchronize()


def capture(call) -> tuple[torch.cuda.CUDAGraph, object]:  # type: ignore[no-untyped-def]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def test_cuda_graph_replays_with_changed_inputs():
    q, k, v = qkv()
    sinks = torch.randn(8, device="cuda")
    lengths = torch.tensor([700, 20], device="cuda", dtype=torch.int32)
    mask = wa.Causal() & wa.Padding(lengths)
    wa.attention(q, k, v, mask=mask, sinks=sinks, return_lse=True)
    graph, (out, lse) = capture(lambda: wa.attention(q, k, v, mask=mask, sinks=sinks, return_lse=True))
    for _ in range(3):
        for x in (q, k, v, sinks):
            x.normal_()
        lengths.random_(0, 701)
        out.fill_(torch.nan)
        graph.replay()
        check(Inputs(q, k, v, mask=mask, sinks=sinks), out, lse)


def test_a_first_call_inside_of_a_capture():
    """Nothing about this problem is known yet: its kernel is compiled and loaded while the stream is captured."""
    q, k, v = qkv(200, 2, 88)
    graph, out = capture(lambda: wa.attention(q, k, v, mask=wa.SlidingWindow(77)))
    graph.replay()
    check(Inputs(q, k, v, mask=wa.SlidingWindow(77)), out)


def test_graphs_beside_each_other_and_beside_launches():
    """Every capture has a counter of its own, and none of them the one of a stream."""
    first, second = qkv(2000, 16, 64, 1), qkv(1500, 8, 128, 1)
    truths = [wa.attention(*first, mask=CAUSAL), wa.attention(*second)]
    graphs = [
        capture(lambda: [wa.attention(*first, mask=CAUSAL) for _ in range(5)]),
        capture(lambda: [wa.attention(*second) for _ in range(5)]),
    ]
    streams = [torch.cuda.Stream() for _ in graphs]
    eager = []
    for _ in range(10):
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager.append(wa.attention(*first, mask=CAUSAL))
    torch.cuda.synchronize()
    for (_, outs), truth in zip(graphs, truths, strict=True):
        assert all(torch.equal(out, truth) for out in outs)
    assert all(torch.equal(out, truths[0]) for out in eager)


def test_capture_without_counters_left(monkeypatch):
    tensors = qkv(900, 16, 64)
    truth = wa.attention(*tensors, mask=CAUSAL)
    empty = TileCounters(torch.device("cuda", torch.cuda.current_device()))
    monkeypatch.setattr(bound_launches, "tile_counters", lambda device: empty)
    monkeypatch.setattr(execute, "_known", {})
    graph, outs = capture(lambda: [wa.attention(*tensors, mask=CAUSAL) for _ in range(3)])
    for _ in range(4):
        graph.replay()
        assert all(torch.equal(out, truth) for out in outs)


@pytest.mark.filterwarnings("ignore")
def test_compiled_by_torch():
    q, k, v = qkv(300)
    sinks = torch.randn(8, device="cuda")
    lengths = torch.tensor([300, 20], device="cuda", dtype=torch.int32)

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = wa.Padding(lengths) & wa.Causal()
        out, lse = wa.attention(x * 2, k, v, mask=mask, score=wa.SoftCap(20.0), sinks=sinks, return_lse=True)
        return out + 1, lse

    compiled = torch.compile(model, fullgraph=True)
    for _ in range(3):
        out, lse = compiled(q)
        inputs = Inputs(q * 2, k, v, mask=wa.Padding(lengths) & CAUSAL, score=wa.SoftCap(20.0), sinks=sinks)
        torch.testing.assert_close(out, model(q)[0])
        check(inputs, wa.attention(inputs.q, k, v, mask=inputs.mask, score=inputs.score, sinks=sinks), lse)
        lengths.random_(1, 301)
        q.normal_()


@pytest.mark.filterwarnings("ignore")
def test_compiled_by_torch_with_cuda_graphs():
    q, k, v = qkv(256)
    compiled = torch.compile(lambda x: wa.attention(x, k, v, mask=CAUSAL) * 2, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(q).clone(), wa.attention(q, k, v, mask=CAUSAL) * 2)
        q.normal_()


CHILD = """
import json, sys
import torch
import warpattn as wa
q, k, v = torch.randn((3, 1, 512, 4, 128), device="cuda", dtype=torch.bfloat16).unbind(0)
out = wa.attention(q, k, v, mask=wa.Causal())
truth = wa.attention(q.float(), k.float(), v.float(), mask=wa.Causal(), backend="reference")
print(json.dumps({"triton": "triton" in sys.modules, "error": (out - truth).abs().max().item()}))
"""


def test_the_second_process_compiles_nothing(tmp_path):
    environment = os.environ | {
        "WARPATTN_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    runs = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", CHILD], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
        )
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    assert all(run["error"] < 0.03 for run in runs)
    assert runs[0]["triton"] and not any(run["triton"] for run in runs[1:])


BAD = {
    "dtype": lambda q, k, v: {"q": q.float(), "k": k.float(), "v": v.float()},
    "head dim": lambda q, k, v: {"q": q[..., :60], "k": k[..., :56], "v": v},
    "large head dim": lambda q, k, v: {"q": normal(2, 64, 8, 520), "k": normal(2, 64, 8, 520), "v": v},
    "heads": lambda q, k, v: {"q": q[:, :, :7], "k": k[:, :, :4], "v": v[:, :, :4]},
    "device": lambda q, k, v: {"q": q, "k": k.cpu(), "v": v},
    "device of a mask": lambda q, k, v: {"q": q, "k": k, "v": v, "mask": wa.Padding(torch.tensor([3, 4]))},
    "device of sinks": lambda q, k, v: {"q": q, "k": k, "v": v, "sinks": torch.zeros(8)},
    "shape of out": lambda q, k, v: {"q": q, "k": k, "v": v, "out": q[:, :-1]},
    "scale": lambda q, k, v: {"q": q, "k": k, "v": v, "scale": float("nan")},
    "captured dtype": lambda q, k, v: {
        "q": q, "k": k, "v": v,
        "score": wa.CustomScore(lambda s, b, h, q, k, t: s + t[h], t=torch.ones(8).cuda().to(torch.float8_e5m2)),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_inputs_are_refused_before_anything_is_launched(name, monkeypatch):
    def launched(*_: object) -> None:
        raise AssertionError("launched")

    arguments = BAD[name](*qkv(64))
    monkeypatch.setattr(bound_launches.BoundLaunches, "launch", launched)
    with pytest.raises(wa.AttentionError):
        wa.attention(**arguments)


def test_memory_does_not_grow():
    """Masks made anew for every call, with their own tensors, leave nothing behind."""
    q, k, v = qkv(64)
    for _ in range(20):
        wa.attention(q, k, v, mask=wa.Padding(torch.tensor([5, 64], device="cuda")))
    torch.cuda.synchronize()
    before, known = torch.cuda.memory_allocated(), len(execute._known)
    for _ in range(200):
        wa.attention(q, k, v, mask=wa.Padding(torch.tensor([5, 64], device="cuda")))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before and len(execute._known) <= known + 1
