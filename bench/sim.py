"""The simulator itself: how fast it runs, and what its cost model predicts against what an H200 took.

`python -m bench.sim` needs no GPU. Predictions: one CTA is simulated on a few small problems with the kernel of a case;
their differences give the cycles to start, to cross from tile to tile, and per key tile, visible or masked. The tiles
of the real case, in the kernel's order, then go to whichever SM is free first. Measured cycles are those of bench.ncu.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.cases import Case, find
from warpattn.kernels.sm90.prefill.config import SM90Config, arrange
from warpattn.kernels.sm90.prefill.launch import list_launches
from warpattn.masks import Causal, Full
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.operands import Operands
from warpattn.runtime import simulate as simulated
from warpattn.runtime.plan import Plan
from warpattn.runtime.plan import plan as planned
from warpattn.sequences import Dense
from warpattn.sim import Report

MEASURED = Path(__file__).parent / "results" / "h200" / "2026-11-21-ncu.json"
SPEED_LIMIT_S = 0.3
CLOSE = 0.25  # a prediction further off than this says that the model is not calibrated
ROUNDS = 5


@dataclass(frozen=True)
class Costs:
    """Cycles of one CTA: once, per output tile, per key tile without and with the mask."""

    start: float
    crossing: float
    plain: float
    masked: float


def simulate(
    rows: int, keys: int, case: Case, causal: bool = False, timing: bool = True, config: SM90Config | None = None
) -> Report:
    """One head of a case with other lengths, in the simulator, as one CTA for times; `config` or the
    planner's."""
    dtype = getattr(torch, case.dtype)
    q = torch.randn(1, rows, 1, case.dim).to(dtype)
    k, v = (torch.randn(1, keys, 1, dim).to(dtype) for dim in (case.dim, case.dim_v))
    mask = Causal() if causal else Full()
    ready = validate(Call(q, k, v, Dense(), mask, backend="simulate:sm90"))
    out = torch.empty(1, rows, 1, case.dim_v, dtype=dtype)
    options = simulated.Options(timing=timing, programs=1 if timing else simulated.PROGRAMS)
    choice = None if config is None else arrange(ready.problem, ARCHS["sm90"], config, "given")
    launch = list_launches(ready, Operands(q, k, v, out, None, None), choice)[0]
    report = simulated.run_launch(launch, options)
    if not report.clean:
        raise RuntimeError(str(report))
    return report


def costs(case: Case, plan: Plan) -> Costs:
    """The cycles of one CTA with a plan's configuration, from differences of small runs."""
    m, n = plan.choice.config.block_m, plan.choice.config.block_n

    def cycles(tiles: int, keys: int, causal: bool = False) -> float:
        report = simulate(m * tiles, n * keys, case, causal, config=plan.choice.config)
        assert report.timing is not None
        return report.timing.cycles

    short, more, longer = cycles(2, 8), cycles(3, 8), cycles(2, 16)
    plain = (longer - short) / 16
    crossing = more - short - 8 * plain
    start = short - 2 * crossing - 16 * plain
    if not case.causal:
        return Costs(start, crossing, plain, plain)
    tiles = 4
    parts = [key_tiles(row * m, m, n, tiles * m) for row in range(tiles)]
    whole, hidden = (sum(part[i] for part in parts) for i in (0, 1))
    masked = (cycles(tiles, tiles * m // n, True) - start - tiles * crossing - whole * plain) / hidden
    return Costs(start, crossing, plain, masked)


def key_tiles(row: int, block_m: int, block_n: int, seq: int) -> tuple[int, int]:
    """(visible as a whole, in need of the mask): key tiles of the query tile at `row` of a square causal problem."""
    whole = (row + 1) // block_n
    return whole, -(-min(row + block_m, seq) // block_n) - whole


def tiles_of(case: Case, plan: Plan) -> Iterator[tuple[int, int]]:
    """(plain, masked) key tiles of every output tile, in the order in which the kernel's scheduler hands them out."""
    m, n = plan.choice.config.block_m, plan.choice.config.block_n
    for first in range(0, plan.choice.order.heads, plan.choice.order.section):
        heads = min(plan.choice.order.section, plan.choice.order.heads - first)
        for tile in reversed(range(plan.choice.order.m_tiles)):
            length = key_tiles(tile * m, m, n, case.seq_q) if case.causal else (-(-case.seq_k // n), 0)
            yield from [length] * heads


def predict(case: Case) -> float:
    """SM cycles of a whole case on all SMs, by the model."""
    q, k, v = (torch.empty(case.batch, s, h, d, dtype=getattr(torch, case.dtype)) for s, h, d in (
        (case.seq_q, case.heads_q, case.dim), (case.seq_k, case.heads_kv, case.dim),
        (case.seq_k, case.heads_kv, case.dim_v)))  # fmt: skip
    mask = Causal() if case.causal else Full()
    plan = planned(validate(Call(q, k, v, Dense(), mask, backend="reference")).problem)
    cost = costs(case, plan)
    free = [cost.start] * min(ARCHS["sm90"].processors, plan.choice.grid[0])
    for plain, masked in tiles_of(case, plan):
        heapq.heapreplace(free, free[0] + cost.crossing + plain * cost.plain + masked * cost.masked)
    return max(free)


def measured() -> dict[str, float]:
    """SM cycles of warpattn's kernel per case without a window, as bench.ncu recorded them."""
    rows = json.loads(MEASURED.read_text())["ncu"]
    own = {row["case"]: row["metrics"]["sm__cycles_elapsed.max"] for row in rows if row["peer"] == "warpattn"}
    return {name: cycles for name, cycles in own.items() if find(name).window is None}


def speed(seq: int = 1024) -> float:
    """Seconds to simulate one head of attention, compiled before: the best of a few."""
    case = find("d128-16x1k-causal")
    simulate(seq, seq, case, causal=True, timing=False)
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        simulate(seq, seq, case, causal=True, timing=False)
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    """Print the speed of the simulator, and predictions beside measurements."""
    torch.manual_seed(0)
    for seq in (1024, 2048):
        print(f"one head, S {seq}, D 128, causal: {speed(seq):.3f} s" + (f" (limit {SPEED_LIMIT_S} s)" * (seq == 1024)))
    close, rows = 0, measured()
    print(f"\n{'case':24} {'predicted':>11} {'measured':>11}  ratio")
    for name, cycles in rows.items():
        ratio = (expected := predict(find(name))) / cycles
        close += abs(ratio - 1) <= CLOSE
        note = "" if abs(ratio - 1) <= CLOSE else "  uncalibrated"
        print(f"{name:24} {expected:11.0f} {cycles:11.0f}  {ratio:.2f}{note}")
    print(f"{close} of {len(rows)} within {CLOSE:.0%} ({MEASURED.name}, SM cycles by ncu)")


if __name__ == "__main__":
    main()
