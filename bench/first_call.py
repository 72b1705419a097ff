"""How long the first call takes in a new process: cold (nothing compiled yet) and warm (the disk cache is filled).

Each is measured in a process of its own, after `import warpattn` and after the CUDA context and the inputs exist, up to
the end of the kernel. All runs share one fresh cache folder: the first is the cold one, the others are warm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.measure.arguments import status
from bench.measure.timing import Summary

WARM_RUNS = 5
LIMIT_S = 300
ROOT = Path(__file__).resolve().parent.parent
CACHES = ("TRITON_CACHE_DIR", "TRITON_HOME", "XDG_CACHE_HOME", "WARPATTN_CACHE_DIR")


def measure(warm_runs: int = WARM_RUNS) -> dict[str, Any]:
    """Seconds of the cold first call and the median of the warm ones; `{"reason": …}` where a process failed."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {name: str(Path(folder) / name.lower()) for name in CACHES}
        runs = []
        for _ in range(warm_runs + 1):
            run = _child(environment)
            if "reason" in run:
                return run
            runs.append(run)
    warm = Summary.of([run["first_s"] for run in runs[1:]])
    return {
        "cold_s": runs[0]["first_s"],
        "warm_s": warm.median,
        "second_call_s": Summary.of([run["second_s"] for run in runs[1:]]).median,
        "import_s": Summary.of([run["import_s"] for run in runs[1:]]).median,
        "warm": warm.asdict(),
        "backend": runs[0]["device"],
    }


def _child(environment: dict[str, str]) -> dict[str, Any]:
    """One new process; what it measured, or the last line of its error."""
    command = [sys.executable, "-m", "bench.first_call", "--child"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"reason": f"the first call took longer than {LIMIT_S} s"}
    if done.returncode != 0:
        return {"reason": (done.stderr.strip().splitlines() or ["no error message"])[-1][:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def _run_child() -> None:
    """Imports, makes inputs, calls twice, prints the times as one JSON line."""
    import torch

    begin = time.perf_counter()
    import warpattn as wa

    imported = time.perf_counter() - begin
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = torch.randn((3, 1, 512, 4, 128), device=device, dtype=torch.bfloat16).unbind(0)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    times = []
    for _ in range(2):
        wait()
        begin = time.perf_counter()
        wa.attention(q, k, v, mask=wa.Causal())
        wait()
        times.append(time.perf_counter() - begin)
    print(json.dumps({"import_s": imported, "first_s": times[0], "second_s": times[1], "device": device}))


def main() -> None:
    """Prints what `measure` gives, or is one of its processes."""
    if sys.argv[1:] == ["--child"]:
        _run_child()
    else:
        print(json.dumps(measure(), indent=1))


if __name__ == "__main__":
    sys.exit(status(main))
