"""What one call costs the host: warpattn.attention against torch's cuDNN SDPA, in one process, on a tiny problem.
`python -m bench.host` prints both, a step of a `DecodePlan`, `append_paged`, and what the latter two allocate.

The problem is so small that the GPU is done before the next call arrives, and we wait for the GPU only after a batch
of calls, so that the clock sees the Python, the planning and the launch, and neither the kernel nor a full queue.
Batches of both take turns in shuffled order; the ratio is taken per round.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import warpattn as wa
from bench.cases import Case
from bench.decode import cases as decode_cases
from bench.measure import inputs
from bench.measure.arguments import status
from bench.measure.timing import Summary, paired_ratio
from bench.peers import OWN, PEERS, first_line

TINY = Case("host-tiny", 1, 128, 128, 2, 2, 128, 128, causal=True)
BATCH = 200  # calls between two waits; the driver's queue holds about 1000 launches
ROUNDS = 60


def measure(seed: int = 0) -> dict[str, Any]:
    """Microseconds per call of each and their ratio; `{"reason": …}` where it cannot be measured."""
    for name in (OWN, "cudnn"):
        reason = PEERS[name].available()
        if reason is not None or not torch.cuda.is_available():
            return {"reason": f"{name}: {reason or 'torch sees no CUDA GPU'}"}
    q, k, v = inputs.make(TINY, inputs.default_device(), seed)
    views = [t.transpose(1, 2) for t in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls: dict[str, Callable[[], object]] = {
        OWN: PEERS[OWN].prepare(TINY, q, k, v),
        "cudnn": lambda: sdpa(*views, is_causal=True),
    }
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # outside of what is timed: its users choose once
            times = alternate(calls, time.perf_counter, torch.cuda.synchronize, seed=seed)
    except Exception as error:
        return {"reason": first_line(error)}
    return summarise(times)


def measure_backward(seed: int = 0) -> dict[str, Any]:
    """As `measure`, of `torch.autograd.grad` through one call."""
    q, k, v = (t.requires_grad_() for t in inputs.make(TINY, inputs.default_device(), seed))
    views = [t.transpose(1, 2) for t in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        theirs = torch.nn.functional.scaled_dot_product_attention(*views, is_causal=True).transpose(1, 2)
    results = {OWN: cast("torch.Tensor", wa.attention(q, k, v, mask=wa.Causal())), "cudnn": theirs}
    dout = torch.ones_like(q)
    calls = {
        name: partial(torch.autograd.grad, out, (q, k, v), dout, retain_graph=True) for name, out in results.items()
    }
    return summarise(alternate(calls, time.perf_counter, torch.cuda.synchronize, seed=seed, rounds=30))


def planned_step(seed: int = 0) -> dict[str, Any]:
    """Microseconds of a step of a `DecodePlan` through pages and of `append_paged`, and allocations of a batch of them;
    `{"reason": …}` without a GPU."""
    if not torch.cuda.is_available():
        return {"reason": "torch sees no CUDA GPU"}
    case = decode_cases.Case("host-step", (130, 70), 8, 2, 16)
    x = decode_cases.make(case, inputs.default_device(), seed)
    kv = wa.PagedKV(x.k, x.v, cast("torch.Tensor", x.table), x.lengths)
    plan = wa.DecodePlan(x.q, kv, mask=wa.Causal())
    settled = wa.DecodePlan(x.q, kv, mask=wa.Causal(), kv_ready_before_dependency=True)
    k_new, v_new = (x.q[:, :, first : first + case.heads_kv].contiguous() for first in (0, case.heads_kv))
    calls: dict[str, Callable[[], object]] = {
        "plan": lambda: plan(x.q, kv),
        "plan, settled cache": lambda: settled(x.q, kv),
        "append_paged": lambda: wa.append_paged(x.k, x.v, kv.block_table, x.lengths, k_new, v_new),
    }
    times = alternate(calls, time.perf_counter, torch.cuda.synchronize, seed=seed)
    return {
        name: {"us": Summary.of([1e6 * value for value in times[name]]).median, "allocations": allocations(call)}
        for name, call in calls.items()
    }


def allocations(call: Callable[[], object]) -> int:
    """Blocks of GPU memory that a batch of calls asks torch's allocator for."""
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(BATCH):
        call()
    return torch.cuda.memory_stats()["allocation.all.allocated"] - before


def alternate(
    calls: dict[str, Callable[[], object]],
    clock: Callable[[], float],
    wait: Callable[[], object],
    *,
    rounds: int = ROUNDS,
    batch: int = BATCH,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Seconds per call of each, one value per round; the first two rounds warm up and are dropped."""
    order, shuffle = list(calls), random.Random(seed).shuffle
    times: dict[str, list[float]] = {name: [] for name in calls}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds + 2):
            shuffle(order)
            for name in order:
                call = calls[name]
                wait()
                begin = clock()
                for _ in range(batch):
                    call()
                times[name].append((clock() - begin) / batch)
        wait()
    finally:
        if collecting:
            gc.enable()
    return {name: values[2:] for name, values in times.items()}


def summarise(times: dict[str, list[float]]) -> dict[str, Any]:
    """The record's `host` section: medians in µs, the paired ratio and both summaries."""
    own, cudnn = (Summary.of([1e6 * value for value in times[name]]) for name in (OWN, "cudnn"))
    ratio = paired_ratio(times[OWN], times["cudnn"])
    return {
        "warpattn_us": own.median,
        "cudnn_us": cudnn.median,
        "ratio": ratio.median,
        "summaries": {OWN: own.asdict(), "cudnn": cudnn.asdict(), "ratio": ratio.asdict()},
    }


def main() -> None:
    """Print microseconds of the host per call."""
    dense, planned = measure(), planned_step()
    for found in (dense, planned):
        if "reason" in found:
            raise SystemExit(f"nothing is measured: {found['reason']}")
    rows = [("attention, dense", dense["warpattn_us"], ""), ("cuDNN through SDPA", dense["cudnn_us"], "")]
    rows += [(name, row["us"], f"{row['allocations']} allocations") for name, row in planned.items()]
    for name, us, note in rows:
        print(f"{name:24}{us:8.1f} us a call  {note}".rstrip())


if __name__ == "__main__":
    sys.exit(status(main))
