"""Compiles the kernels of all peers before any is timed, in processes side by side.

Not in `__main__`: a process that is spawned for a package's `__main__` does not run it, so it has no function of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from bench.backward.cases import Case, make
from bench.backward.peers import PEERS
from bench.measure.workers import compiled


def compile_all(listed: Sequence[Case], peers: Sequence[str]) -> None:
    """Every kernel of every peer, in processes side by side that leave them on disk."""
    kinds = {
        (case.dim, case.dim_v, case.causal, case.window, case.dim == 64 and case.seq <= 2048, bool(case.lengths),
         case.softcap, case.alibi, case.both, case.heads_kv): case
        for case in listed
    }  # fmt: skip
    for job in compiled([(compile_one, name, case) for name in peers if name != "cudnn" for case in kinds.values()]):
        job.result()


def compile_one(name: str, case: Case) -> None:
    """A peer's kernels of one case; what it cannot do shows when it is timed."""
    with suppress(Exception):
        PEERS[name](case, make(case, "cuda"))()
        torch.cuda.synchronize()
