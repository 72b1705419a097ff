"""Cases prepared by several processes at once, then timed by one after the other, alone on the device.

      process 0   compile, check ──▶ ready ──▶ time its cases ──▶
      process 1   compile, check ─────▶ ready                    ──▶ time its cases ──▶
      …           compiling takes most of a run of many kernels; no process compiles while another one times

A job that raises has no entry, nor one of a process that dies, nor one that is not begun when patience ends.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import torch

READY, STOP, GO = "ready", "prepare no more", "go"

Job = Callable[[], Callable[[], dict[str, Any]]]  # prepares a case; what it returns times it


def run(jobs: Sequence[Job], workers: int, patience: float = math.inf) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Numbers and entries of the jobs, which are pickled for `workers` processes; None for one without
    an entry. patience: seconds after which no further case is prepared."""
    context = multiprocessing.get_context("spawn")
    shares = [range(first, len(jobs), workers) for first in range(min(workers, len(jobs)))]
    pipes = []
    for share in shares:
        ours, theirs = context.Pipe()
        with _without_interrupts():
            context.Process(target=_serve, args=([jobs[number] for number in share], theirs), daemon=True).start()
        theirs.close()  # so that a process's death ends its pipe
        pipes.append(ours)
    try:
        yield from _entries(shares, pipes, time.monotonic() + patience)
    except BaseException:
        _terminate()  # before their pipes break
        raise


def _entries(
    shares: Sequence[range], pipes: Sequence[Connection], end: float
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Numbers and entries of the jobs, of which each process has a share. end: when no further case is prepared."""
    for pipe in pipes:
        if not pipe.poll(None if math.isinf(end) else max(0.0, end - time.monotonic())):
            pipe.send(STOP)
    ready = [_receive(pipe) for pipe in pipes]
    for share, pipe, prepared in zip(shares, pipes, ready, strict=True):
        if prepared is not None:
            pipe.send(GO)
        for number in share:
            yield number, None if prepared is None else _receive(pipe)


def compiled(calls: Sequence[tuple[Any, ...]], workers: int = 16) -> Iterator[Future[Any]]:
    """The results of calls (function, *arguments), in order, made by up to so many processes side by side. When Ctrl-C
    interrupts the caller, the processes end without a word."""
    pool = ProcessPoolExecutor(max(1, min(workers, len(calls))), mp_context=multiprocessing.get_context("spawn"))
    try:
        with _without_interrupts():
            futures = [pool.submit(*call) for call in calls]
        for future in futures:
            future.exception()  # waits
            yield future
    except BaseException:
        _terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _terminate() -> None:
    for process in multiprocessing.active_children():
        process.terminate()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let processes that begin here take no Ctrl-C, which a terminal sends to them, too: their parent ends them."""
    resource_tracker.ensure_running()  # which would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(jobs: Sequence[Job], pipe: Connection) -> None:
    """What a process does."""
    timers = []
    for job in jobs:
        timers.append(None if pipe.poll() else _attempt(job))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the other processes check on the same device
    pipe.send(READY)
    while pipe.recv() != GO:
        pass
    while timers:
        timer = timers.pop(0)
        pipe.send(None if timer is None else _attempt(timer))


def _attempt(job: Callable[[], Any]) -> Any:
    """What a job returns; None, and the reason on standard error, if it raises."""
    try:
        return job()
    except Exception:
        traceback.print_exc()
        return None


def _receive(pipe: Connection) -> Any:
    """What the process sends next; None if it died."""
    try:
        return pipe.recv()
    except EOFError:
        return None
