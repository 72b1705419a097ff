"""Hardware counters of one call, through Nsight Compute: SM cycles do not move with the clock, times do.

`python -m bench.ncu --group d128 --peers warpattn,cudnn,fa4 --json RECORD.json` profiles each peer in a process of its
own, one call of each case after a warm-up, and writes the counters into the record's `ncu` list. The card's clocks are
left as they are (`--clock-control none`). Behind every call the process launches a kernel that only waits; it tells
where in ncu's list of kernels one case ends.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.cases import find, groups
from bench.measure import inputs, record, table
from bench.measure.arguments import status
from bench.peers import PEERS

METRICS = (
    "sm__cycles_elapsed.max",
    "sm__inst_executed_pipe_tensor.sum",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "gpu__time_duration.sum",
    "dram__bytes.sum",
)
SUMMED = ("sm__cycles_elapsed.max", "sm__inst_executed_pipe_tensor.sum", "gpu__time_duration.sum", "dram__bytes.sum")
UNITS = {"nsecond": 1e-9, "ns": 1e-9, "usecond": 1e-6, "us": 1e-6, "msecond": 1e-3, "ms": 1e-3, "second": 1.0, "s": 1.0}
UNITS |= {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
LIMIT_S = 500
MARKER = "spin_kernel"  # what torch.cuda._sleep launches
ROOT = Path(__file__).resolve().parent.parent


def profile(peer: str, cases: Sequence[str], metrics: Sequence[str] = METRICS) -> list[dict[str, Any]]:
    """Counters of all kernels of one call per case; `{"reason": …}` in their place where ncu or the peer failed."""
    rows: list[dict[str, Any]] = [{"peer": peer, "case": case} for case in cases]
    if shutil.which("ncu") is None:
        return [row | {"reason": "ncu is not on the PATH"} for row in rows]
    child = [sys.executable, "-m", "bench.ncu", "--child", "--peers", peer]
    child += [word for case in cases for word in ("--case", case)]
    command = ["ncu", "--csv", "--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all"]
    command += ["--metrics", ",".join(metrics), *child]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=os.environ, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [row | {"reason": f"ncu took longer than {LIMIT_S} s"} for row in rows]
    calls, complaint = split(parse(done.stdout)), _complaint(done.stdout + done.stderr)
    calls += [[]] * (len(rows) - len(calls))
    return [
        row | (counted(kernels) if kernels else {"reason": complaint})
        for row, kernels in zip(rows, calls, strict=True)
    ]


def split(kernels: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The kernels of each call: those before each marker."""
    calls: list[list[dict[str, Any]]] = []
    current: list[dict[str, Any]] = []
    for kernel in kernels:
        if MARKER in kernel["name"]:
            calls.append(current)
            current = []
        else:
            current.append(kernel)
    return calls


def parse(text: str) -> list[dict[str, Any]]:
    """The kernels `{"name", "metrics"}` of ncu's CSV (a line per kernel and metric), in seconds, bytes and counts."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    kernels: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if not row.get("Metric Name") or not row.get("Metric Value"):
            continue
        try:
            value = float(row["Metric Value"].replace(",", "")) * UNITS.get(row["Metric Unit"], 1.0)
        except ValueError:  # "n/a": this chip has no such counter
            continue
        kernel = kernels.setdefault(row["ID"], {"name": row["Kernel Name"], "metrics": {}})
        kernel["metrics"][row["Metric Name"]] = value
    return list(kernels.values())


def counted(kernels: list[dict[str, Any]]) -> dict[str, Any]:
    """What a record has of a call: its counters, and of several kernels also each one's."""
    each = kernels if len(kernels) > 1 else [{"name": kernels[0]["name"]}]
    return {"metrics": combine(kernels), "kernels": each}


def combine(kernels: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Counters of a call of several kernels: counts and times add up, of a percentage the longest kernel's counts."""
    kernels = list(kernels)
    longest = max(kernels, key=lambda kernel: kernel["metrics"].get("sm__cycles_elapsed.max", 0.0))
    total = dict(longest["metrics"])
    for name in SUMMED:
        if name in total:
            total[name] = sum(kernel["metrics"].get(name, 0.0) for kernel in kernels)
    return total


def _complaint(text: str) -> str:
    """The line of ncu's or the child's output that says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line or "Error" in line]
    return (errors or lines or ["ncu printed nothing"])[-1][:300]


def count(call: Callable[[], object] | None) -> None:
    """Run a call, None if there is none, where ncu counts, and the marker."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    if call is not None:
        call()
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def _run_child(cases: Sequence[str], peer: str) -> None:
    """One call of each case, and the marker, between cudaProfilerStart and cudaProfilerStop; warm-up outside."""
    reason = PEERS[peer].available()
    if reason is not None:
        sys.exit(f"Error: {peer} is unavailable: {reason}")
    for name in cases:
        try:
            case = find(name)
            call = PEERS[peer].prepare(case, *inputs.make(case, inputs.default_device(), 0))
            for _ in range(2):
                call()
        except Exception as error:  # the other cases are still wanted
            print(f"Error: {peer} on {name}: {type(error).__name__}: {error}", flush=True)
            call = None
        count(call)


def main(argv: Sequence[str] | None = None) -> int:
    """Profiles cases × peers; adds to the record if its file exists, else writes a new one."""
    argv = sys.argv[1:] if argv is None else list(argv)
    known = [case.name for group in groups().values() for case in group]
    parser = argparse.ArgumentParser(prog="python -m bench.ncu", description=__doc__)
    parser.add_argument("--case", action="append", default=[], choices=known, metavar="CASE", help="repeatable")
    parser.add_argument("--group", action="append", default=[], choices=list(groups()), metavar="GROUP", help="also")
    parser.add_argument("--peers", default="warpattn,cudnn,fa4", help="comma-separated")
    parser.add_argument("--json", type=Path, help="record to write to")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    peers = args.peers.split(",")
    unknown = [name for name in peers if name not in PEERS]
    if unknown:
        parser.error(f"unknown peers: {', '.join(unknown)} (known: {', '.join(PEERS)})")
    cases = list(dict.fromkeys([*args.case, *(case.name for name in args.group for case in groups()[name])]))
    if not cases:
        parser.error("give at least one --case or --group")
    if args.child:
        _run_child(cases, peers[0])
        return 0
    exists = args.json is not None and args.json.exists()
    found = record.start("bench.ncu", argv, {})
    if exists:
        command = found["command"]
        found = record.read(args.json)
        found["command"] += f"; {command}"
    found["ncu"] += [row for peer in peers for row in profile(peer, cases)]
    if args.json is not None:
        record.write(found, args.json)
    print(table.render(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(status(main))
