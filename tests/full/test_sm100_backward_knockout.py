"""Each synchronising operation of the Blackwell backward is needed, or stands here with the reason why it can go."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.full.test_sm90_backward_knockout import (
    ONCE,
    PASSED,
    REPLACED,
    SHORT,
    WINDOW,
    changed,
    taken_out,
)
from tests.sim.backward import Case, captured_launch
from warpattn.masks import Causal
from warpattn.scores import ALiBi, SoftCap

pytestmark = pytest.mark.full

QUERIES = "Q of this slot, acquired before, was released behind the last product with dO, which delta was read before"
WEIGHED = "derive has waited for P before it says that it has read S"
DELTA = "delta comes with dO, of which dP was made, that is waited for next"
LAST = "the fence behind the last values that are made finite covers it"
IN_ORDER = "it keeps tensor-memory accesses on their side of a wait or a barrier: in order anyway here"
# Operation, what stands in one of its lines of Python, why it can go.
REDUNDANT = [
    REPLACED,
    ("ttng.fence_async_shared", "# TMA sees the new barriers", "not modelled"),
    ("tcgen05.fence::after_thread_sync", "", IN_ORDER),
    ("ttng.wait_barrier", "ctx.rings.k.producer_acquire(key_state)", ONCE),
    ("ttng.wait_barrier", "load_rows(ctx, (ctx.tensors.do, ", QUERIES),
    ("ttng.wait_barrier", "rings.do.consumer_wait(state)  # delta", DELTA),
]
SLOPED = ("ttng.wait_barrier", "await_signal(bars.p, tile.phase)  # S, too, has been read for it", WEIGHED)
FIXED = [("ttng.async_tma_store_wait", "tma.store_wait(0)", PASSED)]
PLAIN = Case(300, 340, mask=WINDOW, arch="sm100")
CASES: dict[str, tuple[Case, list[tuple[str, ...]]]] = {
    "64": (PLAIN, []),
    "128": (replace(PLAIN, dim=128), []),
    "fixed order": (Case(400, 500, mask=SHORT, deterministic=True, heads=2, arch="sm100"), FIXED),
    "ragged": (replace(PLAIN, lengths=((100, 240), (300, 300))), []),
    "score": (replace(PLAIN, score=SoftCap(20.0)), [SLOPED]),
    "256": (replace(PLAIN, dim=256), []),
    "256 fixed order": (Case(400, 500, mask=SHORT, deterministic=True, heads=2, dim=256, arch="sm100"), FIXED),
    "256 score": (replace(PLAIN, dim=256, score=SoftCap(20.0)), [SLOPED]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_backward_needs_its_synchronisation(name: str) -> None:
    case, more = CASES[name]
    results = changed(case, "sm100.backward", [*REDUNDANT, *more])
    modelled = [found for found in results if "after_thread_sync" not in found.op and found.op != REPLACED[0]]
    assert len(modelled) > 45 and sum(found.noticed for found in modelled) >= len(modelled) - 4 - 2 * len(more)


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_the_kernel_for_captured_tensors_needs_its_synchronisation(arch: str) -> None:
    case = Case(100, 200, mask=Causal(), score=ALiBi(torch.tensor([0.3])), arch=arch)
    covered = [("ttng.fence_async_shared", text, LAST) for text in ("# products see the copies", "(ctx.k_smem)")]
    fences = [(f"tcgen05.fence::{side}_thread_sync", "", IN_ORDER) for side in ("before", "after")]
    results = taken_out(captured_launch(case), [REPLACED, *covered, *(fences if arch == "sm100" else [])])
    noticed = [found for found in results if "_thread_sync" not in found.op and found.noticed]
    assert len(noticed) == {"sm90": 4, "sm100": 6}[arch]
