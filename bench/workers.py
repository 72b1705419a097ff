"""Cases prepared by several processes at once, then timed by one after the other, alone on the device.

      process 0   compile, check ──▶ ready ──▶ time its cases ──▶
      process 1   compile, check ─────▶ ready                    ──▶ time its cases ──▶
      …           compiling takes most of a run of many kernels; nobody compiles while somebody times

A job that raises has no entry, and no job of a process that dies.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

GO = "go"

Job = Callable[[], Callable[[], dict[str, Any]]]  # prepares a case; what it returns times it


def run(jobs: Sequence[Job], workers: int) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Numbers and entries of the jobs, which are pickled for `workers` processes; None for one that failed."""
    context = multiprocessing.get_context("spawn")
    shares = [range(first, len(jobs), workers) for first in range(min(workers, len(jobs)))]
    pipes = []
    for share in shares:
        ours, theirs = context.Pipe()
        context.Process(target=_serve, args=([jobs[number] for number in share], theirs), daemon=True).start()
        theirs.close()  # so that a process's death ends its pipe
        pipes.append(ours)
    ready = [_receive(pipe) for pipe in pipes]
    for share, pipe, prepared in zip(shares, pipes, ready, strict=True):
        if prepared is not None:
            pipe.send(GO)
        for number in share:
            yield number, None if prepared is None else _receive(pipe)


def _serve(jobs: Sequence[Job], pipe: Connection) -> None:
    """What a process does."""
    timers = []
    for job in jobs:
        timers.append(_attempt(job))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the other processes check on the same device
    pipe.send(GO)
    pipe.recv()
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
