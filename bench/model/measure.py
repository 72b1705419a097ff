"""SM cycles of the problems on a card, by Nsight Compute: `python -m bench.model.measure --set held_out --json FILE`.

One process compiles the kernels of all problems, in parallel and without the card; a second one under `ncu` calls each
of them three times, the last time counted. Times are medians of CUDA graphs in turn, with `--rounds`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import warpattn as wa
from bench import ncu
from bench.measure import record, timing
from bench.measure.arguments import status
from bench.measure.workers import compiled
from bench.model import problems
from bench.model.problems import Problem
from bench.model.small import checked, mask_of
from bench.peers.adapter import first_line
from warpattn.problem.backward import CheckedBackward, Gradients, fitted_gradients
from warpattn.problem.launch import Launch
from warpattn.problem.operands import Operands, fitted
from warpattn.runtime import compiler, kernel_cache
from warpattn.runtime.bound_launches import BoundLaunches
from warpattn.runtime.launches import list_launches
from warpattn.runtime.training.plan import list_backward_launches
from warpattn.sequences import Dense

SETS = ("recorded", "calibrated", "held_out")
LIMIT_S = 300


def launches(problem: Problem, tensors: Sequence[torch.Tensor], out: torch.Tensor, lse: Any) -> tuple[Launch, ...]:
    """Of a problem on tensors; a backward's has `tensors` q, k, v and dout."""
    ready, _ = checked(problem, "cuda" if out.is_cuda else "cpu")
    q, k, v = tensors[:3]
    if not problem.backward:
        return list_launches(ready, fitted(Operands(q, k, v, out, None, None)), Dense())
    fresh = [torch.empty_like(x) for x in (q, k, v)]
    made = fitted_gradients(Gradients(q, k, v, out, lse, tensors[3], None, None, *fresh, None))
    return list_backward_launches(CheckedBackward.of(ready, False), made, Dense())


def compile_one(problem: Problem) -> None:
    """Fill the disk cache with the kernels of a problem, without a card; a backward needs its forward's, too."""
    ready, (q, k, v) = checked(problem)
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1]) if problem.backward else None
    needed = list_launches(ready, fitted(Operands(q, k, v, out, lse, None)), Dense())
    if problem.backward:
        needed += launches(problem, (q, k, v, out), out, lse)
    for launch in needed:
        kernel_cache.find((launch.name, launch.arch, launch.key), partial(compiler.artifact_of, launch))


def call_of(problem: Problem) -> Callable[[], object]:
    """The problem on random tensors of the card."""
    generator = torch.Generator("cuda").manual_seed(0)
    _, empty = checked(problem, "cuda")
    q, k, v = (torch.randn(x.shape, generator=generator, device="cuda", dtype=x.dtype) for x in empty)
    if not problem.backward:
        return lambda: wa.attention(q, k, v, mask=mask_of(problem))
    out, lse = wa.attention(q, k, v, mask=mask_of(problem), return_lse=True)
    dout = torch.randn(out.shape, generator=generator, device="cuda", dtype=out.dtype)
    return BoundLaunches(launches(problem, (q, k, v, dout), out, lse), q.get_device()).launch


def count(names: Sequence[str]) -> list[dict[str, Any]]:
    """Counters of one call of each problem, in a process under ncu."""
    child = [sys.executable, "-m", "bench.model.measure", "--child", *names]
    command = ["ncu", "--csv", "--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all"]
    command += ["--metrics", ",".join(ncu.METRICS), *child]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=LIMIT_S, check=False)
    calls = ncu.split(ncu.parse(done.stdout))
    if len(calls) < len(names):
        print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
    rows = []
    for name, kernels in zip(names, calls, strict=False):
        rows.append({"problem": name, **(ncu.counted(kernels) if kernels else {})})
    return rows


def run_child(names: Sequence[str]) -> None:
    """One counted call of each problem, and the marker after it; two before it are not counted."""
    for name in names:
        call = None
        try:
            call = call_of(problems.find(name))
            call()
            call()
        except Exception as error:  # the other problems are still wanted
            print(f"Error: {name}: {first_line(error)}", flush=True)
        ncu.count(call)


def time(names: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each problem, in turn."""
    samples = {name: timing.sample([call_of(problems.find(name))], torch.device("cuda")) for name in names}
    taken = timing.interleave(samples, rounds, 0)
    return {name: timing.Summary.of(values).asdict() for name, values in taken.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, count, time; write the record."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m bench.model.measure", description=__doc__)
    parser.add_argument("--set", action="append", default=[], choices=SETS, help="repeatable")
    parser.add_argument("--only", default="", help="problems whose name has this text")
    parser.add_argument("--rounds", type=int, default=0, help="of timing by CUDA graphs beside the counters")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        run_child(args.child)
        return 0
    chosen = [p for name in args.set for p in getattr(problems, name.upper()) if args.only in p.name]
    for job in compiled([(compile_one, problem) for problem in chosen]):
        job.result()
    print("compiled", flush=True)
    names = [problem.name for problem in chosen]
    found = record.start("bench.model.measure", argv, {"rounds": args.rounds})
    found["ncu"] = count(names)
    for row in found["ncu"]:
        cycles = row.get("metrics", {}).get("sm__cycles_elapsed.max", 0)
        print(f"{row['problem']:50} {cycles:11.0f} {row.get('metrics')}", flush=True)
    record.save(found, args.json)
    if args.rounds:
        found["times"] = time(names, args.rounds)
        record.save(found, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(status(main))
