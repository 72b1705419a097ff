"""What knock-out tests of whole kernels share: an operation that is taken out has to be missed, or to be reviewed."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from typing import Any

from warpattn.sim import KnockOut, Report, knock_out

NOTICED_BY = ("lazy", "eager")
LATER = "outside of the first warpgroup"
FRESH = "the first lap over a ring never waits"
TURNS = "a warpgroup's turn comes after the one before it has waited for the same tile"
SM90_PREFILL = [  # the dense kernel and those of lengths have these roles in common
    ("ttng.fence_async_shared", "# TMA sees the new barriers", "not modelled"),
    ("ttng.wait_barrier", ".consumer_wait(", TURNS, LATER),
    ("ttng.wait_barrier", "wait_full(", TURNS, LATER),
    ("ttng.wait_barrier", "q_state = load_q(ctx, producer_state(", FRESH),
    ("ttng.wait_barrier", "k_state = load_first_keys(ctx, k_state, tile, span)", FRESH),
]

AFTER, BEFORE = (f"tcgen05.fence::{side}_thread_sync" for side in ("after", "before"))
SHARED = "what it waits for is in shared memory, and a fence follows before any access of tensor memory"
UNTOUCHED = "nothing was done to tensor memory since the last signal"
SM100_FENCES = [  # of Blackwell's prefill kernels
    (AFTER, "await_signal(ctx.bars.q1.index(0), 0)", SHARED),
    (AFTER, "await_signal(ctx.bars.c_producer.index(wg)", SHARED),
    (AFTER, "await_signal(ctx.bars.c_consumer.index(wg)", SHARED),
    (AFTER, "await_signal(ctx.bars.o_producer.index(wg), (n - 1) & 1)", "the wait before knows of it, and has a fence"),
]

ALONE = ("ttng.wait_barrier", "rows.load(ctx, arriving, state, left.tile", "one warpgroup uses its slots one at a time")
WIDENED = ("ttng.fence_async_shared", "queries = multiplied_queries(", "that of the keys follows before any product")


def reviewed(redundant: Sequence[tuple[str, ...]]) -> Callable[[KnockOut], str | None]:
    """Finds why an operation can go, in rows of: operation, what stands in one of its lines of Python, why; and behind
    that `LATER` where it can go there only."""

    def reason(found: KnockOut) -> str | None:
        lines = [linecache.getline(*frame) for frame in found.frames]
        for op, text, why, *where in redundant:
            if found.op == op and any(text in line for line in lines) and not (where and found.region == "default"):
                return why
        return None

    return reason


def first_pass(op: Any) -> bool:
    """Not of tiles that are computed anew, which is of no use without hidden values that are not finite:
    tests/full/test_sm90_knockout.py takes those operations out."""
    return not any(frame.file.endswith(("/nonfinite.py", "/recompute.py")) for frame in op.frames)


def knocked_out(
    kernel: Any,
    once: Callable[[Any, str], Report],
    reason: Callable[[KnockOut], str | None],
    schedules: Sequence[str] = NOTICED_BY,
    change: Callable[..., list[KnockOut]] = knock_out,
) -> list[KnockOut]:
    """Take every synchronising operation out of a kernel, one after the other, or loosen every wait: `once(module,
    schedule)` reports each change under one of the schedules, or there is a reason why not. Returns all changes."""

    def run(module: Any) -> Report:
        report = Report()
        for schedule in schedules:
            report = once(module, schedule)
            if not report.clean:
                break
        return report

    results = change(kernel, run)
    unexplained = [str(found) for found in results if not found.noticed and reason(found) is None]
    assert not unexplained, "\n".join(unexplained)
    return results
