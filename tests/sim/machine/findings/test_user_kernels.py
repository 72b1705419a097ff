"""Kernels of the kinds that users write: right under every schedule, and each planted fault is named where it is."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout

from tests.sim.blackwell import user_kernels as blackwell
from tests.sim.builds import build, run
from tests.sim.machine.findings.test_faults import matches
from tests.sim.machine.kernels import user as kernels
from warpattn.sim import Report, SimulationError, TensorDescriptor, simulate
from warpattn.sim.ir.module import parse_module
from warpattn.sim.ir.placement import placement

N = 64
TILE = (N, N)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).half()


def unwritten(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def counter() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32)


def layout(shape=TILE, dtype=gl.float16, cga=None) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(shape), dtype, cga_layout=cga)


def near(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(found.float(), a.float() @ b.float(), atol=0.1, rtol=1e-2)


def gemm(fault: str, **options) -> tuple[Report, bool]:
    a, b, out = normal(N, 8 * N), normal(8 * N, N), unwritten(N, N)
    args = {f"{name}_desc": TensorDescriptor(x, TILE) for name, x in (("a", a), ("b", b), ("out", out))}
    report = run(kernels.gemm_kernel, (1,), {**args, "steps": 8}, {"FAULT": fault}, layout=layout(), **options)
    return report, near(out, a, b)


def split_k(fault: str, **options) -> tuple[Report, bool]:
    a, b, total, done = normal(32, 128), normal(128, 32), torch.zeros(32, 32), counter()
    args = {"a": a, "b": b, "total": total, "done": done, "out": unwritten(32, 32)}
    report = run(kernels.split_k_kernel, (4,), args, {"B": 32, "K": 32, "FAULT": fault}, **options)
    return report, near(args["out"], a, b) and not total.any() and not done.any()


def copied_operands(fault: str, **options) -> tuple[Report, bool]:
    a, b, out = normal(N, 5 * N), normal(5 * N, N), unwritten(N, N, dtype=torch.float32)
    args = {"a": a, "b": b, "out": out, "steps": 5}
    report = run(kernels.copied_operands_kernel, (1,), args, {"FAULT": fault}, **options)
    return report, near(out, a, b)


def stream(fault: str, **options) -> tuple[Report, bool]:
    x, out = normal(10 * N, N), unwritten(10 * N, N)
    args = {"x_desc": TensorDescriptor(x, TILE), "out_desc": TensorDescriptor(out, TILE), "tiles": 5}
    report = run(kernels.stream_kernel, (2,), args, {"FAULT": fault}, layout=layout(), **options)
    return report, torch.equal(out, 2 * x)


def persistent(fault: str, **options) -> tuple[Report, bool]:
    x, out = torch.randn(7 * 128), unwritten(7 * 128, dtype=torch.float32)
    args = {"x": x, "out": out, "counter": counter(), "total": 7}
    report = run(kernels.persistent_kernel, (3,), args, {"FAULT": fault}, step_limit=20_000, **options)
    return report, torch.equal(out, x * x)


def exchange(fault: str, **options) -> tuple[Report, bool]:
    part, out = (unwritten(N, N, dtype=torch.float32) for _ in range(2))
    args = {"part": part, "part_desc": TensorDescriptor(part, TILE), "flag": counter(), "out": out}
    options |= {"layout": layout(dtype=gl.float32), "step_limit": 20_000}
    report = run(kernels.exchange_kernel, (2,), args, {"FAULT": fault}, **options)
    return report, torch.equal(out.flatten(), torch.arange(float(N * N)))


def lifetime(fault: str, **options) -> tuple[Report, bool]:
    x, out = torch.zeros(128), unwritten(128, dtype=torch.float32)
    report = run(kernels.lifetime_kernel, (1,), {"x": x, "out": out}, {"FAULT": fault}, **options)
    return report, bool((out == 3).all())


def two_tiles(fault: str, **options) -> tuple[Report, bool]:
    first, out = unwritten(N, N), unwritten(N, N)
    args = {"first_desc": TensorDescriptor(first, TILE), "out": out}
    report = run(kernels.two_tiles_kernel, (1,), args, {"FAULT": fault}, layout=layout(), **options)
    return report, bool((first == 1).all() and (out == 2).all())


def tile_a_turn(fault: str, **options) -> tuple[Report, bool]:
    out = unwritten(4 * N, N)
    args = {"out_desc": TensorDescriptor(out, TILE), "turns": 4}
    report = run(kernels.tile_a_turn_kernel, (1,), args, {"FAULT": fault}, layout=layout(), **options)
    return report, bool((out.view(4, -1) == torch.arange(4)[:, None]).all())


def counted_sum(fault: str, **options) -> tuple[Report, bool]:
    x, out = torch.randn(4, 256), unwritten(256, dtype=torch.float32)
    args = {"x": x, "part": torch.zeros(256), "done": counter(), "out": out, "programs": 4}
    report = run(kernels.counted_sum_kernel, (4,), args, {"FAULT": fault}, **{"arch": "gfx942", **options})
    return report, torch.allclose(out, x.sum(0), atol=1e-5)


def normalise(fault: str, **options) -> tuple[Report, bool]:
    x, out, numbers = torch.rand(256, N).half() + 0.5, unwritten(256, N), torch.randperm(256).int()
    if fault == "twice":
        numbers[100] = numbers[3]
    args = {"x_desc": TensorDescriptor(x, (1, N)), "out_desc": TensorDescriptor(out, (1, N)), "numbers": numbers}
    rows = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    options |= {"layout": rows, "arch": "sm100"}
    report = run(blackwell.normalise_kernel, (2,), {**args, "steps": 4}, {"FAULT": fault}, **options)
    return report, torch.equal(out, (x.float() / x.float().amax(1, keepdim=True)).half())


def pair_gemm(fault: str, **options) -> tuple[Report, bool]:
    a, b, out = normal(1024, 2 * N), normal(2 * N, N), unwritten(1024, N)
    boxes = {"a_desc": (a, (256, N)), "b_desc": (b, TILE), "out_desc": (out, (256, N))}
    spread = {"a_desc": [[1, 0]], "b_desc": [[0, 1]], "out_desc": [[1, 0]]}
    args = {name: TensorDescriptor(*box) for name, box in boxes.items()} | {"tiles": 4, "steps": 2}
    layouts = {name: layout(boxes[name][1], cga=cga) for name, cga in spread.items()}
    constants = {"acc_layout": TensorMemoryLayout([128, N], 1, [[1, 0]], True), "FAULT": fault}
    kernel = build(blackwell.pair_gemm_kernel, args, constants, layout=layouts, arch="sm100", num_ctas=2)
    return simulate(kernel, (1,), args, step_limit=20_000, **options), near(out, a, b)


PROGRAMS = [gemm, split_k, copied_operands, stream, persistent, exchange, lifetime, two_tiles, tile_a_turn, counted_sum,
            normalise, pair_gemm]  # fmt: skip

# program, fault, kind, role and source text of the first place, of the second (if the finding has two)
FAULTS = [
    (gemm, "no_empty_wait", "Race", "load_operands", "tma.async_load(a_desc", "tma.async_load(a_desc"),
    (gemm, "empty_phase", "Deadlock", "multiply", "mbarrier.wait(full", "mbarrier.wait(empty"),
    (gemm, "half_bytes", "Race", "multiply", "warpgroup_mma(a.index", "tma.async_load(b_desc"),
    (gemm, "full_phase", "PhaseRace", "load_operands", "mbarrier.wait(empty", None),
    (gemm, "early_release", "Race", "load_operands", "tma.async_load(a_desc", "warpgroup_mma(a.index"),
    (gemm, "loose_last_wait", "Race", "multiply", "result.store(total", "warpgroup_mma(a.index"),
    (gemm, "no_store_wait", "PendingAtExit", "multiply", "tma.async_store(out_desc", None),
    (gemm, "count", "Deadlock", "multiply", "mbarrier.wait(full", "mbarrier.wait(empty"),
    (split_k, "plain_add", "Race", "split_k_kernel", "tl.load(at) + tl.dot", "tl.load(at) + tl.dot"),
    (split_k, "relaxed", "Race", "split_k_kernel", "tl.load(at).to", "tl.atomic_add(at"),
    (split_k, "first", "Race", "split_k_kernel", "tl.load(at).to", "tl.atomic_add(at"),
    (copied_operands, "one_group", "Race", "copied_operands", "warpgroup_mma(left", "async_load(left"),
    (copied_operands, "loose_wait", "Race", "copied_operands", "warpgroup_mma(left", "async_load(left"),
    (copied_operands, "same_slot", "Race", "copied_operands", "async_load(", "warpgroup_mma(left"),
    (copied_operands, "outside", "OutOfBounds", "copied_operands", "async_load(", None),
    (stream, "late_wait", "Race", "stream_kernel", "results.index(i % 2).store", "tma.async_store(out_desc"),
    (stream, "loose_wait", "Race", "stream_kernel", "results.index(i % 2).store", "tma.async_store(out_desc"),
    (stream, "same_rows", "Race", "stream_kernel", "tma.async_store(out_desc", "tma.async_store(out_desc"),
    (stream, "no_last_wait", "PendingAtExit", "stream_kernel", "tma.async_store(out_desc", None),
    (persistent, "plain_counter", "Race", "hand_out", "gl.load(counter)", "gl.store(counter"),
    (persistent, "no_empty_wait", "Race", "hand_out", "slots.index(i % 2).store", "slots.index(i % 2).load"),
    (persistent, "no_end", "Deadlock", "square_tiles", "mbarrier.wait(full", None),
    (persistent, "early_release", "Race", "hand_out", "slots.index(i % 2).store", "slots.index(i % 2).load"),
    (persistent, "outside", "OutOfBounds", "square_tiles", "gl.store(out", None),
    (exchange, "no_fence", "MissingFence", "exchange_kernel", "tma.async_load(part_desc", "gl.store(part"),
    (exchange, "relaxed", "Race", "exchange_kernel", "tma.async_load(part_desc", "gl.store(part"),
    (lifetime, "early_invalidate", "PhaseRace", "signal", "mbarrier.invalidate", "mbarrier.wait(bars.index(0)"),
    (lifetime, "late_init", "PhaseRace", "read_signalled", "mbarrier.wait(bars.index(0)", "mbarrier.init"),
    (two_tiles, "no_wait", "Race", "two_tiles_kernel", "second.store", "tma.async_store(first_desc"),
    (tile_a_turn, "loose_wait", "Race", "tile_a_turn_kernel", "tile.store", "tma.async_store(out_desc"),
    (counted_sum, "plain_add", "Race", "counted_sum_kernel", "buffer_load(part, at) + value", "buffer_store"),
    (counted_sum, "outside", "OutOfBounds", "counted_sum_kernel", "out, at +", None),
    (normalise, "row_bytes", "Deadlock", "normalise_kernel", "mbarrier.wait(bar", None),
    (normalise, "no_wait", "Race", "normalise_kernel", "tile.load(TILE)", "tma.async_gather"),
    (normalise, "before", "OutOfBounds", "normalise_kernel", "tma.async_scatter", None),
    (normalise, "reused", "Race", "normalise_kernel", "tma.async_gather", "tma.async_scatter"),
    (normalise, "twice", "Race", "normalise_kernel", "tma.async_scatter", "tma.async_scatter"),
    (pair_gemm, "no_acc_wait", "Race", "multiply_pairs of CTA 0", "tcgen05_mma", "acc.index(source).load"),
    (pair_gemm, "acc_phase", "Deadlock", "store_pairs", "mbarrier.wait(acc_full", None),
    (pair_gemm, "early_commit", "UninitialisedRead", "store_pairs", "acc.index(source).load", None),
    (pair_gemm, "early_release", "Race", "multiply_pairs of CTA 0", "tcgen05_mma", "acc.index(source).load"),
    (pair_gemm, "loose_store_wait", "Race", "store_pairs", "result.store(value", "tma.async_store(out_desc"),
    (pair_gemm, "own_release", "Race", "multiply_pairs of CTA 0", "tcgen05_mma", "acc.index(source).load"),
    (pair_gemm, "count", "Deadlock", "store_pairs", "mbarrier.wait(acc_full", None),
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_right_kernels_are_clean_and_right(program):
    report, right = program("", schedules="all", seeds=3)
    assert report.clean, report
    assert right


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def test_faults_are_named(case):
    program, fault, kind, role, first, second = case
    report, _ = program(fault)
    assert any(matches(found, role, first, second) for found in report.of_kind(kind)), report


@pytest.mark.parametrize(("program", "way"), [(exchange, "late_fence"), (two_tiles, "kept")])
def test_what_looks_wrong_and_is_right(program, way):
    """The reader fences, and a buffer that is named later keeps its bytes."""
    report, right = program(way, schedules="all", seeds=3)
    assert report.clean and right, report


@pytest.mark.parametrize(("program", "fault"), [(exchange, "no_poll"), (counted_sum, "relaxed")])
def test_luck_of_the_order_is_seen_by_a_sweep(program, fault):
    report, _ = program(fault, schedules="all", seeds=12)
    assert report.of_kind("Race"), report


@pytest.mark.parametrize("late", ["", "upper", "lower"])
@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_parts_of_shared_bytes(late, schedule):
    """Only the half that still goes out is named."""
    halves, out = unwritten(N, N), unwritten(N, N)
    args = {"half_desc": TensorDescriptor(halves, (N // 2, N)), "out": out}
    report = run(kernels.halves_kernel, (1,), args, {"FAULT": late}, layout=layout((N // 2, N)), schedule=schedule)
    named = {half for half in ("upper", "lower") for found in report.findings if f" {half}" in found.message}
    assert named == ({late} if late else set()) and {found.kind for found in report.findings} <= {"Race"}, report
    assert (halves[: N // 2] == 1).all() and (halves[N // 2 :] == 2).all() and (out == 3).all()


def test_where_triton_puts_buffers():
    args = {"first_desc": TensorDescriptor(unwritten(N, N), TILE), "out": unwritten(N, N)}
    built = (build(kernels.two_tiles_kernel, args, {"FAULT": way}, layout=layout()) for way in ("", "kept"))
    text, kept = (kernel.asm["ttgir"] for kernel in built)
    assert sorted(parse_module(text).first_bytes.values()) == [0, 0] and not parse_module(kept).first_bytes
    assert placement(kept, "cuda:90").first == (0, 2 * N * N)
    assert placement("module {", "cuda:90") == ((), 0), "no text of Triton's"


def test_more_shared_memory_than_a_block_may_have_is_refused():
    """28 tiles of 8 KiB are 224 of 227 KiB."""
    out = unwritten(N, N)
    args = {"out_desc": TensorDescriptor(out, TILE)}
    assert run(kernels.tiles_kernel, (1,), args, {"TILES": 28}, layout=layout()).clean and (out == 1).all()
    with pytest.raises(SimulationError, match=r"^tiles_kernel needs 237,568 bytes .* cuda:90 has 232,448 at most"):
        run(kernels.tiles_kernel, (1,), args, {"TILES": 29}, layout=layout())


def test_both_orders_of_shared_bytes_are_named():
    """The tiles are clean by themselves; a copy out that runs late reads what the next tile has written there."""
    for schedule in ("eager", "lazy", "adversarial"):
        (found,) = two_tiles("no_wait", schedule=schedule)[0].findings
        assert "Triton gives both the same bytes, and nothing orders the two" in str(found)
        assert found.box == (0, 2 * N * N)
