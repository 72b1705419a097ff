"""What `bench.soak --load` puts a card through: values right or one clear error, nothing hangs, no memory grows.

    threads     64 threads on 8 streams: calls, new plans, planned calls and captured ones at once, each compared
    processes   two processes do the same at once, from an empty folder of compiled kernels
    memory      a call finds no memory for its output in the middle of a step; the next one is right
    lost        a kernel breaks the device (in a process of its own); the next call says so and ends

Each part gives a Verdict. Work is a list of jobs (jobs.py): what to do on a stream, and what must come out.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import warpattn as wa
from bench.soak.jobs import Job, card_jobs, streams

TOLERANCE = 2e-2  # absolute; values are standard normal, outputs bf16
HANG_S = 120.0  # after the last job should have ended
GROWTH = 64 * 2**20  # bytes that a second half of a run may add
ROOT = Path(__file__).parents[2]
CHILD = ("-m", "bench.soak", "--load")
THREADS = 64


class Verdict(NamedTuple):
    """What a part found: whether it is as it should be, and a sentence."""

    right: bool
    said: str


@dataclass
class Load:
    """Counts of jobs done, and the first fault; shared by the threads."""

    done: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def do(self, job: Job) -> None:
        """Do a job and compare."""
        try:
            error = (job.run().float() - job.wanted.float()).abs().max().item()
            fault = "" if error <= TOLERANCE else f"{job.name}: difference {error}"
        except Exception as raised:  # any error is a fault here: the load itself is legal
            fault = f"{job.name}: {type(raised).__name__}: {raised}"
        with self.lock:
            self.done[job.name] += 1
            if fault:
                self.faults.append(fault)


def threads(jobs: Callable[[int], list[Job]], count: int, streams: list[Any], seconds: float) -> Verdict:
    """`count` threads, spread over the streams, do random ones of their jobs; each gets its own by `jobs(number)`."""
    load, end, begun = Load(), time.monotonic() + seconds, [0]

    def work(number: int) -> None:
        chance = random.Random(number)
        with on(streams[number % len(streams)]):
            mine = jobs(number)
            load.do(chance.choice(mine))  # however late the thread begins
            while not load.faults and time.monotonic() < end:
                load.do(chance.choice(mine))

    workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
    for worker in workers:
        worker.start()
    time.sleep(seconds / 2)
    begun[0] = resident()
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()) + HANG_S)
    stuck = sum(worker.is_alive() for worker in workers)
    counts = ", ".join(f"{number} {name}" for name, number in sorted(load.done.items()))
    if load.faults:
        return Verdict(False, f"{len(load.faults)} faults after {counts}; the first: {load.faults[0]}")
    if stuck:
        return Verdict(False, f"{stuck} of {count} threads hang after {counts}")
    grown = resident() - begun[0]
    return Verdict(grown <= GROWTH, f"{counts}; {grown / 2**20:+.0f} MiB in the second half")


def on(stream: Any) -> Any:
    """Work on a stream; None: where there are none."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def resident() -> int:
    """Bytes that this process holds, on the card and beside it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    card = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    return card + pages * os.sysconf("SC_PAGE_SIZE")


def processes(count: int, seconds: float, command: tuple[str, ...] = CHILD) -> Verdict:
    """New processes at once, with one empty folder for compiled kernels: all must end well."""
    with tempfile.TemporaryDirectory() as folder:
        known = os.environ | {"WARPATTN_CACHE_DIR": str(Path(folder) / "kernels")}
        whole = [sys.executable, *command, "threads", "--minutes", str(seconds / 60)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        children = [subprocess.Popen(whole, cwd=ROOT, env=known, **pipes) for _ in range(count)]
        return _all([ended(child, seconds + 2 * HANG_S) for child in children])


def ended(child: subprocess.Popen, seconds: float) -> Verdict:
    """How a process has ended; one that hangs is killed."""
    try:
        text, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return Verdict(False, f"a process hangs after {seconds:g} s")
    last = (text.strip().splitlines() or ["it said nothing"])[-1]
    return Verdict(child.returncode == 0, last)


def _all(verdicts: list[Verdict]) -> Verdict:
    return Verdict(all(each.right for each in verdicts), "; ".join(each.said for each in verdicts))


def out_of_memory(job: Job, full: Callable[[], contextlib.AbstractContextManager[None]]) -> Verdict:
    """A job while `full()` leaves no memory must end in torch's or our error; afterwards it must be right."""
    for _ in range(3):
        load = Load()
        load.do(job)
        try:
            with full():
                job.run()
            return Verdict(False, f"{job.name} needed no memory")
        except (torch.OutOfMemoryError, wa.AttentionError) as raised:
            said = f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
        except Exception as raised:
            return Verdict(False, f"{job.name} without memory: {type(raised).__name__}: {raised}")
        load.do(job)
        if load.faults:
            return Verdict(False, f"{load.faults[0]}, beside a call without memory ({said})")
    return Verdict(True, f"{said}; right before and afterwards")


@contextlib.contextmanager
def no_memory_left() -> Iterator[None]:
    """Forbid torch to take more of the card's memory than it holds."""
    torch.cuda.empty_cache()
    share = torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(share)
    held = []
    try:
        for size in (2**24, 2**21, 2**16, 2**9):  # what it holds and does not use
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        yield
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


def lost_device(job: Job, lose: Callable[[], None]) -> Verdict:
    """After `lose()` a job must end in one error."""
    with contextlib.suppress(RuntimeError):  # it may be said here already
        lose()
    try:
        job.run()
    except (RuntimeError, wa.AttentionError) as raised:
        return Verdict(bool(str(raised)), f"{type(raised).__name__}: {str(raised).splitlines()[0]}")
    return Verdict(False, f"{job.name} noticed nothing")


def break_the_card() -> None:
    """A kernel of torch whose assertion fails: nothing runs in this process any more."""
    torch.zeros(4, device="cuda")[torch.tensor([2**30], device="cuda")]
    torch.cuda.synchronize()


def waited_for(job: Job) -> Job:
    """The same job, which waits for the card."""

    def run() -> Tensor:
        out = job.run()
        torch.cuda.synchronize()
        return out

    return job._replace(run=run)


def put_through(part: str, seconds: float) -> Verdict:
    """A part of the load, on this machine's card."""
    if part == "processes":
        return processes(2, seconds)
    if part == "lost device":
        command = [sys.executable, *CHILD, "lost"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return ended(subprocess.Popen(command, cwd=ROOT, **pipes), HANG_S)
    torch.cuda.init()
    if part == "threads":
        return threads(card_jobs, THREADS, streams()[:-1], seconds)
    job = waited_for(card_jobs(0)[0])
    return out_of_memory(job, no_memory_left) if part == "memory" else lost_device(job, break_the_card)


PARTS = ("threads", "processes", "memory", "lost device")
