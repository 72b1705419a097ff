"""Times gradients: `python -m bench.backward --peers warpattn,deterministic,cudnn,fa4,flex --host --json FILE`.

By default every required shape; our launches against the backward of torch's cuDNN SDPA, flash-attn-4's and
FlexAttention's, in turn in every round. Each peer's gradients are compared with fp32 before it is timed, on the first
sequence and key head and on the last. TFLOP/s count 10·B·H·Sq·Sk·D, half if causal.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.backward.cases import KINDS as CASE_KINDS
from bench.backward.cases import Case, cases, errors, make
from bench.backward.compiling import compile_all
from bench.backward.peers import PEERS, Gradient
from bench.backward.verdicts import verdicts
from bench.measure import record, timing
from bench.measure.arguments import positive, require_card, status
from bench.peers.adapter import first_line

ERROR = 2e-2  # of the largest gradient, in bf16
SAMPLE_MS = 4.0
DIMS = "128,64,256,192/128,96"
KINDS = {128: "full,causal,window,groups,documents,equal,alibi,both", 64: "full,causal,window,groups",
         256: "full,causal,soft-cap"}  # fmt: skip


class EagerSample:
    """Several calls between two events: a backward takes far longer than its launch on the host."""

    mode = "eager"
    note = None

    def __init__(self, call: Gradient) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._call, self.calls = call, 3
        for _ in range(2):
            self.start()
            estimate = self.milliseconds()
        self.calls = max(2, round(SAMPLE_MS / max(estimate, 1e-3)))

    def start(self) -> None:
        """Enqueue the sample between its two events."""
        self._begin.record()
        for _ in range(self.calls):
            self._call()
        self._end.record()

    def milliseconds(self) -> float:
        """Wait for the sample."""
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / self.calls


def check(name: str, case: Case, x: Any) -> tuple[dict[str, Any], timing.Sample | None]:
    """The result of a peer's gradients so far, and a sample of them if they are right."""
    try:
        call = PEERS[name](case, x)
        wrong = errors(case, x, call())
        fine = all(e <= ERROR for e in wrong)
        return {"status": "timed" if fine else "wrong", "error": wrong}, EagerSample(call) if fine else None
    except Exception as error:
        return {"status": "failed", "reason": first_line(error)}, None


def run_case(case: Case, peers: Sequence[str], rounds: int) -> dict[str, Any]:
    """Check and time every peer; one entry of the record."""
    x = make(case, "cuda")
    results: dict[str, dict[str, Any]] = {}
    samples: dict[str, timing.Sample] = {}
    for name in peers:
        results[name], found = check(name, case, x)
        if found is not None:
            samples[name] = found
    times = timing.interleave(samples, rounds, 0, warm_ms=100.0)
    for name, taken in times.items():
        ms = timing.Summary.of(taken)
        results[name] |= {"ms": ms.asdict(), "tflops": case.flops() / ms.median / 1e9}
        if name != "warpattn" and "warpattn" in times:
            results[name]["speed"] = timing.paired_ratio(taken, times["warpattn"]).asdict()
    print(line(case, results), flush=True)
    return {"group": "backward", "case": asdict(case) | {"name": case.name}, "flops": case.flops(), "results": results}


def line(case: Case, results: dict[str, dict[str, Any]]) -> str:
    """One line of the table."""
    parts = [f"{case.name:34}"]
    for name, result in results.items():
        if result["status"] != "timed":
            parts.append(f"{name} {result['status']} {result.get('reason', result.get('error'))}"[:100])
            continue
        speed = f" ({result['speed']['median']:.3f})" if "speed" in result else ""
        took = f"{result['ms']['median']:.3f} ms {result['tflops']:.0f}"
        parts.append(f"{name} {took}{speed} err {max(result['error']):.1e}")
    return " | ".join(parts)


def listed_cases(dims: str, masks: str, only: str) -> list[Case]:
    """Those of the options; without masks each head dim has its required ones."""
    found: list[Case] = []
    for text in dims.split(","):
        dim, _, dim_v = text.partition("/")
        kinds = masks or KINDS.get(int(dim), "full,causal")
        found += cases([(int(dim), int(dim_v) if dim_v else None)], kinds.split(","), only)
    return found


def chosen(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[list[Case], list[str]]:
    """The cases and peers of the options; ends with one sentence if there are none, or no card."""
    peers = args.peers.split(",")
    if unknown := [name for name in peers if name not in PEERS]:
        parser.error(f"unknown peers: {', '.join(unknown)} (known: {', '.join(PEERS)})")
    if unknown := [name for name in args.masks.split(",") if name not in ("", *CASE_KINDS)]:
        parser.error(f"unknown masks: {', '.join(unknown)} (known: {', '.join(CASE_KINDS)})")
    if not all(part.isdecimal() and int(part) for text in args.dims.split(",") for part in text.split("/", 1)):
        parser.error(f"dims are {args.dims!r}; write head dims with commas between, e.g. {DIMS}")
    listed = listed_cases(args.dims, args.masks, args.only)
    if not listed:
        parser.error(f"no case has {args.only!r} in its name")
    require_card(parser, "gradients")
    return listed, peers


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a gradient of ours was wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m bench.backward", description=__doc__)
    parser.add_argument("--dims", default=DIMS)
    parser.add_argument("--masks", default="", help="kinds of cases, see backward_cases.KINDS")
    parser.add_argument("--only", default="", help="parts of names, with commas between")
    parser.add_argument("--peers", default="warpattn,deterministic,cudnn")
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--host", action="store_true", help="also the host side of a call")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # as are our own kernels' and Inductor's
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(Path(tempfile.gettempdir()) / "flash-attn-4"))
    listed, peers = chosen(parser, args)
    compile_all(listed, peers)
    found = record.start("bench.backward", argv, {"rounds": args.rounds})
    for case in listed:
        found["cases"].append(run_case(case, peers, args.rounds))
        _keep(found, args.json)
    if args.host:
        from bench.host import measure_backward

        found["host"] = measure_backward()
        print(f"host side of a backward call: {found['host']}")
        _keep(found, args.json)
    for verdict in found["verdicts"]:
        if not verdict["met"]:
            print(f"missed: {verdict['case']}: {verdict['requirement']}, measured {verdict['measured']:.3f}")
    return int(any(entry["results"].get("warpattn", {}).get("status") != "timed" for entry in found["cases"]))


def _keep(found: record.Record, path: Path | None) -> None:
    """Judge and write what there is so far: an interrupted run keeps its numbers."""
    found["verdicts"] = verdicts(found)
    record.save(found, path)


if __name__ == "__main__":
    sys.exit(status(main))
