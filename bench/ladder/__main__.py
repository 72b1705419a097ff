"""Times the rungs and the shipped kernel beside each other: `python -m bench.ladder --json FILE`.

A rung whose result is not that of the shipped kernel is not timed. Times are medians of interleaved rounds of CUDA
graphs (`bench.measure`). Where ncu is on the PATH, SM cycles and activity of the tensor pipe of a call are added, each
rung in a process of its own (`bench.ncu`). The record, written after every case:

    {"schema": 1, "command", "date", "machine": {…}, "versions": {…}, "cases": [{"case": {…}, "rungs":
     {name: {"what", "status": "timed" or "wrong", "reason", "error", "mode", "ms": {median, q1, q3, n}, "tflops",
             "metrics": {…} or null, "ncu": why there are none, or null}}}]}
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import warpattn as wa
from bench import correct
from bench.cases import Case, find
from bench.ladder.counters import call_once, counters
from bench.ladder.rungs import RUNGS
from bench.measure import inputs, record, timing
from bench.measure.arguments import positive, status
from bench.measure.record import save

CASES = ("d128-4x4k-full", "d128-4x4k-causal", "d128-1x16k-full", "d128-1x16k-causal")
SHIPPED = "shipped"
NAMES = (*RUNGS, SHIPPED)
LIMIT = 1e-2  # relative error of 128 rows of a head between two results that are each rounded to bfloat16


def prepare(name: str, case: Case, qkv: inputs.QKV) -> Callable[[], torch.Tensor]:
    """A call of one rung, or of the shipped kernel."""
    if name == SHIPPED:
        mask = wa.Causal() if case.causal else None
        return lambda: wa.attention(*qkv, mask=mask)
    return RUNGS[name].prepare(*qkv, case.causal)


def checked(out: torch.Tensor, shipped: torch.Tensor) -> dict[str, Any]:
    """Error of a rung and whether it may be timed."""
    error = correct.error(out, shipped.float()).block
    result = {"status": "timed", "reason": None, "error": error}
    if not error <= LIMIT:  # also refuses NaN
        reason = f"relative error of a block of 128 rows is {error:.3g} against the shipped kernel, allowed {LIMIT}"
        result |= {"status": "wrong", "reason": reason}
    return result


def run_case(case: Case, rounds: int) -> dict[str, Any]:
    """Checks and times every rung on one case."""
    qkv = inputs.make(case, inputs.default_device(), 0)
    calls = {name: prepare(name, case, qkv) for name in NAMES}
    shipped = calls[SHIPPED]()
    rungs = {name: {"what": what(name)} | checked(call(), shipped) for name, call in calls.items()}
    right = [name for name in NAMES if rungs[name]["status"] == "timed"]
    samples = {name: timing.sample([calls[name]], qkv[0].device) for name in right}
    for name, taken in timing.interleave(samples, rounds, 0).items():
        summary = timing.Summary.of(taken)
        rungs[name] |= {"mode": samples[name].mode, "ms": summary.asdict(), "tflops": case.tflops(summary.median)}
    return {"case": case.asdict(), "rungs": rungs}


def what(name: str) -> str:
    """A rung in words."""
    return "the shipped kernel" if name == SHIPPED else RUNGS[name].what


def add_counters(entries: Sequence[dict[str, Any]]) -> None:
    """The hardware counters of every rung that was timed."""
    for name in NAMES:
        for entry, found in zip(entries, counters(name, [entry["case"]["name"] for entry in entries]), strict=True):
            if entry["rungs"][name]["status"] == "timed":
                entry["rungs"][name] |= found


def table(entries: Sequence[dict[str, Any]]) -> str:
    """What was measured, as Markdown."""
    lines = ["| case | rung | ms | TFLOP/s | k cycles | tensor pipe |", "|---|---|---|---|---|---|"]
    for entry in entries:
        for name, rung in entry["rungs"].items():
            if rung["status"] != "timed":
                lines.append(f"| {entry['case']['name']} | {name} | {rung['reason']} | | | |")
                continue
            metrics = rung.get("metrics") or {}
            cycles, active = (metrics.get(key) for key in ("cycles", "tensor_percent"))
            last = (f"{cycles / 1000:.0f}" if cycles else "–", f"{active:.0f}%" if active else "–")
            cells = (entry["case"]["name"], name, f"{rung['ms']['median']:.3f}", f"{rung['tflops']:.0f}", *last)
            lines.append("| " + " | ".join(cells) + " |")
    reasons = {rung["ncu"] for entry in entries for rung in entry["rungs"].values() if rung.get("ncu")}
    return "\n".join([*lines, *sorted(reasons)])


def main(argv: Sequence[str] | None = None) -> int:
    """Times all rungs on all cases, then profiles them; 1 if a rung was wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m bench.ladder", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="record to write")
    parser.add_argument("--rounds", type=positive, default=20, help="recorded rounds per case")
    parser.add_argument("--child", choices=NAMES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("the ladder is of Hopper kernels: no such GPU is there")
    if args.child:
        call_once(lambda case: prepare(args.child, case, inputs.make(case, inputs.default_device(), 0)), CASES)
        return 0
    started = record.start("bench.ladder", argv, {"rounds": args.rounds})
    found = {key: started[key] for key in ("schema", "command", "date", "machine", "versions", "settings", "cases")}
    for name in CASES:
        found["cases"].append(run_case(find(name), args.rounds))
        save(found, args.json)
        torch.cuda.empty_cache()
    add_counters(found["cases"])
    save(found, args.json)
    print(table(found["cases"]), flush=True)
    return int(any(rung["status"] == "wrong" for entry in found["cases"] for rung in entry["rungs"].values()))


if __name__ == "__main__":
    sys.exit(status(main))
