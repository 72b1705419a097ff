"""Operations of sm_100 against NumPy: tiles of tensor memory, products, copies, packed arithmetic."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from tests.sim import builds
from tests.sim.blackwell import kernels as kernels
from tests.sim.builds import poison
from tests.sim.machine.kernels import plain as plain_kernels
from warpattn.sim import Report, SimulationError, TensorDescriptor, simulate

RNG = np.random.default_rng(0)
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32,
          torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}  # fmt: skip


def tile_layouts(args) -> dict:
    """The default layout of every descriptor's tile."""
    tiles = {name: value for name, value in args.items() if isinstance(value, TensorDescriptor)}
    return {
        name: gl.NVMMASharedLayout.get_default_for(list(desc.box), DTYPES[desc.tensor.dtype])
        for name, desc in tiles.items()
    }


def built(kernel, args, constants=None):
    return builds.build(kernel, args, constants, arch="sm100", layout=tile_layouts(args))


def run(kernel, args, constants=None, **options) -> Report:
    """Compile for sm_100, and simulate one program."""
    return simulate(built(kernel, args, constants), (1,), args, **options)


def tensor(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("m", "n", "block_m", "block_n"),
    [
        (128, 64, 128, 64),
        (64, 64, 64, 64),
        (64, 128, 64, 64),
        (128, 64, 64, 64),
        (256, 64, 128, 64),
        (128, 128, 128, 32),
    ],
)
def test_tiles_in_every_layout_of_blocks(m, n, block_m, block_n):
    x, out = tensor(m, n), poison(2 * m * n)
    report = run(kernels.tiles_kernel, {"x": x, "out": out}, {"M": m, "N": n, "BM": block_m, "BN": block_n})
    assert report.clean, report
    np.testing.assert_array_equal(out[: m * n].reshape(m, n), x)
    np.testing.assert_array_equal(out[m * n :].reshape(2, m, n // 2), [x[:, n // 2 :], x[:, : n // 2]])


def test_tiles_alias():
    x, out = tensor(128, 64), poison(3 * 128 * 64)
    assert run(kernels.alias_kernel, {"x": x, "out": out}).clean
    loose, packed, rest = out[: 128 * 64], out[128 * 64 : 2 * 128 * 64], out[2 * 128 * 64 :][: 128 * 32]
    lower = (x.view(np.uint32) << 16).view(np.float32)  # the low half of every word, read as bf16
    np.testing.assert_array_equal(loose.reshape(128, 64), lower)
    np.testing.assert_array_equal(packed.reshape(128, 64), torch.from_numpy(x + 2).bfloat16().float().numpy())
    np.testing.assert_array_equal(rest.reshape(128, 32), x[:, 32:] + 1)


def test_loads_reduce_rows():
    x, out, best = tensor(128, 32), poison((128, 32)), poison(256)
    assert run(kernels.reduce_kernel, {"x": x, "out": out, "best": best}).clean
    np.testing.assert_array_equal(out, x)
    np.testing.assert_array_equal(best, np.concatenate((x.max(1), abs(x).min(1))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_arithmetic(dtype):
    x, y, out = torch.from_numpy(tensor(256)), torch.from_numpy(tensor(256)), torch.full((6, 256), float("nan"))
    run(kernels.packed_kernel, {"x": x, "y": y, "out": out}, {"DTYPE": DTYPES[dtype]})
    a, b = x.to(dtype), y.to(dtype)
    fused = (a.double() * b.double() + a.double()).to(dtype)
    expected = [a + b, a - b, a * b, fused]
    if dtype != torch.float32:
        expected += [torch.minimum(a, b), torch.maximum(a, b)]
    for row, value in zip(out, expected, strict=False):
        assert torch.equal(row, value.float())


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32]
)
@pytest.mark.parametrize("m", [64, 128, 256])
def test_products(m, dtype):
    k = 32 if dtype == torch.float32 else 64
    a, b = (torch.from_numpy(tensor(rows, k)).to(dtype) for rows in (m, 64))
    out = torch.full((m, 64), float("nan"))
    args = {"a_desc": TensorDescriptor(a, (m, k)), "b_desc": TensorDescriptor(b, (64, k)), "out": out}
    assert run(kernels.transposed_kernel, args, schedule="lazy").clean
    exact = [x.float() for x in (a, b)]
    if dtype == torch.float32:  # tf32: ten bits of mantissa
        exact = [(x.view(torch.int32) & -(1 << 13)).view(torch.float32) for x in exact]
    torch.testing.assert_close(out, exact[0] @ exact[1].T, rtol=1e-5, atol=1e-4)


def weights(dtype: torch.dtype, n: int, fault: str, schedule: str) -> tuple[Report, torch.Tensor, torch.Tensor]:
    """(report, P·V, the product of the same bytes in PyTorch)."""
    p, v = torch.from_numpy(tensor(128, 64)), torch.from_numpy(tensor(64, n)).to(dtype)
    out = torch.full((128, n), float("nan"))
    args = {"p_ptr": p, "v_desc": TensorDescriptor(v, (64, n)), "out": out}
    report = run(kernels.weights_kernel, args, {"DTYPE": DTYPES[dtype], "FAULT": fault}, schedule=schedule)
    return report, out, p.to(dtype).float() @ v.float()


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
@pytest.mark.parametrize("n", [64, 128])  # rows of 64 and of 128 bytes, with a swizzle each
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_of_8_bits_in_tensor_memory(dtype, n, schedule):
    report, out, exact = weights(dtype, n, "", schedule)
    assert report.clean, report
    torch.testing.assert_close(out, exact, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("fault", ["one_a_column", "two_a_column", "columns_of_16_bits"])
def test_weights_in_other_columns_are_noticed(fault):
    report, out, exact = weights(torch.float8_e4m3fn, 64, fault, "lazy")
    assert not report.clean or (out - exact).norm() > 0.5 * exact.norm()


def matmul(fault: str, **options) -> tuple[Report, bool]:
    a, b = (torch.randn(shape).half() for shape in ((128, 192), (192, 64)))
    out = torch.full((128, 64), float("nan"))
    args = {"a_desc": TensorDescriptor(a, (128, 64)), "b_desc": TensorDescriptor(b, (64, 64)), "out": out, "steps": 3}
    report = run(kernels.matmul_kernel, args, {"FAULT": fault}, **options)
    if fault == "skipped":
        a[:, 64:128] = 0
    return report, torch.allclose(out, a.float() @ b.float(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("schedule", ["eager", "lazy", "adversarial", "random"])
@pytest.mark.parametrize("way", ["", "inline", "skipped"])
def test_accumulation_commits_and_predicates(way, schedule):
    report, right = matmul(way, schedule=schedule)
    assert report.clean, report
    assert right


@pytest.mark.parametrize("schedule", ["eager", "lazy", "adversarial", "random"])
def test_ordinary_triton_kernels(schedule):
    """What Triton itself makes of tl.dot in a loop."""
    a, b = (torch.randn(shape).half() for shape in ((128, 512), (512, 64)))
    c = torch.full((128, 64), float("nan"))
    sizes = {"N": 64, "K": 512, "BLOCK": 64}
    report = builds.run(
        plain_kernels.matmul_kernel, (2,), {"a": a, "b": b, "c": c}, sizes, arch="sm100", schedule=schedule
    )
    assert report.clean, report
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-4, atol=1e-3)
    q, k, v = (torch.randn(n, 64).bfloat16() for n in (256, 512, 512))
    args = {"q": q, "k": k, "v": v, "out": torch.full((256, 64), float("nan")), "S": 512, "scale": 1.4426950409 / 8}
    sizes = {"D": 64, "N": 64}
    report = builds.run(plain_kernels.flash_kernel, (2,), args, sizes, arch="sm100", schedule=schedule)
    assert report.clean, report
    torch.testing.assert_close(
        args["out"], torch.softmax(q.float() @ k.float().T / 8, 1) @ v.float(), rtol=0, atol=2e-3
    )


def test_copies_from_shared_memory():
    x, out = torch.randn(128, 32), torch.full((128, 32), float("nan"))
    args = {"x_desc": TensorDescriptor(x, (128, 32)), "out": out}
    assert run(kernels.copy_kernel, args, {"FAULT": ""}, schedule="lazy").clean
    assert torch.equal(out, x)
    assert run(kernels.copy_kernel, args, {"FAULT": "no_wait"}, schedule="lazy").of_kind("Race")


def test_tensor_memory_has_512_columns():
    out = poison((128, 256))
    assert run(kernels.big_kernel, {"out": out}, {"COLUMNS": 256}).clean
    with pytest.raises(SimulationError, match="big_kernel needs 768 columns of tensor memory at once; there are 512"):
        run(kernels.big_kernel, {"out": poison((128, 512))}, {"COLUMNS": 512})
