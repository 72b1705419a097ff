"""Each operation of gfx942 and gfx950 against NumPy or torch, on small kernels."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from tests.sim.amd import kernels as kernels
from tests.sim.builds import poison, run
from tests.sim.machine.kernels import plain as plain_kernels
from warpattn.sim import simulate

ARCHS = {"gfx942": 4, "gfx950": 16}  # bytes that a lane copies to LDS at once
RNG = np.random.default_rng(0)
N = 32
pytestmark = pytest.mark.parametrize("arch", ARCHS)
UPDATES = {"add": np.add, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or,
           "xor": np.bitwise_xor}  # fmt: skip


def tile(dtype=np.float32) -> np.ndarray:
    return (RNG.standard_normal((N, N)) * 50).astype(dtype)


def expected(x: np.ndarray, op: str, n: int) -> np.ndarray:
    rows = np.arange(N)[:, None] < n
    return {
        "plain": x, "masked": np.where(rows, x, 0), "other": np.where(rows, x, 5),
        "store": np.where(rows.T, x, poison(1, x.dtype)), "slice": x[:, N // 2 :],
    }[op]  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.int8])
@pytest.mark.parametrize("op", ["plain", "masked", "other", "store", "slice"])
def test_buffer_operations(arch, op, dtype):
    x = tile(dtype)
    out = poison((N, N // 2) if op == "slice" else (N, N), dtype)
    report = run(kernels.buffer_kernel, (1,), {"x": x, "out": out, "n": 21}, {"OP": op}, arch=arch)
    assert report.clean, report
    np.testing.assert_array_equal(out, expected(x, op, 21))


@pytest.mark.parametrize("op", UPDATES)
def test_buffer_atomics(arch, op):
    """Programs update the same elements; those of add without the masked one."""
    dtype = np.uint32 if op == "add" else np.int32
    x, out = RNG.integers(0, 1000, (3, N)).astype(dtype), np.full(N, 77, dtype)
    report = run(kernels.atomic_kernel, (3,), {"x": x, "out": out}, {"OP": op}, arch=arch, schedule="random", seed=1)
    assert report.clean, report
    result = UPDATES[op].reduce([np.full(N, 77, dtype), *x])
    result[-1] = 77 if op == "add" else result[-1]
    np.testing.assert_array_equal(out, result)


def test_buffer_compare_and_swap(arch):
    before, out = np.arange(N, dtype=np.int32), poison(N, np.int32)
    before[::3] = 1000
    x = before.copy()
    assert run(kernels.swap_kernel, (1,), {"x": x, "out": out}, arch=arch).clean
    np.testing.assert_array_equal(out, before)
    np.testing.assert_array_equal(x, np.where(before == 1000, 1000, 2 * np.arange(N) + 1))


def test_hints_change_nothing(arch):
    text = (Path(__file__).parents[1] / "golden" / "gfx942_buffer.ttgir").read_text().replace("gfx942", arch)
    hints = "rocdl.sched.barrier none\nrocdl.s.setprio 1\nrocdl.s.barrier\nttg.barrier local\n"
    x, out = tile(), poison((N, N))
    assert simulate(text.replace("tt.return", hints + "tt.return"), (1,), {"x": x, "out": out, "n": N}).clean
    np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("op", ["buffer", "buffer_mask", "buffer_other", "pointers", "pointers_other"])
def test_copies_to_lds(arch, op, dtype):
    """Masked copies write zeros or `other`."""
    x, out = tile(dtype), poison((N, N), dtype)
    args, constants = {"x": x, "out": out, "n": 21}, {"OP": op, "BYTES": ARCHS[arch]}
    report = run(kernels.copy_kernel, (1,), args, constants, arch=arch, schedule="lazy")
    assert report.clean, report
    kept = np.arange(N)[:, None] < (21 if "_" in op else N)
    np.testing.assert_array_equal(out, np.where(kept, x, 3 if "other" in op else 0))


def test_copies_by_pointers_keep_what_was_where_the_mask_is_off(arch):
    x, out = tile(), poison((N, N))
    args, constants = {"x": x, "out": out, "n": 21}, {"OP": "pointers_mask", "BYTES": ARCHS[arch]}
    report = run(kernels.copy_kernel, (1,), args, constants, arch=arch)
    assert [finding.kind for finding in report.findings] == ["UninitialisedRead"]
    np.testing.assert_array_equal(out[:21], x[:21])
    assert np.isnan(out[21:]).all()


SHARED = {
    "flat": gl.SwizzledSharedLayout(1, 1, 1, [1, 0]),
    "swizzled": gl.SwizzledSharedLayout(4, 2, 8, [1, 0]),
    "padded": gl.PaddedSharedLayout.with_identity_for([[N, 4]], [N, N], [1, 0]),
}


@pytest.mark.parametrize("layout", SHARED)
def test_tiles_through_lds(arch, layout):
    """Layouts of LDS move bytes and change no value; stages of a pipeline of warps order instructions only."""
    x, out = RNG.standard_normal((3, N, N)).astype(np.float16), poison((N, N))
    args = {"x": x, "out": out, "n": 3}
    report = run(kernels.staged_kernel, (1,), args, {"LAYOUT": SHARED[layout]}, arch=arch)
    assert report.clean, report
    np.testing.assert_allclose(out, x.astype(np.float32).sum(0).T, atol=1e-5)


FORMATS = {
    "bfloat16": (16, 1e-5), "float16": (16, 1e-5), "float32": (4, 1e-5), "int8": (32, 0),
    "float8_e4m3fnuz": (32, 1e-5), "float8_e5m2fnuz": (32, 1e-5), "float8_e4m3fn": (32, 1e-5),
}  # fmt: skip


@pytest.mark.parametrize("dtype", FORMATS)
def test_mfma(arch, dtype):
    if dtype.startswith("float8") and dtype.endswith("uz") != (arch == "gfx942"):
        pytest.skip("a format of the other chip's matrix cores")
    depth, tolerance = FORMATS[dtype]
    version, k = (3, depth) if arch == "gfx942" else (4, depth * 2 if depth == 16 else depth)
    layout = gl.amd.AMDMFMALayout(version, [16, 16, k], True, [2, 2])
    kind = getattr(torch, dtype)
    a, b = (torch.randint(-99, 99, (N, 64)).to(kind) if dtype == "int8" else torch.randn(N, 64).to(kind) for _ in "ab")
    out = torch.full((N, N), -7, dtype=torch.int32 if dtype == "int8" else torch.float32)
    constants = {"K": 64, "LAYOUT": layout, "WIDTH": max(1, k // 4), "SHARED": SHARED["swizzled"]}
    report = run(kernels.mfma_kernel, (1,), {"a": a, "b": b, "out": out}, constants, arch=arch)
    assert report.clean, report
    wide = torch.int64 if dtype == "int8" else torch.float64
    result = (a.to(wide) @ b.to(wide).T).to(out.dtype)
    loose = 0.1 if (arch, dtype) == ("gfx942", "float32") else 0  # this chip multiplies fp32 as tf32
    torch.testing.assert_close(out, result, rtol=tolerance, atol=tolerance * 100 + loose)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_matrix_products_of_plain_triton(arch, dtype):
    a, b = torch.randn(64, 128).to(getattr(torch, dtype)), torch.randn(128, 64).to(getattr(torch, dtype))
    out = torch.full((64, 64), float("nan"))
    constants = {"N": 64, "K": 128, "BLOCK": 64}
    report = run(plain_kernels.matmul_kernel, (1,), {"a": a, "b": b, "c": out}, constants, arch=arch, schedule="lazy")
    assert report.clean, report
    loose = 0.1 if (arch, dtype) == ("gfx942", "float32") else 1e-3
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-4, atol=loose)


@pytest.mark.parametrize("op", ["argmax", "sum"])
def test_reductions_of_plain_triton(arch, op):
    x, out, index = tile(), poison(N), poison(N, np.int32)
    args = {"x": x, "out": out, "index": index}
    assert run(plain_kernels.reduce_kernel, (1,), args, {"M": N, "N": N, "OP": op, "AXIS": 1}, arch=arch).clean
    np.testing.assert_allclose(out, x.max(1) if op == "argmax" else x.sum(1), rtol=1e-4, atol=1e-3)


def test_blocks_of_plain_triton_meet_at_a_counter(arch):
    x, part = np.arange(32, dtype=np.float32), poison(4)
    count, out = np.zeros(1, np.int32), poison(1)
    args = {"x": x, "part": part, "count": count, "out": out}
    kernel = plain_kernels.last_block_kernel
    report = run(kernel, (4,), args, {"N": 8, "LOCKED": True}, arch=arch, schedule="random", seed=3)
    assert report.clean, report
    assert out[0] == x.sum()
