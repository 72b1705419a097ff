"""Each synchronising operation of the Hopper decode kernel is needed, or stands here with the reason why it can go."""

from itertools import product

import pytest

pytest.importorskip("triton")

from tests.drawn import drawn
from tests.sim.knocking import knocked_out, reviewed
from tests.sim.sm90.decode import Decode, run
from warpattn.kernels.sm90.decode.config import SwapAB
from warpattn.sim import Report

SWAP_AB = SwapAB(8, 4)
THROTTLE = "it only limits the copies in flight"
# Operation, what stands in one of its lines of Python, why it can go.
REDUNDANT = [
    ("ttng.fence_async_shared", "    fence_async_shared()", "it makes new barriers visible to TMA: not modelled"),
    ("tt.grid_dependency_wait", "trigger_dependents(", "only the next launch but one relies on it"),
    ("ttng.wait_barrier", "throttle(", THROTTLE),
]
reason = reviewed(REDUNDANT)


KERNELS = [*product((0, 64, 3), (None, SWAP_AB), (False,), (128,)), (0, None, True, 128), (64, SWAP_AB, True, 128)]
KERNELS += [(0, SWAP_AB, False, 512), (64, SWAP_AB, False, 512)]  # rings of one slot


@pytest.mark.parametrize(
    ("page", "swap_ab", "kv_ready", "dim"),
    drawn(KERNELS, [(64, SWAP_AB, True, 128)]),
)
def test_the_decode_kernel_needs_its_synchronisation(page, swap_ab, kv_ready, dim):
    """The first keys of a CTA are few, so that it reaches new tokens before its ring is full."""
    fields = (("stages", 2 if dim < 512 else 1), ("swap_ab", swap_ab))
    lengths = (40, 130, 200) if page else (100, 100, 100)
    case = Decode(lengths, page=page, heads_kv=2, dim=dim, config=fields, behind=True, kv_ready=kv_ready)
    made = []

    def once(module, schedule) -> Report:
        return run(case, 2, kernel=lambda _: module, schedule=schedule, step_limit=20_000, first_finding=True).report

    run(case, 2, kernel=lambda kernel: made.append(kernel) or kernel)
    results = knocked_out(made[0], once, reason)
    needed = [found for found in results if reason(found) != THROTTLE]
    assert len(results) - len(needed) == 2 * kv_ready, "the throttle of K and of V"
    assert sum(not found.noticed for found in needed) == 1 + kv_ready, "a fence; where keys are ready, a wait"
    assert sum(found.noticed for found in needed) > 0.8 * len(needed)
