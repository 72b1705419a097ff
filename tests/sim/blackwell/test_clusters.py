"""Kernels of clusters: right under every schedule, and their faults reported; what is not simulated is an error."""

import re
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout

from tests.sim.blackwell import cluster_kernels as kernels
from tests.sim.builds import build, poison, run
from tests.sim.machine.findings.test_faults import matches
from warpattn.sim import Report, SimulationError, TensorDescriptor, knock_out, simulate

SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), *(("random", seed) for seed in range(8))]
ROWS = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0], [[1, 0]])


def tile(shape, cga, dtype=gl.float16) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(shape), dtype, cga_layout=cga)


def halves(fault: str, arch: str = "sm90", **options) -> tuple[Report, bool]:
    x = torch.randn(64, 64)
    y, out, flag = (torch.full(shape, float("nan")) for shape in ((64, 64), (128,), (1,)))
    args = {"x_desc": TensorDescriptor(x, (64, 64)), "y_desc": TensorDescriptor(y, (64, 64)), "flag": flag, "out": out}
    layout = tile((64, 64), [[1, 0]], gl.float32)
    report = run(kernels.halves_kernel, (1,), args, {"FAULT": fault}, layout=layout, arch=arch, num_ctas=2, **options)
    right = torch.equal(y, 2 * x) and torch.allclose(out[:64], x.sum(1), atol=1e-4) and flag[0] == 7
    if fault == "met":
        right &= torch.equal(out[64:], torch.cat([out[32:64], out[:32]]))
    return report, bool(right)


def multicast(fault: str, arch: str = "sm90", **options) -> tuple[Report, bool]:
    x, out = torch.randn(192, 64).half(), torch.full((64, 64), float("nan"))
    args = {"x_desc": TensorDescriptor(x, (64, 64)), "out": out, "steps": 3}
    constants = {"layout": ROWS, "FAULT": fault}
    layout = tile((64, 64), [[0, 0]])
    report = run(kernels.multicast_kernel, (1,), args, constants, layout=layout, arch=arch, num_ctas=2, **options)
    return report, torch.allclose(out, x.float().reshape(3, 64, 64).sum(0), atol=1e-5)


def relay(fault: str, **options) -> tuple[Report, bool]:
    out = poison(512)
    report = run(kernels.relay_kernel, (1,), {"out": out}, {"FAULT": fault}, num_ctas=2, **options)
    expected = np.arange(1, 257)
    return report, bool((out[:256] == expected).all() and (out[256:] == np.roll(expected, 128)).all())


def product_of(way: str, fault: str = "") -> tuple[Any, dict]:
    """way: pair (one product of both CTAs), multicast (B comes from CTA 0), twice (each loads B)."""
    a, b = (torch.randn(shape).half() for shape in ((256, 192), (192, 128)))
    out = torch.full((256, 128), float("nan"))
    args = {"a_desc": TensorDescriptor(a, (256, 64)), "b_desc": TensorDescriptor(b, (64, 128)), "out": out, "steps": 3}
    layout = {"a_desc": tile((256, 64), [[1, 0]]), "b_desc": tile((64, 128), [[0, int(way == "pair")]])}
    acc = TensorMemoryLayout([128, 128], 1, [[1, 0]], way == "pair")
    constants = {"acc_layout": acc, "MULTI": way == "multicast", "FAULT": fault}
    return build(kernels.product_kernel, args, constants, layout=layout, arch="sm100", num_ctas=2), args


def product(fault: str, way: str = "pair", **options) -> tuple[Report, bool]:
    kernel, args = product_of(way, fault)
    report, expected = (
        simulate(kernel, (1,), args, **options),
        args["a_desc"].tensor.float() @ args["b_desc"].tensor.float(),
    )
    return report, torch.allclose(args["out"], expected, atol=1e-3, rtol=1e-4)


def pair_attention(fault: str, **options) -> tuple[Report, bool]:
    q, k, v = (torch.randn(shape).half() / 8 for shape in ((256, 64), (384, 64), (384, 64)))
    out = torch.full((256, 64), float("nan"))
    boxes = {"q_desc": (q, (256, 64)), "k_desc": (k, (128, 64)), "v_desc": (v, (128, 64))}
    args = {name: TensorDescriptor(*box) for name, box in boxes.items()} | {"out": out, "tiles": 3}
    layout = {"q_desc": tile((256, 64), [[1, 0]]), "k_desc": tile((128, 64), [[1, 0]])}
    layout["v_desc"] = tile((128, 64), [[0, 1]])
    s, o = (TensorMemoryLayout([128, n], 1, [[1, 0]], True) for n in (128, 64))
    constants = {"s_layout": s, "o_layout": o, "FAULT": fault}
    kernel = build(kernels.pair_attention_kernel, args, constants, layout=layout, arch="sm100", num_ctas=2)
    report, expected = simulate(kernel, (1,), args, **options), torch.relu(q.float() @ k.float().T) @ v.float()
    return report, torch.allclose(out, expected, atol=2e-3)


def product_twice(fault: str, **options) -> tuple[Report, bool]:
    return product(fault, "twice", **options)


def product_multicast(fault: str, **options) -> tuple[Report, bool]:
    return product(fault, "multicast", **options)


def wgmma(fault: str, **options) -> tuple[Report, bool]:
    a, b = (torch.randn(shape).half() for shape in ((128, 64), (64, 64)))
    out = torch.full((128, 64), float("nan"))
    args = {"a_desc": TensorDescriptor(a, (128, 64)), "b_desc": TensorDescriptor(b, (64, 64)), "out": out}
    mma = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16], cga_layout=[[1, 0]])
    layout = {"a_desc": tile((128, 64), [[1, 0]]), "b_desc": tile((64, 64), [[0, 0]])}
    report = run(kernels.wgmma_kernel, (1,), args, {"mma": mma, "FAULT": fault}, layout=layout, num_ctas=2, **options)
    return report, torch.allclose(out, a.float() @ b.float(), atol=1e-3, rtol=1e-4)


def looping(fault: str, split: bool = False, **options) -> tuple[Report, bool]:
    x = torch.randn(96, 64)
    y, out = torch.full((96, 64), float("nan")), torch.full((96, 32), float("nan"))
    args = {"x_desc": TensorDescriptor(x, (32, 64)), "y_desc": TensorDescriptor(y, (32, 64)), "out": out, "steps": 3}
    layout = tile((32, 64), [[int(split), 0]], gl.float32)
    report = run(kernels.looping_kernel, (1,), args, {"FAULT": fault}, layout=layout, num_ctas=2, **options)
    return report, torch.equal(y, x) and torch.equal(out, x[:, ::2] + x[:, 1::2])


def looping_halves(fault: str, **options) -> tuple[Report, bool]:
    return looping(fault, True, **options)


def meeting_roles(fault: str, **options) -> tuple[Report, bool]:
    out = poison(512)
    report = run(kernels.meeting_roles_kernel, (1,), {"out": out}, {"FAULT": fault}, num_ctas=2, **options)
    mine = np.arange(1, 129)
    return report, bool((out.reshape(2, 2, 128) == [mine, np.roll(mine, 64)]).all())


def copied_accumulator(fault: str, pair: bool = False, **options) -> tuple[Report, bool]:
    a, b, c = torch.randn(256, 64).half(), torch.randn(64, 64).half(), torch.randn(256, 64)
    out = torch.full((256, 64), float("nan"))
    boxes = {"c_desc": (c, (256, 64)), "a_desc": (a, (256, 64)), "b_desc": (b, (64, 64))}
    args = {name: TensorDescriptor(*box) for name, box in boxes.items()} | {"out": out}
    layout = {"c_desc": tile((256, 64), [[1, 0]], gl.float32), "a_desc": tile((256, 64), [[1, 0]])}
    layout["b_desc"] = tile((64, 64), [[0, int(pair)]])
    constants = {"acc_layout": TensorMemoryLayout([128, 64], 1, [[1, 0]], pair), "FAULT": fault}
    kernel = build(kernels.copied_accumulator_kernel, args, constants, layout=layout, arch="sm100", num_ctas=2)
    report = simulate(kernel, (1,), args, **options)
    return report, torch.allclose(out, c + a.float() @ b.float(), atol=1e-3, rtol=1e-4)


def copied_by_pair(fault: str, **options) -> tuple[Report, bool]:
    return copied_accumulator(fault, True, **options)


CORRECT = [
    (halves, ""), (halves, "met"), (multicast, ""), (relay, ""), (product, ""), (product, "inline"),
    (product_twice, ""), (product_multicast, ""), (product_multicast, "inline"), (pair_attention, ""),
    (wgmma, ""), (wgmma, "registers"), (looping, ""), (looping_halves, ""), (meeting_roles, ""),
    (copied_accumulator, ""), (copied_by_pair, ""),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize(("program", "way"), CORRECT, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_correct_kernels_are_clean_and_right(program, way, schedule, seed):
    report, right = program(way, schedule=schedule, seed=seed)
    assert report.clean, report
    assert right


@pytest.mark.parametrize("schedule", ["eager", "lazy", "adversarial", "random"])
def test_sm100_runs_what_sm90_runs(schedule):
    for program, way in ((halves, "met"), (multicast, "")):
        report, right = program(way, arch="sm100", schedule=schedule)
        assert report.clean and right, report


@pytest.mark.parametrize("schedule", ["eager", "lazy", "adversarial", "random"])
def test_two_pairs_share_the_second_operand(schedule):
    """Four CTAs: each of a pair gets its half of B for both pairs, and commits reach all of them."""
    a, b = (torch.randn(shape).half() for shape in ((512, 192), (192, 128)))
    out = torch.full((512, 128), float("nan"))
    args = {"a_desc": TensorDescriptor(a, (512, 64)), "b_desc": TensorDescriptor(b, (64, 128)), "out": out, "steps": 3}
    layout = {"a_desc": tile((512, 64), [[1, 0], [2, 0]]), "b_desc": tile((64, 128), [[0, 1], [0, 0]])}
    acc = TensorMemoryLayout([128, 128], 1, [[1, 0], [2, 0]], True)
    constants = {"acc_layout": acc, "MULTI": True, "FAULT": ""}
    kernel = build(kernels.product_kernel, args, constants, layout=layout, arch="sm100", num_ctas=4)
    report = simulate(kernel, (1,), args, schedule=schedule)
    assert report.clean, report
    torch.testing.assert_close(out, a.float() @ b.float(), atol=1e-3, rtol=1e-4)


def test_programs_of_a_grid_are_clusters():
    """All of them write the same elements, which is a race between programs, but not between the CTAs of one."""
    out = poison(512)
    report = run(kernels.relay_kernel, (3,), {"out": out}, {"FAULT": ""}, num_ctas=2)
    assert {place.role for f in report.of_kind("Race") for place in f.places} >= {
        "relay_kernel of CTA 0 of program (1, 0, 0)"
    }


# program, fault, kind, role and source text of the first place, of the second (if the finding has two)
FAULTS = [
    (halves, "no_wait", "UninitialisedRead", "of CTA 1", "a.load(layout)", None),
    (halves, "long_expect", "Deadlock", "of CTA 0", "mbarrier.wait(bar, 0)", "mbarrier.wait(bar, 0)"),
    (halves, "crossed", "Race", "of CTA", "gl.load(out + (rows ^", "gl.store(out + rows"),
    (multicast, "early_release", "Race", "load_role of CTA 0", "multicast=True", "total += a.load(layout)"),
    (multicast, "own_empty", "Race", "load_role of CTA 0", "multicast=True", "total += a.load(layout)"),
    (multicast, "no_empty_wait", "Race", "load_role of CTA 0", "multicast=True", "multicast=True"),
    (multicast, "no_go", "PhaseError", "load_role of CTA 1", "mbarrier.expect(full", None),
    (relay, "no_meeting", "Race", "relay_kernel of CTA", "gl.load(out + (rows ^", "gl.store(out + rows"),
    (relay, "two_needed", "Deadlock", "relay_kernel of CTA 0", "mbarrier.wait(go, 0)", "mbarrier.wait(go, 0)"),
    (product, "no_wait", "UninitialisedRead", "of CTA 1", "acc.load(layout)", None),
    (product, "no_load_wait", "Race", "of CTA 0", "tcgen05_mma(a, b", "tma.async_load(b_desc"),
    (product, "short_expect", "Deadlock", "of CTA 0", "mbarrier.wait(full", "mbarrier.wait(done"),
    (product_multicast, "one_commit", "Race", "of CTA 0", "tma.async_load(b_desc", "tcgen05_mma(a, b"),
    (product_multicast, "own_commit", "Deadlock", "of CTA 0", "mbarrier.wait(done", "mbarrier.wait(done"),
    (product_multicast, "no_load_wait", "Race", "of CTA 1", "tcgen05_mma(a, b", "tma.async_load"),
    (pair_attention, "no_ready", "Race", "of CTA 0", "tcgen05_mma(p, v, o", "p.store"),
    (looping, "differ", "Race", "of CTA", "tma.async_store", None),
    (looping_halves, "no_store_wait", "Race", "of CTA 1", "tma.async_load", "tma.async_store"),
    (meeting_roles, "no_role_meeting", "Race", "met_role of CTA", "gl.load(out + (rows ^", "gl.store(out + rows"),
    (copied_accumulator, "no_wait", "Race", "of CTA 1", "tcgen05_copy(c", "tma.async_load(c_desc"),
    (copied_by_pair, "no_done", "UninitialisedRead", "of CTA 1", "acc.load(layout)", None),
    (wgmma, "no_wait", "Race", "of CTA 0", "tma.async_load(b_desc", "warpgroup_mma(a, b"),
]


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: f"{case[0].__name__}-{case[1]}-{case[2]}")
def test_broken_kernels_are_reported(case):
    program, fault, kind, role, first, second = case
    report, _ = program(fault, schedule="lazy")
    found = [f for f in report.of_kind(kind) if matches(f, role, first, second)]
    assert found, f"no {kind} of {role} at {first!r}:\n{report}"


def test_a_race_between_ctas_names_whose_memory_it_is():
    report, _ = multicast("own_empty", schedule="eager")
    assert any("of a of CTA 1, which sum_role of CTA 1" in str(f) for f in report.of_kind("Race"))


def test_a_deadlock_names_the_ctas_that_could_arrive():
    text = str(relay("two_needed")[0].of_kind("Deadlock")[0])
    assert "waits for barrier go of CTA 1" in text and "it has 1 of 2 arrivals" in text
    assert "could still be arrived on by relay_kernel of CTA 0 (line" in text


def refused(kernel, args, constants, message, **options) -> None:
    with pytest.raises(SimulationError, match=message):
        run(kernel, (1,), args, constants, num_ctas=2, **options)


def test_what_is_not_simulated_is_an_error():
    kernel = build(kernels.relay_kernel, {"out": poison(512)}, {"FAULT": ""}, num_ctas=2)
    with pytest.raises(SimulationError, match="no model of the time that kernels with clusters take"):
        simulate(kernel, (1,), {"out": poison(512)}, timing=True)
    text = kernel.asm["ttgir"]
    with pytest.raises(SimulationError, match="does not say how its elements are spread"):
        simulate(re.sub(r", CGALayout = \[\[1\]\]", "", text), (1,), {"out": poison(512)})
    with pytest.raises(SimulationError, match=r"cluster_kernels.py:\d+: .* in kernels without clusters only"):
        simulate(text.replace("ttng.cluster_barrier", "ttg.global_scratch_alloc"), (1,), {"out": poison(512)})


WAYS = {
    "atomic": lambda x: x, "convert": lambda x: x, "scan": np.cumsum, "reverse": lambda x: x[::-1],
    "ticket": lambda x: x + x[0],
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_elements_of_other_ctas_arrive(way):
    x, out = np.arange(3, 259, dtype=np.float32), np.zeros(256, np.float32)
    expected = WAYS[way](x.copy())
    report = run(kernels.crossing_kernel, (1,), {"x": x, "out": out}, {"WAY": way}, num_ctas=2, schedules="all")
    assert report.clean, report
    np.testing.assert_array_equal(out, expected)


def test_a_reduction_over_the_parts_of_all_ctas():
    x, out = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32), poison(64)
    assert run(kernels.column_sums_kernel, (1,), {"x": x, "out": out}, num_ctas=2, schedules="all").clean
    np.testing.assert_allclose(out, x.sum(0), rtol=1e-5, atol=1e-5)


def test_what_another_cta_has_not_written_is_a_finding_where_it_is_stored():
    args = {"x": poison(256), "out": poison(256)}
    report = run(kernels.crossing_kernel, (1,), args, {"WAY": "unwritten"}, num_ctas=2)
    assert {finding.kind for finding in report.findings} == {"UninitialisedRead"}, report


def test_a_tile_of_another_spread_is_refused():
    message = "spread over the CTAs in different ways|loads more of a tile than it has"
    refused(kernels.crossing_kernel, {"x": poison(256), "out": poison(256)}, {"WAY": "tile"}, message)


@pytest.mark.parametrize("way", ["pair", "multicast"])
def test_knocking_out_every_synchronisation(way):
    kernel, args = product_of(way)
    results = knock_out(kernel, lambda module: simulate(module, (1,), args, schedule="lazy", step_limit=10_000))
    assert len(results) == 4  # expect, wait, commit, wait
    assert all(result.noticed for result in results), "\n".join(map(str, results))


@pytest.mark.parametrize("fault", ["", "no_meeting"])
@pytest.mark.parametrize("schedule", ["eager", "lazy", "adversarial", "random"])
def test_clusters_that_cancel_others(fault, schedule):
    out = np.zeros((9, 256), np.int32)
    args = {"arch": "sm100", "num_ctas": 2, "schedule": schedule, "seed": 1, "step_limit": 4000}
    report = run(kernels.stealing_kernel, (9,), {"out": out}, {"FAULT": fault}, **args)
    if fault:
        assert not report.clean
    else:
        assert report.clean, report
        assert (out > 0).all() and (out == out[:, :1]).all() and len(set(out[:, 0].tolist())) < 9
