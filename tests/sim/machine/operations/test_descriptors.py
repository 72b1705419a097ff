"""Descriptors in im2col mode, padded with NaN, and rounding to tf32."""

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor, TensorDescriptorIm2Col
from triton.tools.tensor_descriptor import TensorDescriptor as PlainDescriptor

from tests.sim.machine.kernels import descriptor as kernels
from warpattn.sim import SimulationError, compile_for, simulate
from warpattn.sim import TensorDescriptor as Simulated
from warpattn.sim.host.launches import launches

PIXELS, CHANNELS = 32, 64


@pytest.mark.parametrize("stride", [1, 2])
def test_im2col_brings_what_a_convolution_multiplies(stride: int) -> None:
    """For each place of a 3 x 3 filter, with a border of 1, the pixels of the first outputs, as torch unfolds them."""
    torch.manual_seed(0)
    x = torch.randn(3, 7, 5, CHANNELS).half()
    columns = torch.nn.functional.unfold(x.permute(0, 3, 1, 2).float(), 3, padding=1, stride=stride)
    wanted = columns.unflatten(1, (CHANNELS, 3, 3)).permute(2, 3, 0, 4, 1).flatten(2, 3)  # [3, 3, outputs, channels]
    layout = gl.NVMMASharedLayout.get_default_for([PIXELS, CHANNELS], gl.float16)
    source = TensorDescriptorIm2Col.from_tensor(
        x, [PIXELS, CHANNELS], layout, pixel_box_lower_corner=[-1, -1], pixel_box_upper_corner=[-1, -1],
        element_strides=[1, stride, stride, 1],
    )  # fmt: skip
    found = torch.empty(PIXELS, CHANNELS).half()
    target = TensorDescriptor.from_tensor(found, [PIXELS, CHANNELS], layout)
    with launches("sm90", schedules="lazy") as runs:
        for down, right in ((0, 0), (1, 2), (2, 1)):
            kernels.pixels_kernel[(1,)](source, target, 0, -1, -1, down, right)
            expected = torch.zeros(PIXELS, CHANNELS)  # beyond the last batch entry
            part = wanted[down, right, :PIXELS]
            expected[: len(part)] = part
            assert torch.equal(found.float(), expected)
    assert runs.clean


@pytest.mark.parametrize("arch", ["sm90", "gfx950"])
@pytest.mark.parametrize("own", [False, True])
def test_nan_is_beyond_a_tensor_that_is_padded_with_it(arch: str, own: bool) -> None:
    x, out = torch.randn(20, 24), torch.empty(32, 32)
    with launches(arch) as runs:
        if own:
            kernels.own_corner_kernel[(1,)](x, out, 20, 20, 24, B=32)
        else:
            kernels.corner_kernel[(1,)](PlainDescriptor(x, [20, 20], [24, 1], [32, 32], padding="nan"), out, B=32)
    assert runs.clean and torch.equal(out[:4, :4], x[16:, 16:20])
    out[:4, :4] = torch.nan
    assert out.isnan().all()


def test_a_descriptor_may_round_to_tf32() -> None:
    x, out = torch.randn(48, 48), torch.empty(32, 32)
    with launches("sm90", schedules="lazy"):
        made = PlainDescriptor(x, [48, 48], [48, 1], [32, 32], round_f32_to_tf32=True)
        kernels.corner_kernel[(1,)](made, out, B=32)
    bits = out.view(torch.int32)
    assert (bits & 0x1FFF == 0).all() and ((out - x[16:, 16:]).abs() <= x[16:, 16:].abs() * 2**-11).all()


def test_the_mode_of_a_descriptor_is_that_of_the_kernel() -> None:
    layout = gl.NVMMASharedLayout.get_default_for([PIXELS, CHANNELS], gl.float16)
    tiled, pixels = (f"{name}<fp16[32, 64],{layout!r}>" for name in ("tensordesc", "tensordesc_im2col"))
    numbers = dict.fromkeys(("n", "h", "w", "down", "right"), "i32")
    compiled = compile_for("sm90", kernels.pixels_kernel, {"x": pixels, "out": tiled, **numbers})
    x = torch.zeros(PIXELS, CHANNELS).half()
    args = {"x": Simulated(x, (PIXELS, CHANNELS)), "out": x, **dict.fromkeys(numbers, 0)}
    with pytest.raises(SimulationError, match="x is not in im2col mode, unlike what the kernel takes"):
        simulate(compiled, (1,), args)
