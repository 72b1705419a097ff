"""Broken gfx942 and gfx950 kernels: the right kind of finding at the right line; without the fault they are clean."""

import linecache
from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.sim.amd import attention as amd_attention
from tests.sim.amd import kernels as kernels
from tests.sim.builds import poison, run
from warpattn.sim import Report, compile_for, knock_out, simulate

ARCHS = {"gfx942": 4, "gfx950": 16}
SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), *(("random", seed) for seed in range(10))]
N = 32
Outcome = tuple[Report, bool]


def ring(arch: str, fault: str, **options) -> Outcome:
    x, out = np.random.default_rng(1).standard_normal((5, N, N)).astype(np.float32), poison((N, N))
    constants = {"FAULT": fault, "BYTES": ARCHS[arch]}
    report = run(kernels.ring_kernel, (1,), {"x": x, "out": out, "n": 5}, constants, arch=arch, **options)
    return report, np.allclose(out, x.sum(0), atol=1e-5)


def copy(arch: str, fault: str, **options) -> Outcome:
    x, out = np.arange(N * N, dtype=np.float32).reshape(N, N), poison((N, N))
    constants = {"OP": fault or "pointers", "BYTES": ARCHS[arch]}
    report = run(kernels.copy_kernel, (1,), {"x": x, "out": out, "n": 21}, constants, arch=arch, **options)
    return report, np.array_equal(out, x)


def tile(arch: str, fault: str, **options) -> Outcome:
    x, out = np.arange(N * N, dtype=np.float32).reshape(N, N), poison((N, N))
    args = {"x": x, "out": out, "n": 1}
    report = run(kernels.buffer_kernel, (1,), args, {"OP": fault or "plain"}, arch=arch, **options)
    return report, np.array_equal(out, x)


def programs(arch: str, fault: str, **options) -> Outcome:
    x, out = np.ones((3, N), np.int32), np.zeros(N, np.int32)
    report = run(kernels.atomic_kernel, (3,), {"x": x, "out": out}, {"OP": fault or "or"}, arch=arch, **options)
    return report, bool((out == 1).all())


def attention(arch: str, fault: str, **options) -> Outcome:
    """BM 64, BN 32, D 64, S 128, one head."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(128, 64, generator=generator).bfloat16() for _ in range(3))
    out = torch.full((128, 64), float("nan"))
    args = {"q": q, "k": k, "v": v, "out": out, "n": 128, "scale": 1.4426950 / 8}
    constants = {"VERSION": 3 if arch == "gfx942" else 4, "FAULT": fault}
    report = run(amd_attention.attention_kernel, (2,), args, constants, arch=arch, **options)
    exact = torch.softmax(q.double() @ k.double().T / 8, -1) @ v.double()
    return report, bool(((out - exact).abs() <= 4e-3).all())


# program, fault, kind, source text of the first place, of the second (if the finding has two)
DMA = "async_copy.buffer_load_to_shared"
FAULTS: list[tuple[Callable[..., Outcome], str, str, str, str | None]] = [
    (ring, "no_wait", "UninitialisedRead", "ring.index(slot).load", None),
    (ring, "no_wait", "Race", DMA, "ring.index(slot).load"),
    (ring, "loose_wait", "UninitialisedRead", "ring.index(slot).load", None),
    (ring, "loose_wait", "Race", DMA, "ring.index(slot).load"),
    (ring, "no_commit", "Race", DMA, "ring.index(slot).load"),
    (ring, "no_commit", "PendingAtExit", DMA, None),
    (ring, "late_commit", "Race", DMA, "ring.index(slot).load"),
    (ring, "same_slot", "Race", DMA, "ring.index(slot).load"),
    (ring, "wrong_slot", "UninitialisedRead", "ring.index(slot).load", None),
    (ring, "wrong_slot", "Race", DMA, "ring.index(slot).load"),
    (ring, "outside", "OutOfBounds", DMA, None),
    (ring, "store_under_copy", "Race", DMA, ".store(total"),
    (ring, "overtaken", "Race", DMA, DMA),
    (ring, "no_last_wait", "PendingAtExit", DMA, None),
    (copy, "pointers_mask", "UninitialisedRead", "load_shared_relaxed", None),
    (copy, "outside", "OutOfBounds", "async_copy.global_load_to_shared", None),
    (tile, "outside", "OutOfBounds", "cdna3.buffer_load", None),
    (tile, "outside_store", "OutOfBounds", "cdna3.buffer_store", None),
    (programs, "store", "Race", "cdna3.buffer_store", "cdna3.buffer_store"),
    (attention, "late_fetch", "UninitialisedRead", ".load(right)", None),
    (attention, "loose_wait", "Race", DMA, ".load(right)"),
    (attention, "wrong_slot", "Race", DMA, "values = v_tiles"),
]
both = pytest.mark.parametrize("arch", ARCHS)


@both
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("program", [ring, copy, tile, programs, attention], ids=lambda f: f.__name__)
def test_correct_kernels_are_clean_and_right(arch, program, schedule, seed):
    report, right = program(arch, "", schedule=schedule, seed=seed)
    assert report.clean, report
    assert right


@both
@pytest.mark.parametrize("case", FAULTS, ids=lambda case: f"{case[0].__name__}-{case[1]}-{case[2]}")
def test_broken_kernels_are_reported(arch, case):
    program, fault, kind, first, second = case
    report, _ = program(arch, fault, schedule="lazy")
    found = [finding for finding in report.of_kind(kind) if matches(finding, first, second)]
    assert found, f"no {kind} at {first!r}:\n{report}"
    assert found[0].roles[0].startswith(f"{program.__name__}_kernel") or program in (tile, programs)


def matches(finding, first: str, second: str | None) -> bool:
    lines = [linecache.getline(*place.frames[0]) for place in finding.places]
    return first in lines[0] and (second is None or second in lines[1])


@both
@pytest.mark.parametrize("fault", sorted({case[1] for case in FAULTS if case[0] is ring}))
@pytest.mark.parametrize(("schedule", "seed"), [("eager", 0), ("adversarial", 0), ("random", 1)])
def test_faults_are_seen_under_every_schedule(arch, fault, schedule, seed):
    """Clocks do not need the unlucky order to happen."""
    assert not ring(arch, fault, schedule=schedule, seed=seed)[0].clean


@both
def test_races_are_seen_where_the_values_are_right(arch):
    report, right = ring(arch, "loose_wait", schedule="eager")
    assert right
    race = report.of_kind("Race")[0]
    assert (race.buffer, race.box) in [("ring", (0, 4096)), ("ring", (4096, 8192))]


@both
def test_every_wait_and_commit_of_attention_is_needed(arch):
    constants = {"VERSION": 3 if arch == "gfx942" else 4, "FAULT": ""}
    types = {**dict.fromkeys("qkv", "*bf16"), "out": "*fp32", "n": "i32", "scale": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    kernel = compile_for(arch, amd_attention.attention_kernel, types, constants)
    args = {name: torch.randn(128, 64).bfloat16() for name in "qkv"} | {"out": torch.zeros(128, 64)}

    def once(module):
        return simulate(module, (1,), {**args, "n": 128, "scale": 0.1}, schedule="lazy")

    results = knock_out(kernel, once)
    assert {result.op for result in results} == {"ttg.async_commit_group", "ttg.async_wait"} and len(results) >= 4
    assert all(result.noticed for result in results), [str(result) for result in results]
