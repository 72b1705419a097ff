"""Matrix products of microscaled operands on gfx950, against torch's own formats and a table of fp4."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.sim.amd import kernels as kernels
from tests.sim.builds import run

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
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
