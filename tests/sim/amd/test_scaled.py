"""Matrix products of microscaled operands on gfx950, against torch's own formats and a table of fp4."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.sim.amd import kernels as kernels
from tests.sim.builds import run

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SCALED = ("fp4", "fp8")
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def operand(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(bits, values) [32, 128] of random numbers of a format."""
    if name != "e2m1":
        bits = torch.randn(32, 128).to(FP8[name])
        return bits, bits.float()
    codes = torch.randint(0, 16, (32, 128))
    values = FP4[codes & 7] * torch.where(codes > 7, -1, 1)
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8), values


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(
    "formats", [("e4m3", "e4m3"), ("e2m1", "e5m2"), ("e5m2", "e2m1"), ("e2m1", "e2m1")], ids="-".join
)
def test_scaled_products(formats, scaled):
    (a, x), (b, y) = operand(formats[0]), operand(formats[1])
    a_scale, b_scale = (torch.randint(120, 134, (32, 4), dtype=torch.uint8) for _ in "ab")
    out = torch.full((32, 32), float("nan"))
    args = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "out": out}
    report = run(kernels.scaled_kernel, (1,), args, {"FORMATS": formats, "SCALED": scaled}, arch="gfx950")
    assert report.clean, report
    if scaled:
        x, y = (v * torch.exp2(s.double() - 127).repeat_interleave(32, 1) for v, s in ((x, a_scale), (y, b_scale)))
    exact = x.double() @ y.double().T + 1
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=float(exact.abs().max()) * 1e-6)


@pytest.mark.parametrize("kind", ["columns", "rows", "fp4", "fp8"])
def test_narrow_floats_become_wide_ones(kind):
    codes = torch.randint(0, 256, (32, 32), dtype=torch.uint8)
    a = torch.randn(32, 32).to(FP8["e4m3"]) if kind == "fp8" else codes
    low, high = (FP4[half & 7] * torch.where(half > 7, -1, 1) for half in (codes.int() & 15, codes.int() >> 4))
    if kind == "rows":
        expected = torch.stack((low, high), 1).reshape(64, 32)
    else:
        expected = a.float() if kind == "fp8" else torch.stack((low, high), 2).reshape(32, 64)
    scale = torch.randint(120, 134, expected.shape, dtype=torch.uint8)
    if kind in SCALED:
        scale[3, 5] = 255
        expected = expected * torch.exp2(scale.float() - 127)
        expected[3, 5] = float("nan")
    args = {"a": a, "scale": scale, "out": torch.full(expected.shape, 77.0)}
    report = run(kernels.upcast_kernel, (1,), args, {"KIND": kind}, arch="gfx950")
    assert report.clean, report
    np.testing.assert_array_equal(args["out"], expected)


def test_fp4_that_lds_packs_along_rows():
    codes = [torch.randint(0, 16, (32, 128), dtype=torch.uint8) for _ in "ab"]
    x, y = (FP4[each.int() & 7] * torch.where(each > 7, -1, 1) for each in codes)
    a, b = (each[::2] + 16 * each[1::2] for each in codes)
    args = {"a": a, "b": b, "out": torch.full((32, 32), float("nan"))}
    report = run(kernels.repacked_kernel, (1,), args, {}, arch="gfx950")
    assert report.clean, report
    np.testing.assert_array_equal(args["out"], x @ y.T)
