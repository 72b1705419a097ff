"""The load that a card is put through: what it takes for right and for wrong, on CPU tensors and a stand-in card."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

import pytest
import torch

import warpattn as wa
from bench.soak import __main__ as soak
from bench.soak import jobs as card
from bench.soak import load
from bench.soak.load import Job
from tests.unit.runtime.card import TILE, make_card, normal  # noqa: F401 (a fixture)


def jobs(number: int) -> list[Job]:
    q = torch.randn(1, 5 + number, 2, 8)
    return [Job("calls", lambda: wa.attention(q, q, q), wa.attention(q, q, q))]


def test_threads_that_do_right():
    verdict = load.threads(jobs, 8, [None, None], 0.2)
    assert verdict.right and "calls; " in verdict.said, verdict


@pytest.mark.parametrize("number", [0, 63])
@pytest.mark.parametrize("kind", [card.dense_jobs, card.latent_jobs, card.narrow_jobs])
def test_jobs_of_each_kind_are_right(kind, number):
    """On the CPU, where calls and plans run the reference."""
    seed, done = torch.Generator().manual_seed(number), load.Load()
    for job in kind(lambda *shape: torch.randn(*shape, generator=seed).bfloat16(), number):
        done.do(job)
    assert not done.faults and len(done.done) >= 2


def test_one_wrong_value_among_all():
    def sometimes(number: int) -> list[Job]:
        (job,) = jobs(number)
        return [job._replace(wanted=job.wanted + 1)] if number == 5 else [job]

    for seconds in (0.2, 0.0):  # a thread that begins after the end has its turn, too
        verdict = load.threads(sometimes, 8, [None], seconds)
        assert not verdict.right and "calls: difference 1" in verdict.said


@pytest.mark.parametrize("result", [torch.nan, RuntimeError("it broke")])
def test_nan_and_errors_are_faults(result):
    def run() -> torch.Tensor:
        if isinstance(result, Exception):
            raise result
        return torch.full((3,), result)

    verdict = load.threads(lambda _: [Job("calls", run, torch.zeros(3))], 2, [None], 0.05)
    assert not verdict.right and ("nan" in verdict.said or "RuntimeError: it broke" in verdict.said)


def test_a_thread_that_hangs(monkeypatch):
    monkeypatch.setattr(load, "HANG_S", 0.1)
    go_on = threading.Event()
    job = Job("waits", lambda: torch.zeros(1) if go_on.wait(60) else torch.ones(1), torch.zeros(1))
    verdict = load.threads(lambda number: [job] if number else jobs(0), 2, [None], 0.05)
    go_on.set()
    assert not verdict.right and "1 of 2 threads hang" in verdict.said


def test_memory_that_grows(monkeypatch):
    kept, sizes = [], iter(range(0, 2**40, load.GROWTH + 1))
    monkeypatch.setattr(load, "resident", lambda: next(sizes))
    verdict = load.threads(
        lambda _: [Job("calls", lambda: kept.append(1) or torch.zeros(1), torch.zeros(1))], 1, [None], 0.05
    )
    assert not verdict.right and "+64 MiB in the second half" in verdict.said


@pytest.mark.parametrize(("programs", "right"), [(("print('fine')", "print('fine')"), True),
                                                 (("print('fine')", "raise SystemExit('wrong')"), False)])  # fmt: skip
def test_processes(programs, right):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    children = [subprocess.Popen([sys.executable, "-c", program], **pipes) for program in programs]
    verdicts = [load.ended(child, 60) for child in children]
    assert all(each.right for each in verdicts) is right
    assert verdicts[-1].said == ("fine" if right else "wrong")


def test_a_process_that_hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.PIPE, text=True)
    assert load.ended(child, 0.1) == (False, "a process hangs after 0.1 s")
    assert child.returncode is not None


@pytest.fixture(name="call")
def on_a_stand_in(card):
    """A call on the stand-in card, whose kernel writes one value everywhere."""
    q, k, v = normal(), normal(), normal()
    return Job("calls", lambda: wa.attention(q, k, v), torch.full(q.shape, TILE))


def test_no_memory_in_the_middle_of_a_step(call, monkeypatch):
    @contextlib.contextmanager
    def full():
        def refuse(*_, **__):
            raise torch.OutOfMemoryError("CUDA out of memory")

        with monkeypatch.context() as context:
            for name in ("empty", "empty_like", "empty_strided"):
                context.setattr(torch, name, refuse)
            context.setattr(torch.Tensor, "new_empty", refuse)
            yield

    verdict = load.out_of_memory(call, full)
    assert verdict == (True, "OutOfMemoryError: CUDA out of memory; right before and afterwards")
    assert not load.out_of_memory(call, contextlib.nullcontext).right
    assert not load.out_of_memory(call._replace(wanted=call.wanted + 1), full).right


def test_a_lost_device_is_one_error(call, card):
    assert call.run() is not None
    verdict = load.lost_device(call, lambda: card.errors.append(719))
    assert verdict.right and verdict.said.startswith("RuntimeError: "), verdict
    assert load.lost_device(call, lambda: None) == (False, "calls noticed nothing")


def test_without_a_card_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--load needs a card"):
        soak.main(["--load"])
