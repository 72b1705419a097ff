"""Each synchronising operation of the Blackwell backward is needed, or stands here with the reason why it can go."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.full.test_sm90_backward_knockout import (
    FIRST,
    ONCE,
    REPLACED,
    SHORT,
    WINDOW,
    changed,
    taken_out,
    without_use,
)
from tests.sim.backward import Case, captured_launch
from warpattn.masks import Causal
from warpattn.scores import ALiBi, SoftCap
from warpattn.sim import loosen_waits

pytestmark = pytest.mark.full

DELTA = "delta comes with dO, of which dP was made, that is waited for next"
WEIGHED = "derive has waited for P before it says that it has read S, which is waited for next"
PASSED = "the turn was passed before, which waits for all additions"
LAST = "the fence behind the last values that are made finite covers it"
IN_ORDER = "it keeps tensor-memory accesses on their side of a wait or a barrier: in order anyway here"
FENCE = "tcgen05.fence::after_thread_sync"
# Operation, what stands in one of its lines of Python, why it can go.
REDUNDANT = [
    REPLACED,
    ("ttng.fence_async_shared", "# TMA sees the new barriers", "not modelled"),
    (FENCE, "", IN_ORDER),
    ("ttng.wait_barrier", "load_queries(ctx, slot_of(visits, STAGES), visit)", FIRST),
    ("ttng.wait_barrier", "ctx.rings.k.producer_acquire(k_state)", ONCE),
    ("ttng.wait_barrier", "rings.do.consumer_wait(state)  # delta", DELTA),
]
SLOPED = [("ttng.wait_barrier", "await_signal(bars.p, tile.phase)  # so S has been read", WEIGHED)]
FIXED = [
    ("ttng.async_tma_store_wait", "tma.store_wait(0)\n", PASSED),  # of the first part of dQ
    ("ttng.async_tma_store_wait", "tma.store_wait(0)  # shared memory must outlive the last copy's reads", PASSED),
]
PLAIN = Case(300, 340, mask=WINDOW, arch="sm100")
IN_TURNS = Case(400, 500, mask=SHORT, deterministic=True, heads=2, arch="sm100")
# A case, why operations can go, and how many of those that are modelled may.
CASES: dict[str, tuple[Case, list[tuple[str, ...]], int]] = {
    "64": (PLAIN, [], 4),
    "128": (replace(PLAIN, dim=128), [], 4),
    "fixed order": (IN_TURNS, FIXED, 6),
    "ragged": (replace(PLAIN, lengths=((100, 240), (300, 300))), [], 4),
    "score": (replace(PLAIN, score=SoftCap(20.0)), SLOPED, 6),
    "256": (replace(PLAIN, dim=256), [], 4),
    "256 fixed order": (replace(IN_TURNS, dim=256), FIXED, 6),
    "256 score": (replace(PLAIN, dim=256, score=SoftCap(20.0)), SLOPED, 6),
}


@pytest.mark.parametrize("name", CASES)
def test_the_backward_needs_its_synchronisation(name: str) -> None:
    case, more, spare = CASES[name]
    reasons = [*REDUNDANT, *more]
    results = changed(case, "sm100.backward", reasons)
    assert not without_use(reasons, results)
    modelled = [found for found in results if found.op not in {FENCE, REPLACED[0]}]
    assert len(modelled) > 55 and sum(not found.noticed for found in modelled) <= spare


@pytest.mark.parametrize(("dim", "waits"), [(64, 6), (256, 9)])  # above head dim 128 dQ has four parts
def test_looser_waits_are_missed_in_a_fixed_order(dim: int, waits: int) -> None:
    """test_loosened_waits.py does it to additions in any order."""
    results = changed(replace(IN_TURNS, dim=dim), "sm100.backward", FIXED, loosen_waits)
    assert not without_use(FIXED, results)
    assert (len(results), sum(not found.noticed for found in results)) == (3 * waits, 3 * len(FIXED))


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_the_kernel_for_captured_tensors_needs_its_synchronisation(arch: str) -> None:
    case = Case(100, 200, mask=Causal(), score=ALiBi(torch.tensor([0.3])), arch=arch)
    covered = [("ttng.fence_async_shared", text, LAST) for text in ("# products see the copies", "(ctx.k_smem)")]
    fences = [(f"tcgen05.fence::{side}_thread_sync", "", IN_ORDER) for side in ("before", "after")]
    reasons = [REPLACED, *covered, *(fences if arch == "sm100" else [])]
    results = taken_out(captured_launch(case), reasons)
    assert not without_use(reasons, results)
    modelled = [found for found in results if "_thread_sync" not in found.op and found.op != REPLACED[0]]
    missed = sum(not found.noticed for found in modelled)
    assert (len(modelled) - missed, missed) == ({"sm90": 4, "sm100": 6}[arch], 2 * len(covered))  # in two loops
