"""Each synchronising operation of the Hopper decode kernel is needed, or stands here with the reason why it can go."""

import linecache

import pytest

pytest.importorskip("triton")

from tests.sim.sm90_decode import Decode, run
from warpattn.sim import KnockOut, Report, knock_out

FRESH = "the first lap over a ring never waits"
# Operation, what stands in one of its lines of Python, why it can go.
REDUNDANT = [
    ("ttng.fence_async_shared", "    fence_async_shared()", "it makes new barriers visible to TMA: not modelled"),
]


def reason(found: KnockOut) -> str | None:
    lines = [linecache.getline(*frame) for frame in found.frames]
    for op, text, why in REDUNDANT:
        if found.op == op and any(text in line for line in lines):
            return why
    return None


@pytest.mark.parametrize("few_rows", [0, 8])
@pytest.mark.parametrize("page", [0, 64, 3])
def test_the_decode_kernel_needs_its_synchronisation(page, few_rows):
    fields = (("stages", 2), ("few_rows", few_rows))
    case = Decode((700, 40, 900), page=page, heads_kv=2, dim=128, config=fields, behind=True)
    made = []

    def simulated(module) -> Report:
        report = Report()
        for schedule in ("lazy", "eager"):
            report = run(case, 2, kernel=lambda _: module, schedule=schedule, step_limit=20_000).report
            if not report.clean:
                break
        return report

    run(case, 2, kernel=lambda kernel: made.append(kernel) or kernel)
    results = knock_out(made[0], simulated)
    unexplained = [str(found) for found in results if not found.noticed and reason(found) is None]
    assert not unexplained, "\n".join(unexplained)
    assert sum(found.noticed for found in results) > 0.8 * len(results)
