"""Each synchronising operation of the Hopper decode kernel is needed, or stands here with the reason why it can go."""

from itertools import product

import pytest

pytest.importorskip("triton")

from tests.drawn import drawn
from tests.sim.knocking import knocked_out, reviewed
from tests.sim.sm90.decode import Decode, run
from warpattn.sim import Report

PACE = "it only limits how much is under way"
# Operation, what stands in one of its lines of Python, why it can go.
REDUNDANT = [
    ("ttng.fence_async_shared", "    fence_async_shared()", "it makes new barriers visible to TMA: not modelled"),
    ("tt.grid_dependency_wait", "hand_over(", "only the next launch but one relies on it"),
    ("ttng.wait_barrier", "keep_pace(", PACE),
]
reason = reviewed(REDUNDANT)


KERNELS = [*product((0, 64, 3), (0, 8), (False,)), (0, 0, True), (64, 8, True)]


@pytest.mark.parametrize(
    ("page", "few_rows", "settled"), drawn(KERNELS, [(64, 8, False), (3, 0, False), (0, 0, True), (64, 8, True)])
)
def test_the_decode_kernel_needs_its_synchronisation(page, few_rows, settled):
    """The first keys of a CTA are few, so that it comes to new tokens before its ring is full."""
    fields = (("stages", 2), ("few_rows", few_rows))
    lengths = (100, 100, 100) if settled and not page else (40, 400, 500)
    case = Decode(lengths, page=page, heads_kv=2, dim=128, config=fields, behind=True, settled=settled)
    made = []

    def once(module, schedule) -> Report:
        return run(case, 2, kernel=lambda _: module, schedule=schedule, step_limit=20_000).report

    run(case, 2, kernel=lambda kernel: made.append(kernel) or kernel)
    results = knocked_out(made[0], once, reason)
    needed = [found for found in results if reason(found) != PACE]
    assert len(results) - len(needed) == 2 * settled, "the pace of K and of V"
    assert sum(not found.noticed for found in needed) == 1 + settled, "a fence; with a settled cache a wait"
    assert sum(found.noticed for found in needed) > 0.8 * len(needed)
