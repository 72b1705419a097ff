"""SM cycles and tensor-pipe activity of one call of a rung, through Nsight Compute, as `bench.ncu` takes them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench import ncu
from bench.cases import Case, find

METRICS = {
    "cycles": "sm__cycles_elapsed.max",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
}


def counters(name: str, cases: Sequence[str]) -> list[dict[str, Any]]:
    """`{"metrics", "ncu"}` of every case, profiled in one new process; metrics are None where `ncu` says why."""
    if shutil.which("ncu") is None:
        return [{"metrics": None, "ncu": "ncu is not on the PATH"}] * len(cases)
    command = ["ncu", "--csv", "--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all"]
    command += ["--metrics", ",".join(METRICS.values()), sys.executable, "-m", "bench.ladder", "--child", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ncu.ROOT, timeout=ncu.LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return [{"metrics": None, "ncu": f"ncu took longer than {ncu.LIMIT_S} s"}] * len(cases)
    calls = ncu.split(ncu.parse(done.stdout))
    lines = (done.stdout + done.stderr).strip().splitlines() or ["ncu printed nothing"]
    return [
        counted(calls[i]) if i < len(calls) and calls[i] else {"metrics": None, "ncu": lines[-1][:300]}
        for i in range(len(cases))
    ]


def counted(kernels: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The counters of a call, under the names of a record."""
    values = ncu.combine(kernels)
    return {"metrics": {key: values.get(metric) for key, metric in METRICS.items()}, "ncu": None}


def call_once(prepare: Callable[[Case], Callable[[], object]], cases: Sequence[str]) -> None:
    """One call of each case between cudaProfilerStart and cudaProfilerStop, and the marker; warm-up outside."""
    for name in cases:
        call = prepare(find(name))
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
