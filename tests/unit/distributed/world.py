"""Four processes on gloo that run every job once and tell what went wrong; one start for all of them.

The ranks are forked from a server that has imported everything, so a start costs one import of torch, not four.
"""

from __future__ import annotations

import json
import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

RANKS = 4
PATIENCE = timedelta(seconds=120)  # of a collective, on a busy machine

Job = Callable[[], None]


def failures(jobs: list[Job], folder: Path, ranks: int = RANKS) -> list[str]:
    """One text for every rank on which a job raised; those that only lost a peer by it are told if no other is."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.unit.distributed.torch_context", "tests.unit.distributed.paged", __name__])
    torch.multiprocessing.start_processes(_rank, (jobs, folder, ranks), ranks, start_method="forkserver")
    found = [text for rank in range(ranks) for text in json.loads((folder / f"{rank}.json").read_text())]
    return [text for text in found if "by peer" not in text] or found


def _rank(rank: int, jobs: list[Job], folder: Path, ranks: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=PATIENCE)
    found: list[str] = []
    told = folder / f"{rank}.json"
    told.write_text("[]")  # for jobs that end the process
    for job in jobs:
        torch.manual_seed(0)
        try:
            job()
        except Exception:
            found.append(f"{job} on rank {rank}:\n{traceback.format_exc()}")
            break  # the others may wait for messages that this rank will not send
    told.write_text(json.dumps(found))
    if not found:
        dist.barrier()
        dist.destroy_process_group()
