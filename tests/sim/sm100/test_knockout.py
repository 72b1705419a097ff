"""Each synchronising operation of the Blackwell prefill kernel is needed, or stands in a list with the reason."""

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import drawn
from tests.sim.knocking import SM100_FENCES, knocked_out, reviewed
from tests.sim.sm100.prefill import Case, simulated
from warpattn.masks import Causal
from warpattn.sim import Report

COMPLETE = "products retire in their order: S of this key tile is complete, and P·V of the one before was issued first"
READ = "S of this key tile came after a P·V that has waited for correction, which reads the scale before it signals"
ELSEWHERE = "for tiles that met hidden values, where test_hidden_values.py takes it out"
# Operation, what stands in one of its lines of Python, why it can go.
REDUNDANT = [
    ("ttng.fence_async_shared", "fence_async_shared()", "it makes new barriers visible to TMA: not modelled"),
    *SM100_FENCES,
    ("ttng.wait_barrier", "await_signal(ctx.bars.o_producer.index(wg), (n - 1) & 1)", COMPLETE),
    ("ttng.wait_barrier", "await_signal(ctx.bars.c_consumer.index(wg), n & 1, pred=n > 1)", READ),
    ("ttng.async_tma_store_wait", "read_only=False", ELSEWHERE),
    ("ttng.wait_barrier", "state = load_k(ctx, ring, state, key_tile, True)", "the first lap over a ring never waits"),
]
reason = reviewed(REDUNDANT)
CASES = {
    "shared-ring": Case(256, 900, heads=1, heads_kv=1, dim=128, mask=Causal(), growth=20.0),
    "two-rings": Case(256, 1100, heads=1, heads_kv=1, mask=Causal(), growth=20.0),
}


@pytest.mark.parametrize("name", drawn(CASES, ["shared-ring"]))
def test_the_prefill_kernel_needs_its_synchronisation(name):
    case = CASES[name]

    def once(module, schedule) -> Report:
        torch.manual_seed(0)
        return simulated(case, kernel=module, schedule=schedule, step_limit=20_000, first_finding=True)[0]

    results = knocked_out(case.kernel(), once, reason)
    assert len(results) > 50
    modelled = [found for found in results if "fence" not in found.op and reason(found) != ELSEWHERE]
    assert sum(found.noticed for found in modelled) >= len(modelled) - 5
