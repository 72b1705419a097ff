"""sm_100: rows by number, block-scaled products, cluster launch control; values against NumPy, one fault each."""

import numpy as np
import pytest

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from tests.sim.blackwell import scaled_kernels as kernels
from tests.sim.builds import compiled
from warpattn.sim import Report, TensorDescriptor, simulate
from warpattn.sim.ir.formats import _encode_fp8, _fp8_values

SCHEDULES = ["eager", "lazy", "random", "adversarial"]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def gathered(
    fault: str, schedule: str, rows: np.ndarray | None = None, column: int = 64
) -> tuple[Report, np.ndarray, np.ndarray]:
    layout = gl.NVMMASharedLayout.get_default_for([32, 64], gl.float16)
    desc = f"tensordesc<fp16[1, 64],{layout!r}>"
    signature = (("x_desc", desc), ("out_desc", desc), ("rows", "*i32"), ("column", "i32"), ("FAULT", "constexpr"))
    kernel = compiled(kernels.gather_kernel, signature, (("FAULT", fault),), 4, "sm100")
    x = np.random.default_rng(0).standard_normal((100, 128)).astype(np.float16)
    out = np.zeros_like(x)
    rows = np.random.default_rng(1).permutation(120)[:32].astype(np.int32) if rows is None else rows
    args = {
        "x_desc": TensorDescriptor(x, (1, 64)),
        "out_desc": TensorDescriptor(out, (1, 64)),
        "rows": rows,
        "column": column,
    }
    report = simulate(kernel, (1,), args, schedule=schedule)
    expected = np.zeros_like(x)
    kept = rows[(rows >= 0) & (rows < 100)]
    expected[kept, column : column + 64] = x[kept, column : column + 64]
    return report, out, expected


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_by_number(schedule):
    report, out, expected = gathered("", schedule)
    assert report.clean and np.array_equal(out, expected) and expected.any(), report


def test_the_first_row_and_column_are_inside():
    report, out, expected = gathered("", "eager", np.arange(32, dtype=np.int32), 0)
    assert report.clean and np.array_equal(out, expected) and expected[0].any(), report


def test_rows_by_number_without_a_wait():
    assert gathered("no_wait", "lazy")[0].of_kind("Race")
    assert gathered("no_store_wait", "lazy")[0].of_kind("PendingAtExit")
    report, *_ = gathered("", "eager", np.arange(-2, 30, dtype=np.int32))
    assert [found.kind for found in report.findings] == ["OutOfBounds"] and "to row -2" in str(report)


def operand(kind: str, rows: int, block: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(bytes, scales, numbers [rows, K]) in a format."""
    draw, k = np.random.default_rng(seed), kernels.K.value
    if kind == "e2m1":
        codes = draw.integers(0, 16, (rows, k), np.uint8)
        stored, numbers = codes[:, ::2] | codes[:, 1::2] << 4, E2M1[codes]
    else:
        name = {"e4m3": "f8E4M3FN", "e5m2": "f8E5M2"}[kind]
        stored = _encode_fp8(draw.standard_normal((rows, k)).astype(np.float32), name)
        numbers = _fp8_values(name)[stored]
    if block == 16:
        scales = _encode_fp8(draw.uniform(0.5, 4, (rows, k // block)).astype(np.float32), "f8E4M3FN")
        factors = _fp8_values("f8E4M3FN")[scales]
    else:
        scales = draw.integers(120, 132, (rows, k // block), np.uint8)
        factors = np.exp2(scales.astype(np.float32) - 127)
    return stored, scales, numbers * np.repeat(factors, block, 1)


def product(kind: str, block: int, fault: str = "", schedule: str = "eager") -> tuple[Report, bool]:
    stored = {"e2m1": "*u8", "e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}[kind]
    scale = "*fp8e4nv" if block == 16 else "*u8"
    types = {"a": stored, "b": stored, "a_scale": scale, "b_scale": scale, "out": "*fp32"}
    constants = {"FORMAT": kind, "BLOCK": block, "FAULT": fault}
    signature = (*types.items(), *((name, "constexpr") for name in constants))
    kernel = compiled(kernels.scaled_kernel, signature, tuple(constants.items()), 4, "sm100")
    a, a_scale, x = operand(kind, kernels.M.value, block, 0)
    b, b_scale, y = operand(kind, kernels.N.value, block, 1)
    out = np.full((kernels.M.value, kernels.N.value), np.nan, np.float32)
    if fault.startswith("copied"):
        a_scale = np.ascontiguousarray(a_scale.reshape(1, 4, 32, -1, 4).transpose(0, 3, 2, 1, 4))
    args = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "out": out}
    args = {name: as_type(value, types[name]) for name, value in args.items()}
    report = simulate(kernel, (1,), args, schedule=schedule)
    return report, bool(np.allclose(out, x @ y.T, rtol=1e-5, atol=1e-3))


def as_type(value: np.ndarray, kind: str):
    import torch

    dtype = {"*fp8e4nv": torch.float8_e4m3fn, "*fp8e5": torch.float8_e5m2}.get(kind)
    return value if dtype is None else torch.from_numpy(value).view(dtype)


@pytest.mark.parametrize(("kind", "block"), [("e4m3", 32), ("e5m2", 32), ("e2m1", 32), ("e2m1", 16)])
def test_block_scaled_products(kind, block):
    for schedule in SCHEDULES if kind == "e4m3" else ("lazy",):
        report, right = product(kind, block, schedule=schedule)
        assert report.clean and right, report


@pytest.mark.parametrize(("kind", "block"), [("e4m3", 32), ("e2m1", 16)])
def test_scales_that_are_copied_to_tensor_memory(kind, block):
    for schedule in SCHEDULES:
        report, right = product(kind, block, "copied", schedule)
        assert report.clean and right, report
    report, right = product(kind, block, "copied_over", "lazy")
    assert [found.buffer for found in report.of_kind("Race")] == ["tile"] and not right, report


@pytest.mark.parametrize("fault", ["no_wait", "early_scales"])
@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_block_scaled_products_with_a_fault(fault, schedule):
    report, _ = product("e4m3", 32, fault, schedule)
    assert report.of_kind("Race"), report
    if fault == "early_scales":
        assert any("a_scales" in found.buffer for found in report.findings)


@pytest.mark.parametrize("fault", ["", "no_wait"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_programs_that_cancel_others(fault, schedule):
    signature = (("out", "*i32"), ("FAULT", "constexpr"))
    kernel = compiled(kernels.stealing_kernel, signature, (("FAULT", fault),), 4, "sm100")
    out = np.zeros(20, np.int32)
    report = simulate(kernel, (20,), {"out": out}, schedule=schedule, seed=1, step_limit=300 if fault else 20_000)
    if fault:
        assert report.of_kind("Race"), report
    else:
        assert report.clean, report
        assert (out > 0).all() and len(set(out.tolist())) < 20, "some program did the work of another"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_copies_by_threads_of_a_cluster(arch, schedule):
    report, right = halves_by_threads("", arch, schedule)
    assert report.clean and right, report


def test_copies_by_threads_of_a_cluster_without_a_wait():
    report, _ = halves_by_threads("no_wait", "sm90", "lazy")
    (found,) = report.of_kind("Race")
    assert found.buffer == "tile" and found.count == 2, "of each CTA one"


def halves_by_threads(fault: str, arch: str, schedule: str) -> tuple[Report, bool]:
    x, weights = (np.random.default_rng(0).standard_normal(n).astype(np.float32) for n in ((64, 32), 64))
    out = np.full((64, 32), np.nan, np.float32)
    args = {"x": x, "weights": weights, "out": out}
    signature = (*((name, "*fp32") for name in args), ("FAULT", "constexpr"))
    kernel = compiled(kernels.halves_by_threads_kernel, signature, (("FAULT", fault),), 4, arch, 2)
    report = simulate(kernel, (1,), args, schedule=schedule)
    return report, np.array_equal(out, np.where(np.arange(64)[:, None] < 60, x, 0) * weights.max())
