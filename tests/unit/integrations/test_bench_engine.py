"""Engines that `bench.engine` sets side by side: stand-ins for them, in their processes and here."""

from __future__ import annotations

import argparse
import multiprocessing
import os
from types import SimpleNamespace

import pytest

from bench.engine import __main__ as command
from bench.engine import served_by_sglang
from bench.engine.process import LLAMA, Done, Kind, Weights, Work, serve
from bench.engine.served_by_sglang import Served, Step


def parsed(monkeypatch, *words: str) -> argparse.Namespace:
    """The arguments of the command, which starts no engine."""
    found = []
    monkeypatch.setattr("sys.argv", ["bench.engine", *words])
    monkeypatch.setattr(command, "started", lambda args: found.append(args) or [])
    monkeypatch.setattr(command, "require_card", lambda parser, what, engine: None)
    command.main()
    return found[0]


def test_defaults_of_each_engine(monkeypatch):
    ours = parsed(monkeypatch)
    assert (ours.models, ours.backends, ours.weights) == ("llama,gpt-oss", "FLASH_ATTN,WARPATTN", "one")
    theirs = parsed(monkeypatch, "--engine", "sglang", "--backends", "warpattn")
    assert (theirs.models, theirs.backends, theirs.weights) == ("llama", "warpattn", "each")


@pytest.mark.parametrize("words", [("--models", "latent"), ("--weights", "one"), ("--profile", "32 x 4k")])
def test_what_sglang_does_not_take(monkeypatch, capsys, words):
    with pytest.raises(SystemExit):
        parsed(monkeypatch, "--engine", "sglang", *words)
    assert "--engine sglang takes --models llama" in capsys.readouterr().err


def test_settings_fill_the_cache_that_was_asked_for():
    args = argparse.Namespace(cache_gib=18, graphs="FULL_DECODE_ONLY")
    settings = served_by_sglang.settings(LLAMA, "fa3", args)
    assert settings["max_total_tokens"] == (18 << 30) // (32 * 2 * 8 * 128 * 2)
    assert settings["attention_backend"] == "fa3"
    assert not settings["disable_decode_cuda_graph"] and settings["disable_prefill_cuda_graph"]
    args.graphs = "NONE"
    assert served_by_sglang.settings(LLAMA, "fa3", args)["disable_decode_cuda_graph"]


class Scheduler:
    """As SGLang's: requests are finished once a step's results are processed."""

    def process_batch_result(self, batch: SimpleNamespace, result: int) -> None:
        for request in batch.reqs:
            request.left -= 1


def batch(mode: str, requests: list[SimpleNamespace]) -> SimpleNamespace:
    return SimpleNamespace(forward_mode=SimpleNamespace(name=mode), reqs=requests)


def test_a_run_of_an_engine(tmp_path):
    class Noted(Scheduler):
        pass

    noted = tmp_path / "steps"
    served_by_sglang.note_steps(Noted, noted)

    class Engine:
        def generate(self, input_ids, sampling_params):
            requests = [SimpleNamespace(left=sampling_params["max_new_tokens"]) for _ in input_ids]
            for request in requests:
                request.finished = lambda request=request: request.left <= 0
            steps = [("EXTEND", requests[:1]), ("EXTEND", requests[1:]), *[("DECODE", requests)] * 3]
            for mode, some in [*steps, ("DECODE", requests)]:  # the last one began before the end was known
                Noted().process_batch_result(batch(mode, some), 0)
            return [{"output_ids": [len(prompt)]} for prompt in input_ids]

    served = Served(Engine(), noted)
    for _ in range(2):  # the second run must not take the steps of the first
        done = served_by_sglang.generate(served, Work((5, 7), "a", 4))
        assert done.tokens == [[5], [7]] and len(done.steps) == 2 and min(done.steps) >= 0
        assert not list(tmp_path.glob("*.part"))


def test_steps_that_count():
    steps = [Step(1.0, "EXTEND", 2), Step(2.0, "DECODE", 2), Step(2.5, "DECODE", 2), Step(3.5, "DECODE", 1)]
    assert served_by_sglang.times_of(steps, 2) == [500.0]


def test_a_scheduler_that_noted_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="noted no steps"):
        served_by_sglang.steps_of(tmp_path / "steps", patience=0.05)


def start(model: str, backend: str, weights: Weights, args: argparse.Namespace) -> str:
    if backend == "dies":
        os._exit(3)
    if backend == "fails":
        raise ValueError("it cannot start")
    return backend


def generate(llm: str, work: Work) -> Done:
    return Done(1.0, [2.0], [[len(llm)]], [])


def stop(llm: str) -> None:
    assert llm == "works"


@pytest.mark.parametrize(("backend", "reason"), [("fails", "it cannot start"), ("dies", "its process has ended")])
def test_a_group_with_a_failure_is_left_out(monkeypatch, capsys, backend, reason):
    monkeypatch.setitem(command.KINDS, "vllm", Kind(start, generate, stop, alone=True))
    args = argparse.Namespace(engine="vllm", models="llama", backends=f"works,{backend}", weights="each")
    assert command.started(args) == []
    assert f"llama is left out: {'Traceback' if backend == 'fails' else reason}" in (said := capsys.readouterr().out)
    assert reason in said


def test_an_engine_does_what_it_is_sent(monkeypatch):
    ours, theirs = multiprocessing.Pipe()
    ours.send(Work((5,), "a", 1))
    ours.send(None)
    serve(Kind(start, generate, stop, alone=True), theirs, "llama", "works", Weights(), argparse.Namespace())
    assert ours.recv() >= 0 and ours.recv().tokens == [[5]]


def test_an_engine_that_ended_during_a_run():
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with pytest.raises(RuntimeError, match="its process has ended"):
        command.Engines("llama", {"fa3": ours}).each(Work((5,), "a", 1))
