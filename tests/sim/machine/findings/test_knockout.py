"""Each synchronising operation is needed, or stands in a reviewed list with the reason why it can go."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from tests.drawn import drawn
from tests.sim.builds import compiled
from tests.sim.knocking import LATER, SM90_PREFILL, first_pass, knocked_out, reviewed
from tests.sim.machine.kernels import gluon as gluon_kernels
from tests.sim.sm90.prefill import Case, simulated
from warpattn.masks import Causal
from warpattn.sim import Report, TensorDescriptor, knock_out, miscount, simulate

FIRST = ("ttng.arrive_barrier", "q_state = load_q(ctx, producer_state(", "a program always has a first tile")
TURN = ("bar.sync", "turn_wait(wg, config)", "nothing is wrong without turns; an even number leaves no arrival", LATER)
ROWS = [*SM90_PREFILL, FIRST, TURN]
reason = reviewed(ROWS)
V_BEFORE = ("ttng.wait_barrier", "v_state = load_values(ctx, v_state, tile, span.key_tile(i - 1))",
            "in turn, V is released before the K that was acquired before it")  # fmt: skip
K_BEFORE = ("ttng.wait_barrier", "k_state = load_keys(ctx, k_state, tile, span.key_tile(",
            "K is released before the V, of one slot, that was acquired before it")  # fmt: skip


FORMS = {
    "128": {"dim": 128},
    "192 and 128": {"dim": 192, "dim_v": 128},
    "80": {"dim": 80},
    "80, products in turn": {"dim": 80, "consumers": 3},
    "512 and 256": {"dim": 512, "dim_v": 256},
}


@pytest.mark.parametrize("form", drawn(FORMS, ["128"]))
def test_the_prefill_kernel_needs_its_synchronisation(form):
    case = Case(780, 780, heads=2, mask=Causal(), **FORMS[form])
    case = replace(case, seq_k=652 + case.config.block_n)  # the first rows see one key tile
    short = replace(case, seq_q=100, seq_k=60, heads=5, heads_kv=5)  # so few keys that only Q's ring holds loads up

    def once(module, schedule) -> Report:
        torch.manual_seed(0)
        options = {"kernel": module, "schedule": schedule, "step_limit": 20_000, "first_finding": True}
        report = simulated(case, programs=1, **options)[0]
        if report.clean:
            report = simulated(short, programs=1, **options)[0]
        return report

    before = {"80, products in turn": [V_BEFORE], "512 and 256": [K_BEFORE]}
    why = reviewed([*ROWS, *before.get(form, [])])
    results = knocked_out(case.kernel(), once, why, change=lambda kernel, run: knock_out(kernel, run, first_pass))
    assert len(results) > 50
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

    wrong = miscount(kernel, run)
    assert [(found.op, found.change) for found in wrong] == [
        ("ttng.init_barrier", "for one arrival more"),
        ("ttng.barrier_expect", "16 bytes more"),
        ("ttng.barrier_expect", "16 bytes fewer"),
        ("ttng.wait_barrier", "with the other parity"),
    ]
    assert all(found.noticed for found in wrong), "\n".join(map(str, wrong))
    assert [found.op for found in knock_out(kernel, run, lambda op: op.name == "ttng.wait_barrier")] == [
        "ttng.wait_barrier"
    ]
    results = {found.op: found for found in knock_out(kernel, run)}
    assert set(results) == {
        "ttng.barrier_expect", "ttng.wait_barrier", "ttng.fence_async_shared", "ttng.async_tma_store_wait",
        "ttng.inval_barrier",
    }  # fmt: skip
    assert [op for op, found in results.items() if not found.noticed] == ["ttng.inval_barrier"]
    assert "MissingFence" in str(results["ttng.fence_async_shared"])
    assert run(kernel.asm["ttgir"]).clean, "the module is as it was before"
