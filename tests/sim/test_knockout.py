"""Each synchronising operation is needed, or stands in a reviewed list with the reason why it can go."""

import linecache

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from tests.sim import gluon_kernels
from tests.sim.builds import compiled
from tests.sim.prefill import Case, simulated
from warpattn.masks import Causal
from warpattn.sim import KnockOut, Report, TensorDescriptor, knock_out, simulate

TURNS = "a warpgroup's turn comes after the one before it has waited for the same tile"
FRESH = "the first lap over a ring never waits"
# Operation, what stands in one of its lines of Python, whether only outside the first warpgroup, why it can go.
REDUNDANT = [
    ("ttng.fence_async_shared", "fence_async_shared()", False, "it makes new barriers visible to TMA: not modelled"),
    ("ttng.wait_barrier", ".consumer_wait(", True, TURNS),
    ("ttng.wait_barrier", "q_state = load_q(ctx, producer_state(", False, FRESH),
    ("ttng.wait_barrier", "cursor = load_first_keys(ctx, cursor, tile, span)", False, FRESH),
    ("ttng.arrive_barrier", "q_state = load_q(ctx, producer_state(", False, "a program always has a first tile"),
]


def reason(found: KnockOut) -> str | None:
    lines = [linecache.getline(*frame) for frame in found.frames]
    for op, text, later, why in REDUNDANT:
        if found.op == op and any(text in line for line in lines) and not (later and found.region == "default"):
            return why
    return None


def test_the_prefill_kernel_needs_its_synchronisation():
    case = Case(780, 780, heads=2, dim=128, mask=Causal())

    def run(module) -> Report:
        report = Report()
        for schedule in ("lazy", "eager"):
            torch.manual_seed(0)
            report, *_ = simulated(case, programs=1, kernel=module, schedule=schedule, step_limit=20_000)
            if not report.clean:
                break
        return report

    results = knock_out(case.kernel(), run)
    assert len(results) > 50
    unexplained = [str(found) for found in results if not found.noticed and reason(found) is None]
    assert not unexplained, "\n".join(unexplained)
    assert sum(found.noticed for found in results) > 0.8 * len(results)


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_a_small_kernel_needs_everything(schedule):
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    desc = f"tensordesc<fp16[64, 64],{layout!r}>"
    signature = (("x_desc", desc), ("out_desc", desc), ("FAULT", "constexpr"))
    kernel = compiled(gluon_kernels.copy_kernel, signature, (("FAULT", ""),), 4)

    def run(module) -> Report:
        x, out = torch.randn(64, 64).half(), torch.zeros(64, 64).half()
        args = {"x_desc": TensorDescriptor(x), "out_desc": TensorDescriptor(out)}
        return simulate(module, (1,), args, schedule=schedule)

    results = {found.op: found for found in knock_out(kernel, run)}
    assert set(results) == {
        "ttng.barrier_expect", "ttng.wait_barrier", "ttng.fence_async_shared", "ttng.async_tma_store_wait",
        "ttng.inval_barrier",
    }  # fmt: skip
    assert [op for op, found in results.items() if not found.noticed] == ["ttng.inval_barrier"]
    assert "MissingFence" in str(results["ttng.fence_async_shared"])
    assert run(kernel.asm["ttgir"]).clean, "the module is as it was before"
