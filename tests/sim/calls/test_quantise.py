"""The kernels that make 8-bit values, in the simulator: the same bits of values and scales as torch's operations."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import drawn
from warpattn.kernels.quantise.launch import quantise_launches
from warpattn.quantized import quantize
from warpattn.runtime.simulate import Options, run_launch
from warpattn.serving.quantizing import arguments

E4M3, E5M2, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz


def tokens(*shape: int, dtype: torch.dtype = torch.bfloat16, size: float = 1.0) -> torch.Tensor:
    """Rows of which one is 0 of both signs and one holds NaN and infinities."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * size
    x[..., 0, :] *= 0
    x[..., 1, 2:5] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    return x.to(dtype)


def given(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.01


X = tokens(2, 70, 3, 64)
CASES = {
    "tensor": ("sm90", X, E4M3, "tensor", None),
    "head": ("sm90", X, E4M3, "head", None),
    "token": ("sm90", X, E4M3, "token", None),
    "columns": ("sm90", tokens(70, 2, 256), E4M3, 64, None),
    "one-block": ("sm90", X, E4M3, 64, None),
    "two-dimensions": ("sm90", tokens(5, 128), E4M3, "token", None),
    "five-dimensions": ("sm90", tokens(2, 3, 5, 2, 64), E4M3, "token", None),
    "other-heads-between": ("sm90", tokens(2, 40, 6, 64)[:, :, 2:4], E4M3, "head", None),
    "odd-dim": ("sm90", tokens(2, 9, 3, 40)[..., :39], E4M3, "tensor", None),
    "columns-apart": ("sm90", tokens(2, 9, 3, 64).mT.contiguous().mT, E4M3, "head", None),
    "fp32": ("sm90", tokens(1, 33, 2, 128, dtype=torch.float32), E5M2, "token", None),
    "given-tensor": ("sm90", X, E4M3, "tensor", torch.tensor(0.003)),
    "given-heads": ("sm90", X, E4M3, "tensor", given(3)),
    "given-tokens": ("sm90", X, E4M3, "tensor", given(2, 70, 3)),
    "given-columns": ("sm90", tokens(70, 2, 256), E4M3, "tensor", given(70, 2, 2)),
    "tiny-scale": ("sm90", tokens(9, 2, 64, dtype=torch.float32, size=1e-42), E4M3, "tensor", torch.tensor(1e-44)),
    "huge-scale": ("sm90", tokens(9, 2, 64, dtype=torch.float32, size=1e37), E5M2, "tensor", torch.tensor(3e38)),
    "tiny": ("sm90", tokens(9, 2, 64, dtype=torch.float32, size=1e-38), E4M3, "token", None),
    "huge": ("sm90", tokens(9, 2, 64, dtype=torch.float32, size=1e37), E4M3, "head", None),
    "gfx942": ("gfx942", X.half(), FNUZ, "token", None),
    "gfx950": ("gfx950", X, E5M2, "head", None),
    "sm100": ("sm100", X, E4M3, "tensor", None),
}  # fmt: skip


TRANSPOSED = {
    "64": ("sm90", X, "head", None),
    "128": ("sm90", tokens(2, 101, 2, 128, dtype=torch.float16), "tensor", None),
    "256": ("sm90", tokens(1, 70, 2, 256), "head", given(2)),
    "fp32": ("sm90", tokens(2, 33, 2, 80, dtype=torch.float32), "tensor", torch.tensor(0.01)),
    "apart": ("sm90", tokens(3, 80, 6, 128)[:, :40, 2:4], "head", None),
    "sm100": ("sm100", X, "tensor", None),
    "gfx950": ("gfx950", X, "head", None),
}


@pytest.mark.parametrize("name", drawn(TRANSPOSED, ["64", "128", "apart"]))
def test_transposed_as_torch_makes_them(name):
    """Each byte of both forms is written."""
    arch, x, per, scale = TRANSPOSED[name]
    x = x.nan_to_num()
    expected = quantize(x, per=per, scale=scale, transposed=True)
    made, call = arguments(x, E4M3, per, scale, True)
    pairs = [(getattr(made, name).view(torch.uint8), getattr(expected, name).view(torch.uint8))
             for name in ("values", "transposed")]  # fmt: skip
    for found, _ in pairs:
        found.fill_(0x55)
    for launch in quantise_launches(arch, call):
        assert run_launch(launch, Options()).clean
    assert all(torch.equal(*pair) for pair in pairs) and torch.equal(made.scale, expected.scale)


@pytest.mark.parametrize("name", drawn(CASES, ["tensor", "head", "columns", "given-tokens", "tiny", "gfx942"]))
def test_as_torch_makes_them(name):
    arch, x, dtype, per, scale = CASES[name]
    expected = quantize(x, dtype, per=per, scale=scale)
    made, call = arguments(x, dtype, per, scale)
    if scale is None:
        made.scale.fill_(float("nan"))
    for launch in quantise_launches(arch, call):
        assert run_launch(launch, Options()).clean
    bits, wanted = (each.values.view(torch.uint8) for each in (made, expected))
    nan = made.values.float().isnan() & expected.values.float().isnan()
    assert bool(((bits == wanted) | nan).all()) and torch.equal(made.scale, expected.scale)
    assert made.scale.shape == expected.scale.shape and made.scale.stride() == expected.scale.stride()
