"""The cost model's predictions beside measurements: `python -m bench.model`, which needs no GPU.

`--set held_out --write` writes the predictions of a set into `predicted.json`, to be committed before that set is
measured (`python -m bench.model.measure`). Without it predictions are made now and compared with the record. The first
lines say how fast the simulator is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import torch

from bench.measure.arguments import status
from bench.measure.record import save
from bench.model import problems
from bench.model.predict import predict
from bench.model.problems import Problem
from bench.model.small import simulated_head

WRITTEN = Path(__file__).with_name("predicted.json")
RECORDS = Path(__file__).parents[1] / "results" / "h200"
MEASURED = ("2026-11-22-model.json", "2026-11-22-model-held-out.json")
CLOSE = 0.25  # a prediction further off than this says that the model is not calibrated
SETS = {"recorded": problems.RECORDED, "calibrated": problems.CALIBRATED, "held_out": problems.HELD_OUT}
SPEED_LIMIT_S = 0.3
ROUNDS = 5


class Errors(NamedTuple):
    """Of several predictions: how many, the share within CLOSE, and the median of |predicted / measured - 1|."""

    count: int
    close: float
    median: float


def measured() -> dict[str, float]:
    """SM cycles of each problem, all of its launches together, by ncu."""
    rows = [row for name in MEASURED for row in json.loads((RECORDS / name).read_text())["ncu"]]
    return {row["problem"]: row["metrics"]["sm__cycles_elapsed.max"] for row in rows}


def written() -> dict[str, float]:
    """The predictions that were committed before their problems were measured."""
    rows = json.loads(WRITTEN.read_text())["predictions"]
    return {row["problem"]: row["cycles"] for row in rows}


def errors(ratios: Iterable[float]) -> Errors:
    """Of predictions, each divided by what was measured."""
    off = [abs(ratio - 1) for ratio in ratios]
    return Errors(len(off), sum(each <= CLOSE for each in off) / len(off), statistics.median(off))


def write(chosen: Sequence[Problem]) -> None:
    """Write the predictions of problems."""
    rows = []
    for problem in chosen:
        found = predict(problem)
        rows.append({"problem": problem.name, "cycles": round(found.cycles), "bound": found.bound})
        print(rows[-1], flush=True)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    save({"date": date, "predictions": rows}, WRITTEN)


def compare(name: str, chosen: Sequence[Problem]) -> None:
    """Print predictions of today's model beside measurements."""
    found, ratios = measured(), []
    print(f"\n{name:52} {'predicted':>11} {'measured':>11} ratio  busiest")
    for problem in chosen:
        predicted, cycles = predict(problem), found.get(problem.name)
        ratio = f"{predicted.cycles / cycles:5.2f}" if cycles else "    –"
        busiest = f"{predicted.bound} {predicted.share:.0%}"
        print(f"{problem.name:52} {predicted.cycles:11.0f} {cycles or 0:11.0f} {ratio}  {busiest}", flush=True)
        ratios += [predicted.cycles / cycles] if cycles else []
    if ratios:
        off = errors(ratios)
        print(f"{off.count} problems: {off.close:.0%} within {CLOSE:.0%}, median error {off.median:.1%}")


def speed(seq: int) -> float:
    """Seconds to simulate one head of attention, compiled before: the best of a few."""
    simulated_head(seq)
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        simulated_head(seq)
        times.append(time.perf_counter() - started)
    return min(times)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the simulator's speed and the table of errors, or write predictions."""
    parser = argparse.ArgumentParser(prog="python -m bench.model", description=__doc__)
    parser.add_argument("--set", action="append", choices=list(SETS), help="repeatable; all without it")
    parser.add_argument("--only", default="", help="problems whose name has this text")
    parser.add_argument("--write", action="store_true", help="predictions into predicted.json")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    chosen = {name: [p for p in SETS[name] if args.only in p.name] for name in args.set or SETS}
    if args.write:
        write([problem for group in chosen.values() for problem in group])
        return 0
    for seq in (1024, 2048):
        print(f"one head, S {seq}, D 128, causal: {speed(seq):.3f} s" + (f" (limit {SPEED_LIMIT_S} s)" * (seq == 1024)))
    for name, group in chosen.items():
        compare(name, group)
    return 0


if __name__ == "__main__":
    sys.exit(status(main))
